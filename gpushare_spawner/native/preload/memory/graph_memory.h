/* Memory of graphs' allocation nodes: the driver allocates it and has a figure for it. */
#pragma once

#include "driver/gpus.h"

/* Bytes that the driver holds for memory nodes of graphs; 0 where none were seen. A call of the driver. */
uint64_t graph_memory_bytes(const struct gpu *gpu);

/* A graph gets a memory node: of which GPU is not known; of this GPU. */
void graph_memory_seen(void);
void graph_memory_seen_on(struct gpu *gpu);
