/* Memory of graphs' allocation nodes: the driver allocates it and has a figure for it. */
#pragma once

#include "driver/gpus.h"

/* Bytes that the driver holds for memory nodes of graphs. A call of the driver, where such nodes were seen. */
uint64_t graph_memory_asked(const struct gpu *gpu);
static inline uint64_t graph_memory_bytes(const struct gpu *gpu) {
    return unlikely(atomic_load_explicit(&gpu->graph_memory, memory_order_relaxed)) ? graph_memory_asked(gpu) : 0;
}

/* A graph gets a memory node: of which GPU is not known. */
void graph_memory_seen(void);
