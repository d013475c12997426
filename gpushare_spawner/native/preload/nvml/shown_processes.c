/* The processes on a GPU: the session's, all of them as compute processes. What NVML lists beside these, with the pids
   of whoever it is, is not listed: nothing says which of it is the session's. */
#include "nvml/wrapped_nvml.h"

/* NVML's convention: `count` is the room of `out`, which may be missing where that is 0, and says afterwards how many
   there are. `put` writes one of them. */
static nvmlReturn tell(const struct gpu_figures *figures, unsigned *count, void *out,
                       void (*put)(void *out, unsigned at, const struct process_figures *process)) {
    unsigned there = (unsigned)figures->processes, room = *count;
    if (room && !out) return NVML_ERROR_INVALID_ARGUMENT;
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
        if (!count || !nvml_processes_of(device, &figures)) return real_nvml()->name(device, count, out);              \
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
    if (!list || list->version != NVML_VERSION_OF(nvmlProcessDetails, 1) || list->mode > NVML_MODE_MPS ||
        !nvml_processes_of(device, &figures))
        return real_nvml()->nvmlDeviceGetRunningProcessDetailList(device, list);
    if (list->mode != NVML_MODE_COMPUTE) figures.processes = 0;
    return tell(&figures, &list->count, list->entries, put_detail);
}
EXPORTED(nvmlDeviceGetRunningProcessDetailList);

/* Lists that have pids too: of finished processes, of those that encode or capture video. NVML's answer, had it
   none. */
static nvmlReturn empty(nvmlReturn (*list)(nvmlDevice, unsigned *, void *), nvmlDevice device) {
    unsigned long long scratch; /* of no entry: there is room for none */
    unsigned count = 0;
    nvmlReturn result = list(device, &count, &scratch);
    return result == NVML_ERROR_INSUFFICIENT_SIZE ? NVML_SUCCESS : result;
}

#define EMPTY(name)                                                                                                    \
    nvmlReturn wrapped_##name(nvmlDevice device, unsigned *count, void *out) {                                         \
        if (!NVML_HAS(name)) return NVML_ERROR_FUNCTION_NOT_FOUND;                                                     \
        if (!count || !figures_wanted()) return real_nvml()->name(device, count, out);                                 \
        nvmlReturn result = empty(real_nvml()->name, device);                                                          \
        if (result == NVML_SUCCESS) *count = 0;                                                                        \
        return result;                                                                                                 \
    }                                                                                                                  \
    EXPORTED(name);

EMPTY(nvmlDeviceGetAccountingPids)
EMPTY(nvmlDeviceGetEncoderSessions)
EMPTY(nvmlDeviceGetFBCSessions)

/* The driver's answer about a process of which it has kept nothing. */
static nvmlReturn not_accounted(nvmlDevice device) {
    nvmlReturn result = real_nvml()->nvmlDeviceGetAccountingPids
                            ? empty(real_nvml()->nvmlDeviceGetAccountingPids, device)
                            : NVML_ERROR_FUNCTION_NOT_FOUND;
    return result == NVML_SUCCESS ? NVML_ERROR_NOT_FOUND : result;
}

nvmlReturn wrapped_nvmlDeviceGetAccountingStats(nvmlDevice device, unsigned pid, void *out) {
    if (!NVML_HAS(nvmlDeviceGetAccountingStats)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!out || !figures_wanted()) return real_nvml()->nvmlDeviceGetAccountingStats(device, pid, out);
    return not_accounted(device);
}
EXPORTED(nvmlDeviceGetAccountingStats);

nvmlReturn wrapped_nvmlDeviceGetAccountingStats_v2(nvmlDevice device, void *out) {
    if (!NVML_HAS(nvmlDeviceGetAccountingStats_v2)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!out || !figures_wanted()) return real_nvml()->nvmlDeviceGetAccountingStats_v2(device, out);
    return not_accounted(device);
}
EXPORTED(nvmlDeviceGetAccountingStats_v2);
