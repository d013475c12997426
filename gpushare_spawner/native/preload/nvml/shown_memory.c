/* The share's memory as the GPU's. In a process that has called cuInit these are CUDA's own figures, in any other the
   agent's. */
#include "nvml/wrapped_nvml.h"
#include "wrappers/reported.h"

struct shown_memory {
    uint64_t total, used, available;
};

static bool memory_shown(nvmlDevice device, uint64_t really_free, struct shown_memory *shown) {
    unsigned char uuid[16];
    struct gpu_figures figures;
    if (!figures_wanted() || !real_nvml_uuid(device, uuid)) return false;
    struct gpu *gpu = __atomic_load_n(&gpu_count, __ATOMIC_ACQUIRE) ? gpu_of_uuid(uuid) : NULL;
    if (gpu && reported_memory(gpu, really_free, &shown->available, &shown->total, &shown->used)) return true;
    if (!figures_of(uuid, &figures)) return false;
    shown->total = figures.total;
    shown->used = figures.used < figures.total ? figures.used : figures.total;
    shown->available = shown->total - shown->used;
    if (!figures.movable && really_free < shown->available) shown->available = really_free;
    return true;
}

nvmlReturn wrapped_nvmlDeviceGetMemoryInfo(nvmlDevice device, nvmlMemory *memory) {
    struct shown_memory shown;
    if (!NVML_HAS(nvmlDeviceGetMemoryInfo)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    nvmlReturn result = real_nvml()->nvmlDeviceGetMemoryInfo(device, memory);
    if (result == NVML_SUCCESS && memory_shown(device, memory->free, &shown)) {
        memory->total = shown.total;
        memory->free = shown.available;
        memory->used = shown.total - shown.available; /* what is reserved among it */
    }
    return result;
}
EXPORTED(nvmlDeviceGetMemoryInfo);

nvmlReturn wrapped_nvmlDeviceGetMemoryInfo_v2(nvmlDevice device, nvmlMemory_v2 *memory) {
    struct shown_memory shown;
    if (!NVML_HAS(nvmlDeviceGetMemoryInfo_v2)) return NVML_ERROR_FUNCTION_NOT_FOUND;
    nvmlReturn result = real_nvml()->nvmlDeviceGetMemoryInfo_v2(device, memory);
    if (result == NVML_SUCCESS && memory_shown(device, memory->free, &shown)) {
        memory->total = shown.total;
        memory->free = shown.available;
        memory->used = shown.used;
        /* what neighbours keep from a share that cannot leave the GPU */
        memory->reserved = shown.total - shown.used - shown.available;
    }
    return result;
}
EXPORTED(nvmlDeviceGetMemoryInfo_v2);
