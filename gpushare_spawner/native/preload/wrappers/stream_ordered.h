/* cuMemAllocAsync and its kin, served by managed memory with a free that keeps the stream's order. */
#pragma once

#include "driver/gpus.h"

/* Give freed blocks of the calling thread's context back to the driver, `bytes` of them at least; waits for the streams
   that have not passed them. True if any was given back. */
bool stream_ordered_trim(struct gpu *gpu, size_t bytes);

void stream_ordered_forget(void); /* in a forked child */
