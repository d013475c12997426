/* The device memory of this process on each GPU, in bytes: the sums of its allocations (struct gpu's `managed` and
   `plain`), and the memory that the driver itself holds, for memory nodes of graphs and in pools.

   The sums are changed with a lock held, so that no change needs an atomic read-modify-write; they may be read without
   the lock. The records of allocations.c use the same lock: an allocation is counted and recorded in one step. */
#pragma once

#include "driver/gpus.h"

/* The lock. Its release is a plain store, unlike a mutex's. It is held for tens of nanoseconds, except while the pager
   walks over the allocations; a waiting thread sleeps after a short time. Taken after every other lock. */
HIDDEN _Atomic bool account_taken;
void account_lock_contended(void) __attribute__((cold, noinline));

static inline void account_lock(void) {
    if (unlikely(atomic_exchange_explicit(&account_taken, true, memory_order_acquire))) account_lock_contended();
}

static inline void account_unlock(void) {
    atomic_store_explicit(&account_taken, false, memory_order_release);
}

enum account { ACCOUNT_PLAIN, ACCOUNT_MANAGED, ACCOUNT_POOLED };

/* A request for memory. */
struct memory_request {
    size_t bytes;
    enum account account;
    CUmempool pool; /* for ACCOUNT_POOLED */
};

/* ---- memory that the driver itself holds ----

   A pool keeps memory that was freed in a stream until the stream has passed the free, and longer if the program sets a
   release threshold. So a pool counts with its reserved memory, not with the program's allocations from it. Functions
   for pools take a private lock and call the driver. */

/* Return the bytes of all kinds. Queries the driver if there may be any; while the process is suspended, the last
   result counts. */
uint64_t account_query_driver(const struct gpu *gpu);
static inline uint64_t account_driver_bytes(const struct gpu *gpu) {
    return unlikely(atomic_load_explicit(&gpu->driver_memory, memory_order_relaxed)) ? account_query_driver(gpu) : 0;
}

/* Record that a graph gets a memory node: on an unknown GPU, or on this GPU. */
void account_graph(void);
void account_graph_on(struct gpu *gpu);

/* Record a pool on the GPU from which the program allocates. False: no memory; the pool does not count. */
bool account_pool_add(struct gpu *gpu, CUmempool pool);

/* Return the bytes by which the memory of pools grows when `bytes` are allocated from the pool: 0 if the driver has
   enough for reuse. */
uint64_t account_pool_growth(const struct gpu *gpu, CUmempool pool, uint64_t bytes);

/* Make the driver release unused memory of pools. `wait`: also release memory whose free has not been passed by the
   streams of the calling thread's context; this waits for all work of the context, as the driver itself does when a
   GPU's memory is short. True: the pools hold less than before. Does nothing while the process is suspended. */
bool account_pools_trim(const struct gpu *gpu, bool wait);

/* Call the driver's cuMemPoolDestroy, and remove the pool. */
CUresult account_pool_destroy(CUmempool pool);

/* ---- the sums ---- */

static inline _Atomic uint64_t *account_of(struct gpu *gpu, enum account kind) {
    return kind == ACCOUNT_MANAGED ? &gpu->managed : kind == ACCOUNT_PLAIN ? &gpu->plain : &gpu->pooled;
}

/* Add bytes to a sum, or subtract them. With the lock held. */
static inline void account_add(struct gpu *gpu, size_t bytes, enum account kind) {
    _Atomic uint64_t *account = account_of(gpu, kind);
    uint64_t before = atomic_load_explicit(account, memory_order_relaxed);
    atomic_store_explicit(account, before + bytes, memory_order_release);
}

static inline void account_subtract(struct gpu *gpu, size_t bytes, enum account kind) {
    _Atomic uint64_t *account = account_of(gpu, kind);
    uint64_t before = atomic_load_explicit(account, memory_order_relaxed);
    atomic_store_explicit(account, before > bytes ? before - bytes : 0, memory_order_release);
}

/* Whether the process would have at most `most` bytes after `bytes` more. `held`: account_driver_bytes(), read without
   the lock. */
static inline bool account_fits(const struct gpu *gpu, size_t bytes, uint64_t held, uint64_t most) {
    uint64_t all = atomic_load_explicit(&gpu->managed, memory_order_relaxed) +
                   atomic_load_explicit(&gpu->plain, memory_order_relaxed) + held;
    return !__builtin_add_overflow(all, bytes, &all) && all <= most;
}

/* Return the bytes by which the process's memory would grow. May query the driver. */
static inline size_t account_growth(const struct gpu *gpu, const struct memory_request *request) {
    return request->account == ACCOUNT_POOLED ? account_pool_growth(gpu, request->pool, request->bytes)
                                              : request->bytes;
}

/* Count a request if the process then has at most `most` bytes (0: the allowance, read with the lock held). Takes the
   lock; may query the driver. */
bool account_take_within(struct gpu *gpu, const struct memory_request *request, uint64_t most);

/* Return the bytes of device memory of all kinds that the process has on the GPU. May query the driver. */
uint64_t account_used(const struct gpu *gpu);

/* Whether `bytes` more are within the current allowance. If so, the memory may be allocated first and counted
   afterwards (allocations_add_within). Takes no lock. */
static inline bool account_has_room(struct gpu *gpu, size_t bytes) {
    return account_fits(gpu, bytes, account_driver_bytes(gpu),
                        atomic_load_explicit(&gpu->allowance, memory_order_relaxed));
}

/* The figures of a MEMORY frame. With an engine that does not move memory itself, all memory is plain, and memory for
   which calls wait is included: `short_of` bytes of it. May query the driver. */
struct account_figures {
    uint64_t managed, plain, short_of;
};
struct account_figures account_reported(const struct gpu *gpu);

/* Wait until every allocation that was compared with an earlier allowance is in the account. For the thread that has
   changed the allowance. Takes the lock. */
void account_settle(void);

/* Add a freed block to `cached`, or subtract it. It stays counted as managed memory, so that no other thread takes its
   bytes in the meantime. No lock. */
void account_cached(struct gpu *gpu, size_t bytes, bool begins);

/* Make the background thread send a changed account to the agent within 10 ms. In most calls a message is already due:
   the background thread clears `changed` before it reads the account. */
void account_wake(struct gpu *gpu) __attribute__((cold, noinline));
static inline void account_changed(struct gpu *gpu) {
    if (unlikely(!atomic_load_explicit(&gpu->changed, memory_order_relaxed))) account_wake(gpu);
}

/* Subtract bytes from a sum, and report it. Takes the lock. */
static inline void account_return(struct gpu *gpu, size_t bytes, enum account kind) {
    account_lock();
    account_subtract(gpu, bytes, kind);
    account_unlock();
    account_changed(gpu);
}
