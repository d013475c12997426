#include "memory/graph_memory.h"

#include "driver/driver.h"

uint64_t graph_memory_asked(const struct gpu *gpu) {
    uint64_t bytes = 0;
    if (real.cuDeviceGetGraphMemAttribute(gpu->device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &bytes) != CUDA_SUCCESS)
        return 0;
    return bytes;
}

void graph_memory_seen(void) {
    for (int i = 0; i < gpu_count; i++) atomic_store(&gpus[i].graph_memory, true);
}
