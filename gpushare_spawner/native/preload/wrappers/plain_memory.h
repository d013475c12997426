/* Device memory that is passed through and only counted: VMM, arrays, memory nodes of graphs. */
#pragma once

#include "driver/cuda_abi.h"

/* Mapped memory of VMM is shown to other processes, until it is released. Unknown memory is nothing. */
void plain_memory_exported(CUdeviceptr at);

void plain_memory_forget(void); /* in a forked child */
