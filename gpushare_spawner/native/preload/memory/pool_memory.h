/* Plain stream-ordered memory, and the pools of the driver that it comes from. A pool keeps what was freed in a stream
   until the stream has come there, and longer where the program sets a release threshold. So pools count with what they
   have reserved, not with what the program has allocated from them. Every function here takes a lock of its own, and
   calls the driver. */
#pragma once

#include "driver/gpus.h"

/* Bytes that pools have reserved, or that are being allocated from them if that is more. */
uint64_t pool_memory_bytes(const struct gpu *gpu);

/* The program allocates from the pool, which is on the GPU. False: no
   memory, the pool is not known. */
bool pool_memory_seen(struct gpu *gpu, CUmempool pool);

/* Bytes by which pool_memory_bytes grows when `bytes` are allocated from the pool: none where the driver has as much
   for reuse. */
uint64_t pool_memory_growth(const struct gpu *gpu, CUmempool pool, uint64_t bytes);

/* Have the driver give back what pools hold and nobody uses. `wait`: also what was freed in streams of the calling
   thread's context that have not come there, and so for all of the context's work, as the driver itself waits when a
   GPU's memory is short. True: the pools hold less than before. Nothing while the process is suspended. */
bool pool_memory_release(const struct gpu *gpu, bool wait);

/* The driver's own cuMemPoolDestroy; from now on the pool is not asked. */
CUresult pool_memory_destroy(CUmempool pool);

void pool_memory_forget(void); /* in a forked child */
