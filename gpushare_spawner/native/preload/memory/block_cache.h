/* The cache of freed blocks of stream-ordered memory, which are kept for the next allocations. It allocates no memory
   and returns blocks to the driver. Cached blocks stay counted as the process's managed memory; struct gpu's `cached`
   is their sum.

   Order of locks: captures_lock, contexts_lock, the cache's own lock, the accounts' lock. block_cache_take,
   block_cache_put and block_cache_remove_stream take the first and the third, and make only driver calls that do not
   wait. */
#pragma once

#include "driver/gpus.h"

/* The identity of a stream. `thread` distinguishes the streams that share the handle CU_STREAM_PER_THREAD. */
struct cache_stream {
    CUcontext context; /* current to the thread that uses the stream */
    CUstream stream;
    uint64_t thread; /* block_cache_thread(); 0 for every other handle */
};

struct cached_memory {
    CUdeviceptr at;
    size_t capacity;
};

/* Take the smallest block of at least `bytes` and at most a quarter more: from the same stream immediately, because the
   stream keeps the order; from another stream only if it has passed the free. `context`: the memory's context. */
bool block_cache_take(struct gpu *gpu, CUcontext context, const struct cache_stream *by, size_t bytes,
                      struct cached_memory *taken);

/* Keep a block that was freed in a stream. False: no memory for the record. */
bool block_cache_put(struct gpu *gpu, CUcontext context, const struct cache_stream *by, struct cached_memory block);

/* Whether a cached block, which the program has already freed, begins at this address. For addresses without a record;
   searches all blocks. */
bool block_cache_has(CUdeviceptr at);

/* Before an allocation of `bytes` in the calling thread's context: return blocks to the driver, oldest first, until the
   cache is not larger than the largest amount in use since all blocks were last returned. Waits for streams, at most 30
   s, and for the device; the caller must hold no lock. */
void block_cache_make_room(struct gpu *gpu, CUcontext current, size_t bytes);

/* Return at least `bytes` of blocks of the calling thread's context to the driver. Waits for their streams and for the
   device; the caller must hold no lock. True if any block was returned. */
bool block_cache_trim(struct gpu *gpu, size_t bytes);

/* For the background thread. All take captures_lock and contexts_lock. */
void block_cache_quiet(struct gpu *gpu);     /* after a burst: record marks */
void block_cache_give_back(struct gpu *gpu); /* after all work: begin to return all blocks */
/* Continue for at most a millisecond; returns the instant of the next step. `work_may_come`: stop, because the next
   free could wait for new work. */
uint64_t block_cache_step(struct gpu *gpu, uint64_t now, bool work_may_come);

/* Return the calling thread's number, which is unique in the process. */
uint64_t block_cache_thread(void);

/* Called before a stream is destroyed, and after a context is destroyed with its memory. */
void block_cache_remove_stream(CUstream stream);
void block_cache_remove_context(CUcontext context);

/* Whether there are blocks that belong to the context or were freed in its streams. */
bool block_cache_has_context(CUcontext context);
/* Move the blocks of a destroyed context, whose work is done, to the context that retains its memory. */
void block_cache_move_context(CUcontext from, CUcontext to);
