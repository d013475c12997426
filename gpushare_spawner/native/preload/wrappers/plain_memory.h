/* Device memory that is passed through and only counted: VMM, arrays, memory nodes of graphs. */
#pragma once

#include "driver/gpus.h"

/* Bytes that the driver holds for memory nodes of graphs. */
uint64_t graph_memory_asked(const struct gpu *gpu);
static inline uint64_t graph_memory_bytes(const struct gpu *gpu) {
    return unlikely(atomic_load_explicit(&gpu->graph_memory, memory_order_relaxed)) ? graph_memory_asked(gpu) : 0;
}

void plain_memory_forget(void); /* in a forked child */
