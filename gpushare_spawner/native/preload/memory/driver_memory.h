/* Device memory that the driver holds by itself: for memory nodes of graphs, and in the pools of plain stream-ordered
   memory. The driver has figures for both, which are asked for when they count.

   A pool keeps what was freed in a stream until the stream has come there, and longer where the program sets a release
   threshold. So a pool counts with what it has reserved, not with what the program has allocated from it. */
#pragma once

#include "driver/gpus.h"

/* Bytes that the driver holds: for memory nodes of graphs, and in pools. Calls of the driver, where there are any. */
uint64_t driver_memory_asked(const struct gpu *gpu);
static inline uint64_t driver_memory_bytes(const struct gpu *gpu) {
    return unlikely(atomic_load_explicit(&gpu->driver_memory, memory_order_relaxed)) ? driver_memory_asked(gpu) : 0;
}

/* A graph gets a memory node: of which GPU is not known; of this GPU. */
void graph_memory_seen(void);
void graph_memory_seen_on(struct gpu *gpu);

/* The program allocates from the pool, which is on the GPU. Takes a lock of this file, as all below do. False: no
   memory, the pool is not known. */
bool pool_memory_seen(struct gpu *gpu, CUmempool pool);

/* Bytes by which driver_memory_bytes grows when `bytes` are allocated from the pool: none where the driver has as much
   for reuse. */
uint64_t pool_memory_growth(const struct gpu *gpu, CUmempool pool, uint64_t bytes);

/* Have the driver give back what pools hold and nobody uses. `wait`: also what was freed in streams of the calling
   thread's context that have not come there, and so for all of the context's work, as the driver itself waits when a
   GPU's memory is short. True: the pools hold less than before. */
bool pool_memory_release(const struct gpu *gpu, bool wait);

/* The driver's own cuMemPoolDestroy; from now on the pool is not asked. */
CUresult pool_memory_destroy(CUmempool pool);

void driver_memory_forget(void); /* in a forked child */
