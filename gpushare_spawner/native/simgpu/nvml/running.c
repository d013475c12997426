/* Which processes use a GPU. */
#include "../common/processes.h"
#include "library.h"

/* A process is on a GPU from the creation of its first context there to the end of the last. */
static unsigned list(int gpu, nvmlProcessInfo_t *out, unsigned room) {
    struct state *state = nvml_state();
    unsigned count = 0;
    processes_reap(state, 1);
    gpu_lock(state, gpu);
    for (unsigned slot = 0; slot < MAX_PROCESSES; slot++) {
        int32_t pid = state->processes[slot].pid;
        if (pid == 0 || !state->gpus[gpu].contexts[slot]) continue;
        if (count < room)
            out[count] = (nvmlProcessInfo_t){.pid = (unsigned)pid,
                                             .used = state->gpus[gpu].held[slot] * state->settings.page,
                                             .gpu_instance = ~0u,
                                             .compute_instance = ~0u};
        count++;
    }
    gpu_unlock(state, gpu);
    return count;
}

static nvmlReturn_t tell(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *out) {
    REQUIRE_DEVICE(device, count);
    unsigned room = out ? *count : 0;
    *count = list(nvml_gpu(device), out, room);
    return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                            nvmlProcessInfo_t *out) {
    return tell(device, count, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count,
                                                            nvmlProcessInfo_t *out) {
    return tell(device, count, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count,
                                                         nvmlProcessInfo_v1_t *out) {
    nvmlProcessInfo_t found[MAX_PROCESSES];
    REQUIRE_DEVICE(device, count);
    unsigned room = out ? *count : 0, there = list(nvml_gpu(device), found, MAX_PROCESSES);
    for (unsigned i = 0; i < there && i < room; i++) out[i] = (nvmlProcessInfo_v1_t){found[i].pid, found[i].used};
    *count = there;
    return there > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* Nothing draws on a simulated GPU, and there is no MPS. */
static nvmlReturn_t none(nvmlDevice_t device, unsigned *count) {
    REQUIRE_DEVICE(device, count);
    *count = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                             nvmlProcessInfo_t *out) {
    return none(device, count);
}

EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v2(nvmlDevice_t device, unsigned *count,
                                                             nvmlProcessInfo_t *out) {
    return none(device, count);
}

EXPORT nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                               nvmlProcessInfo_t *out) {
    return none(device, count);
}

EXPORT nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count,
                                                               nvmlProcessInfo_t *out) {
    return none(device, count);
}
