/* Memory pools, from which cuMemAllocAsync allocates. */
#ifndef SIMGPU_POOL_H
#define SIMGPU_POOL_H

#include "cuda/streams/context.h"

struct pool *pool_of_device(int device);

/* Free memory from a pool after the stream has reached the free. */
void pool_free(uint64_t address);

#endif
