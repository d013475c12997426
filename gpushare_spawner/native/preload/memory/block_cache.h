/* Freed blocks of stream-ordered memory, kept for the next allocations. Knows nothing of how memory is allocated; frees
   with the driver what it gives back. Cached blocks stay accounted for as managed memory of the process (they do take
   memory), and struct gpu's `cached` says how much of that they are.

   Order of locks: captures_hold_off, contexts_lock, the cache's own, the accounts'. block_cache_take, block_cache_put
   and block_cache_stream_gone take the first and the third, and make driver calls that do not wait. */
#pragma once

#include "driver/gpus.h"

/* A stream as the cache knows it. `thread` tells the streams apart that share the handle CU_STREAM_PER_THREAD. */
struct cache_stream {
    CUcontext context; /* current to the thread that uses it */
    CUstream stream;
    uint64_t thread; /* block_cache_thread(); 0 for every other handle */
};

struct cached_memory {
    CUdeviceptr at;
    size_t capacity;
};

/* Take the smallest block of at least `bytes` and at most a quarter more: of the same stream at once, since the stream
   keeps the order, of another only when that stream has passed the free. `context` is that of the memory. */
bool block_cache_take(struct gpu *gpu, CUcontext context, const struct cache_stream *by, size_t bytes,
                      struct cached_memory *taken);

/* Keep a block that was freed in a stream. False: no memory for the record. */
bool block_cache_put(struct gpu *gpu, CUcontext context, const struct cache_stream *by, struct cached_memory block);

/* Whether a cached block begins here: the program has freed it already. For addresses that nobody knows; looks at all.
 */
bool block_cache_has(CUdeviceptr at);

/* Before `bytes` are asked of the driver in the calling thread's context: give blocks back, the oldest first, until no
   more is cached than the process has had in use at once since the last give-back. Waits for streams, 30 s at most, and
   for the device: with no lock held. */
void block_cache_make_room(struct gpu *gpu, CUcontext current, size_t bytes);

/* Give back blocks of the calling thread's context, `bytes` at least, waiting for their streams and for the
   device: with no lock held. True if any was. */
bool block_cache_trim(struct gpu *gpu, size_t bytes);

/* For the background thread. All take the turn of captures.h and contexts_lock. */
void block_cache_quiet(struct gpu *gpu);     /* a burst is over: record marks */
void block_cache_give_back(struct gpu *gpu); /* all work is over: begin */
/* Go on, a millisecond at most; when to look again. `work_may_come`: end it, the next free could wait for new work. */
uint64_t block_cache_step(struct gpu *gpu, uint64_t now, bool work_may_come);

/* The calling thread's number, never used twice in a process. */
uint64_t block_cache_thread(void);

void block_cache_stream_gone(CUstream stream);
void block_cache_context_gone(CUcontext context);

/* Whether there are blocks that belong to the context or were freed in its streams. */
bool block_cache_of_context(CUcontext context);
/* The context goes and its memory stays, as another's: its blocks are the other's from now on. Its work is over. */
void block_cache_context_moved(CUcontext from, CUcontext to);
void block_cache_forget(void); /* in a forked child */
