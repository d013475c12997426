/* Memory use of a GPU or a MIG instance. */
#include "common/processes.h"
#include "nvml/library.h"

static void add_used(int number, void *data) {
    struct state *state = nvml_state();
    gpu_lock(state, number);
    struct gpu *gpu = &state->gpus[number];
    *(unsigned long long *)data += (gpu->frame_count - gpu->free.count) * state->settings.page;
    gpu_unlock(state, number);
}

static nvmlMemory_t memory_of(int number) {
    unsigned long long used = 0, total = mig_memory(nvml_state(), number);
    processes_reap(nvml_state(), 1);
    nvml_visit(number, add_used, &used);
    return (nvmlMemory_t){.total = total, .free = total - used, .used = used};
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    REQUIRE_DEVICE(device, memory);
    *memory = memory_of(nvml_number(device));
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    REQUIRE_DEVICE(device, memory);
    /* the first field of NVML's versioned structs contains their size and version */
    REQUIRE(memory->version == (sizeof *memory | 2u << 24), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    nvmlMemory_t now = memory_of(nvml_number(device));
    memory->total = now.total;
    memory->reserved = 0;
    memory->free = now.free;
    memory->used = now.used;
    return NVML_SUCCESS;
}

/* The window through which the host accesses VRAM, which is unused here. */
EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    REQUIRE_GPU(device, memory);
    *memory = (nvmlMemory_t){.total = 256u << 20, .free = 256u << 20, .used = 0};
    return NVML_SUCCESS;
}
