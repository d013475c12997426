/* How much of a GPU's memory is taken. */
#include "common/processes.h"
#include "nvml/library.h"

static nvmlMemory_t memory_of(int gpu) {
    struct state *state = nvml_state();
    processes_reap(state, 1);
    gpu_lock(state, gpu);
    unsigned long long free = state->gpus[gpu].free.count * state->settings.page;
    gpu_unlock(state, gpu);
    return (nvmlMemory_t){.total = state->settings.memory, .free = free, .used = state->settings.memory - free};
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    REQUIRE_DEVICE(device, memory);
    *memory = memory_of(nvml_gpu(device));
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    REQUIRE_DEVICE(device, memory);
    /* NVML's versioned structs say their size and version in the first field */
    REQUIRE(memory->version == (sizeof *memory | 2u << 24), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    nvmlMemory_t now = memory_of(nvml_gpu(device));
    memory->total = now.total;
    memory->reserved = 0;
    memory->free = now.free;
    memory->used = now.used;
    return NVML_SUCCESS;
}

/* The window through which the host sees VRAM: nothing uses it here. */
EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    REQUIRE_DEVICE(device, memory);
    *memory = (nvmlMemory_t){.total = 256u << 20, .free = 256u << 20, .used = 0};
    return NVML_SUCCESS;
}
