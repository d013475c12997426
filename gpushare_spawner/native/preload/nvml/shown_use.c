/* How busy the GPU is: by the session alone, in percent of the whole GPU's time over the last second. */
#include "nvml/wrapped_nvml.h"

nvmlReturn wrapped_nvmlDeviceGetUtilizationRates(nvmlDevice device, nvmlUtilization *rates) {
    struct gpu_figures figures;
    if (!NVML_HAS(nvmlDeviceGetUtilizationRates)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    nvmlReturn result = real_nvml()->nvmlDeviceGetUtilizationRates(device, rates);
    if (result != NVML_SUCCESS || !nvml_figures_of(device, &figures) || !figures.with_use) return result;
    /* nobody says who has kept the memory busy: it is taken to be in proportion to the time */
    unsigned whole = rates->gpu > figures.percent ? rates->gpu : figures.percent;
    rates->memory = whole ? rates->memory * figures.percent / whole : 0;
    rates->gpu = figures.percent;
    return result;
}
EXPORTED(nvmlDeviceGetUtilizationRates);

/* Processes that computed, if the figures are newer than `seen`, which is microseconds since the epoch. */
static unsigned at_work(const struct gpu_figures *figures, unsigned long long seen,
                        const struct process_figures *found[FIGURES_PROCESSES]) {
    unsigned count = 0;
    for (int i = 0; figures->at > seen && i < figures->processes; i++)
        if (figures->process[i].percent) found[count++] = &figures->process[i];
    return count;
}

/* NVML's convention: none is NVML_ERROR_NOT_FOUND, and a buffer that is too small, or missing, is asked for with the
   size that always suffices. */
static nvmlReturn room_for(unsigned there, unsigned *count, const void *out) {
    unsigned room = out ? *count : 0;
    if (!there) return NVML_ERROR_NOT_FOUND;
    *count = room < there ? FIGURES_PROCESSES : there;
    return room < there ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

nvmlReturn wrapped_nvmlDeviceGetProcessUtilization(nvmlDevice device, nvmlProcessUse *out, unsigned *count,
                                                   unsigned long long seen) {
    struct gpu_figures figures;
    const struct process_figures *found[FIGURES_PROCESSES];
    if (!NVML_HAS(nvmlDeviceGetProcessUtilization)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!count || !nvml_processes_of(device, &figures))
        return real_nvml()->nvmlDeviceGetProcessUtilization(device, out, count, seen);
    unsigned there = at_work(&figures, seen, found);
    nvmlReturn result = room_for(there, count, out);
    for (unsigned i = 0; result == NVML_SUCCESS && i < there; i++)
        out[i] = (nvmlProcessUse){.pid = found[i]->pid, .at = figures.at, .sm = found[i]->percent};
    return result;
}
EXPORTED(nvmlDeviceGetProcessUtilization);

nvmlReturn wrapped_nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice device, nvmlProcessUses *list) {
    struct gpu_figures figures;
    const struct process_figures *found[FIGURES_PROCESSES];
    if (!NVML_HAS(nvmlDeviceGetProcessesUtilizationInfo)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!list || list->version != NVML_VERSION_OF(nvmlProcessUses, 1) || !nvml_processes_of(device, &figures))
        return real_nvml()->nvmlDeviceGetProcessesUtilizationInfo(device, list);
    unsigned there = at_work(&figures, list->last_seen, found);
    nvmlReturn result = room_for(there, &list->count, list->entries);
    for (unsigned i = 0; result == NVML_SUCCESS && i < there; i++)
        list->entries[i] = (nvmlProcessUseDetail){.at = figures.at, .pid = found[i]->pid, .sm = found[i]->percent};
    return result;
}
EXPORTED(nvmlDeviceGetProcessesUtilizationInfo);
