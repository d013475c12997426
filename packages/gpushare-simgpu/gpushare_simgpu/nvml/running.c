/* The processes that use a GPU, and their use. */
#include <time.h>

#include "common/clock.h"
#include "common/engines.h"
#include "common/processes.h"
#include "nvml/library.h"

struct listing {
    const int32_t *pids; /* by slot */
    nvmlProcessInfo_t *out;
    unsigned room, count;
};

/* A process is on a GPU from the creation of its first context there to the end of the last. */
static void add_processes(int number, void *data) {
    struct state *state = nvml_state();
    struct listing *listing = data;
    struct gpu *gpu = &state->gpus[number];
    int instance = mig_is_instance(state, number);
    gpu_lock(state, number);
    for (unsigned slot = 0; slot < MAX_PROCESSES; slot++) {
        int32_t pid = state->processes[slot].pid ? listing->pids[slot] : 0;
        if (pid == 0 || !gpu->contexts[slot]) continue;
        if (listing->count < listing->room)
            listing->out[listing->count] = (nvmlProcessInfo_t){
                .pid = (unsigned)pid,
                .used = gpu->held[slot] * state->settings.page,
                .gpu_instance = instance ? mig_profile_id(gpu->place) : ~0u,
                .compute_instance = instance ? 0 : ~0u,
            };
        listing->count++;
    }
    gpu_unlock(state, number);
}

static unsigned list(int number, nvmlProcessInfo_t *out, unsigned room) {
    struct state *state = nvml_state();
    int32_t pids[MAX_PROCESSES];
    struct listing listing = {pids, out, room, 0};
    processes_reap(state, 1);
    for (unsigned slot = 0; slot < MAX_PROCESSES; slot++)
        pids[slot] = state->processes[slot].pid ? processes_pid(state, slot) : 0;
    nvml_visit(number, add_processes, &listing);
    return listing.count;
}

static nvmlReturn_t tell(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *out) {
    REQUIRE_DEVICE(device, count);
    unsigned room = out ? *count : 0;
    *count = list(nvml_number(device), out, room);
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
    unsigned room = out ? *count : 0, there = list(nvml_number(device), found, MAX_PROCESSES);
    for (unsigned i = 0; i < there && i < room; i++) out[i] = (nvmlProcessInfo_v1_t){found[i].pid, found[i].used};
    *count = there;
    return there > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_v1_t *out) {
    nvmlProcessInfo_t found[MAX_PROCESSES];
    REQUIRE_DEVICE(device, out);
    REQUIRE(out->version == (sizeof *out | 1u << 24), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    unsigned room = out->entries ? out->count : 0;
    unsigned there = out->mode == 0 ? list(nvml_number(device), found, MAX_PROCESSES) : 0; /* 0: compute */
    for (unsigned i = 0; i < there && i < room; i++)
        out->entries[i] = (nvmlProcessDetail_v1_t){.pid = found[i].pid,
                                                   .used = found[i].used,
                                                   .gpu_instance = found[i].gpu_instance,
                                                   .compute_instance = found[i].compute_instance,
                                                   .used_protected = ~0ull};
    out->count = there;
    return there > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* There is no graphics and no MPS on a simulated GPU. */
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

/* Convert an instant of the simulator to microseconds of CLOCK_REALTIME. */
static uint64_t wall_us(uint64_t instant, int64_t offset_ns) {
    return (uint64_t)((int64_t)instant + offset_ns) / 1000;
}

/* As in NVML: one entry for each process that computed since `seen`, with its mean over all samples since then, and the
 * time of the latest sample in which it computed. As in the driver, the requested buffer has a fixed size, so that the
 * number of processes may grow between the two calls. */
EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *out,
                                                    unsigned *count, unsigned long long seen) {
    /* the clocks are not read simultaneously, so the end of a period varies by microseconds between calls */
    enum { SAME_US = 10000 };
    struct timespec wall;
    uint64_t first, last;
    int32_t pids[MAX_PROCESSES];
    unsigned found = 0;
    REQUIRE_UNDIVIDED(device, count);
    struct state *state = nvml_state();
    struct gpu *gpu = &state->gpus[nvml_number(device)];
    uint64_t now = clock_now(), end = engine_periods(now, &first);
    clock_gettime(CLOCK_REALTIME, &wall);
    int64_t offset = (int64_t)wall.tv_sec * (int64_t)NS_PER_SECOND + wall.tv_nsec - (int64_t)now;
    while (first < end && wall_us((first + 1) * USAGE_PERIOD_NS, offset) <= seen + (seen ? SAME_US : 0)) first++;
    processes_reap(state, 0);
    for (unsigned slot = 0; slot < MAX_PROCESSES; slot++) pids[slot] = processes_pid(state, slot);
    gpu_lock(state, nvml_number(device));
    for (unsigned slot = 0; slot < MAX_PROCESSES && first < end; slot++) {
        uint64_t ns = engine_usage(gpu, slot, first, end, &last), window = (end - first) * USAGE_PERIOD_NS;
        unsigned percent = (unsigned)((ns * 100 + window / 2) / window);
        if (!pids[slot] || !percent) continue;
        if (out && found < *count)
            out[found] = (nvmlProcessUtilizationSample_t){.pid = (unsigned)pids[slot],
                                                          .at = wall_us((last + 1) * USAGE_PERIOD_NS, offset),
                                                          .sm = percent > 100 ? 100 : percent};
        found++;
    }
    gpu_unlock(state, nvml_number(device));
    REQUIRE(found, NVML_ERROR_NOT_FOUND);
    int fits = out && found <= *count;
    *count = out ? found : MAX_PROCESSES;
    return fits ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_v1_t *out) {
    nvmlProcessUtilizationSample_t found[MAX_PROCESSES];
    unsigned count = MAX_PROCESSES;
    REQUIRE_DEVICE(device, out);
    REQUIRE(out->version == (sizeof *out | 1u << 24), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    nvmlReturn_t result = nvmlDeviceGetProcessUtilization(device, found, &count, out->seen);
    REQUIRE(result == NVML_SUCCESS, result);
    int fits = out->entries && out->count >= count;
    for (unsigned i = 0; fits && i < count; i++)
        out->entries[i] = (nvmlProcessUtilizationInfo_v1_t){.at = found[i].at, .pid = found[i].pid, .sm = found[i].sm};
    out->count = fits ? count : MAX_PROCESSES;
    return fits ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}
