#include "memory/driver_memory.h"

#include "memory/graph_memory.h"
#include "memory/pool_memory.h"

uint64_t driver_memory_asked(const struct gpu *gpu) {
    return graph_memory_bytes(gpu) + pool_memory_bytes(gpu);
}
