#include "memory/graph_memory.h"

#include "driver/driver.h"

void graph_memory_seen_on(struct gpu *gpu) {
    atomic_fetch_or(&gpu->driver_memory, DRIVER_MEMORY_OF_GRAPHS);
}

void graph_memory_seen(void) {
    for (int i = 0; i < gpu_count; i++) graph_memory_seen_on(&gpus[i]);
}

uint64_t graph_memory_bytes(const struct gpu *gpu) {
    uint64_t bytes = 0;
    if (!(atomic_load(&gpu->driver_memory) & DRIVER_MEMORY_OF_GRAPHS) ||
        real.cuDeviceGetGraphMemAttribute(gpu->device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &bytes) != CUDA_SUCCESS)
        return 0;
    return bytes;
}
