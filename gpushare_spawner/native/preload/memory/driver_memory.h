/* Device memory that the driver holds by itself, and has figures for: for memory nodes of graphs, and in pools. */
#pragma once

#include "driver/gpus.h"

/* Bytes of both kinds. Calls of the driver, where there are any; while the process is suspended what it said last. */
uint64_t driver_memory_asked(const struct gpu *gpu);
static inline uint64_t driver_memory_bytes(const struct gpu *gpu) {
    return unlikely(atomic_load_explicit(&gpu->driver_memory, memory_order_relaxed)) ? driver_memory_asked(gpu) : 0;
}
