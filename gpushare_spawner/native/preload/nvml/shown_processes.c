/* The processes on a GPU: the session's, all of them as compute processes. */
#include "nvml/wrapped_nvml.h"

/* NVML's convention: `count` is the room of `out`, and says afterwards how many there are. `put` writes one of them. */
static nvmlReturn tell(const struct gpu_figures *figures, unsigned *count, void *out,
                       void (*put)(void *out, unsigned at, const struct process_figures *process)) {
    unsigned there = (unsigned)figures->processes, room = out ? *count : 0;
    for (unsigned i = 0; i < there && i < room; i++) put(out, i, &figures->process[i]);
    *count = there;
    return there > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static void put_v1(void *out, unsigned at, const struct process_figures *process) {
    ((nvmlProcess_v1 *)out)[at] = (nvmlProcess_v1){.pid = process->pid, .used = process->bytes};
}

static void put_v2(void *out, unsigned at, const struct process_figures *process) {
    ((nvmlProcess_v2 *)out)[at] = (nvmlProcess_v2){
        .pid = process->pid, .used = process->bytes, .gpu_instance = NVML_NO_ID, .compute_instance = NVML_NO_ID};
}

static void put_detail(void *out, unsigned at, const struct process_figures *process) {
    ((nvmlProcessDetail *)out)[at] = (nvmlProcessDetail){.pid = process->pid,
                                                         .used = process->bytes,
                                                         .gpu_instance = NVML_NO_ID,
                                                         .compute_instance = NVML_NO_ID,
                                                         .used_protected = NVML_NO_VALUE};
}

#define LISTS(name, type, put, compute)                                                                                \
    nvmlReturn wrapped_##name(nvmlDevice device, unsigned *count, type *out) {                                         \
        struct gpu_figures figures;                                                                                    \
        if (!NVML_HAS(name)) return NVML_ERROR_FUNCTION_NOT_FOUND;                                                     \
        if (!count || !nvml_figures_of(device, &figures)) return real_nvml.name(device, count, out);                   \
        if (!(compute)) figures.processes = 0;                                                                         \
        return tell(&figures, count, out, put);                                                                        \
    }                                                                                                                  \
    EXPORTED(name);

LISTS(nvmlDeviceGetComputeRunningProcesses, nvmlProcess_v1, put_v1, true)
LISTS(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcess_v2, put_v2, true)
LISTS(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcess_v2, put_v2, true)
LISTS(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcess_v1, put_v1, false)
LISTS(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcess_v2, put_v2, false)
LISTS(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcess_v2, put_v2, false)
LISTS(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcess_v1, put_v1, false)
LISTS(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcess_v2, put_v2, false)
LISTS(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcess_v2, put_v2, false)

nvmlReturn wrapped_nvmlDeviceGetRunningProcessDetailList(nvmlDevice device, nvmlProcessDetails *list) {
    struct gpu_figures figures;
    if (!NVML_HAS(nvmlDeviceGetRunningProcessDetailList)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!list || list->version != NVML_VERSION_OF(nvmlProcessDetails, 1) || !nvml_figures_of(device, &figures))
        return real_nvml.nvmlDeviceGetRunningProcessDetailList(device, list);
    if (list->mode != NVML_MODE_COMPUTE) figures.processes = 0;
    return tell(&figures, &list->count, list->entries, put_detail);
}
EXPORTED(nvmlDeviceGetRunningProcessDetailList);
