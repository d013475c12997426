/* Memory pools: what cuMemAllocAsync takes from. */
#ifndef SIMGPU_POOL_H
#define SIMGPU_POOL_H

#include "cuda/streams/context.h"

struct pool *pool_of_device(int device);

/* Frees what a pool gave: the stream has come to the free. */
void pool_free(uint64_t address);

#endif
