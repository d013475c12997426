/* Device memory that is passed through and only counted: VMM, arrays, memory nodes of graphs. */
#pragma once

#include "gpus.h"

/* Bytes that the driver holds for memory nodes of graphs. */
uint64_t graph_memory_bytes(const struct gpu *gpu);

void plain_memory_forget(void); /* in a forked child */
