/* The VRAM that a context itself takes, SIMGPU_CONTEXT_MEMORY. */
#ifndef SIMGPU_CONTEXT_MEMORY_H
#define SIMGPU_CONTEXT_MEMORY_H

#include "cuda/streams/context.h"

/* Takes it, evicting managed pages; waits for the evictions. CUDA_ERROR_OUT_OF_MEMORY where there is not as much. */
CUresult context_memory_take(struct context *context);

/* How many pages it is, and the number of them that a claim evicted. With the GPU's lock held, and enough pages that
 * are free or managed. */
uint32_t context_memory_pages(void);
uint64_t context_memory_claim(struct context *context);

/* Gives the pages back; they can be claimed again. Takes the GPU's lock. */
void context_memory_release(struct context *context);

/* Gives the pages back for good. */
void context_memory_drop(struct context *context);

#endif
