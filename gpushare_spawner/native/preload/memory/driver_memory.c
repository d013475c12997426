#include "memory/driver_memory.h"

#include "driver/suspension.h"
#include "memory/graph_memory.h"
#include "memory/pool_memory.h"

static _Atomic uint64_t last[MAX_GPUS];

uint64_t driver_memory_asked(const struct gpu *gpu) {
    if (suspension_stops_background()) return atomic_load(&last[gpu->index]); /* the driver may block the question */
    uint64_t bytes = graph_memory_bytes(gpu) + pool_memory_bytes(gpu);
    atomic_store(&last[gpu->index], bytes);
    return bytes;
}
