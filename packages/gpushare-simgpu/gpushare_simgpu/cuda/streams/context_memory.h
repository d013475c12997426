/* The VRAM that a context itself takes, SIMGPU_CONTEXT_MEMORY. */
#ifndef SIMGPU_CONTEXT_MEMORY_H
#define SIMGPU_CONTEXT_MEMORY_H

#include "cuda/streams/context.h"

/* Take the memory, evicting managed pages; waits for the evictions. CUDA_ERROR_OUT_OF_MEMORY if there is not enough. */
CUresult context_memory_take(struct context *context);

/* Return the number of pages, and the number of pages that a claim evicted. With the GPU's lock held, and enough free
 * or managed pages. */
uint32_t context_memory_pages(void);
uint64_t context_memory_claim(struct context *context);

/* Release the pages; they can be claimed again. Takes the GPU's lock. */
void context_memory_release(struct context *context);

/* Release the pages permanently. */
void context_memory_drop(struct context *context);

#endif
