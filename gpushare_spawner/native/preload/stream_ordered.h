/* cuMemAllocAsync and its kin, served by managed memory with a free that keeps the stream's order. */
#pragma once

#include "gpus.h"

/* Free the parked blocks whose streams have passed them. True if any was freed. */
bool stream_ordered_trim(struct gpu *gpu);

/* For the background thread, while a GPU is known to be quiet. Takes the lock of contexts.c. */
void stream_ordered_quiet(struct gpu *gpu);

void stream_ordered_stream_gone(CUstream stream);
void stream_ordered_context_gone(CUcontext context);
void stream_ordered_forget(void); /* in a forked child */
