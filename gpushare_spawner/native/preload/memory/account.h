/* How much device memory this process has on each GPU, in bytes: struct gpu's `managed` and `plain`.

   Accounts are changed with one lock held, so that no change needs an instruction of its own that locks. Anybody may
   read them. The records of allocations.c have the same lock: an allocation is counted and remembered in one step. */
#pragma once

#include "driver/gpus.h"
#include "memory/driver_memory.h"
#include "memory/pool_memory.h"

/* The lock. Letting it go is a plain store, which a mutex cannot have; it is held for tens of nanoseconds, except while
   the pager walks, so a thread that finds it taken sleeps after a short while. Taken after every other lock. */
HIDDEN _Atomic bool account_taken;
void account_lock_contended(void) __attribute__((cold, noinline));

static inline void account_lock(void) {
    if (unlikely(atomic_exchange_explicit(&account_taken, true, memory_order_acquire))) account_lock_contended();
}

static inline void account_unlock(void) {
    atomic_store_explicit(&account_taken, false, memory_order_release);
}

enum account { ACCOUNT_PLAIN, ACCOUNT_MANAGED, ACCOUNT_POOLED };

/* Memory that is to be allocated. */
struct memory_wanted {
    size_t bytes;
    enum account account;
    CUmempool pool; /* of ACCOUNT_POOLED */
};

static inline _Atomic uint64_t *account_of(struct gpu *gpu, enum account kind) {
    return kind == ACCOUNT_MANAGED ? &gpu->managed : kind == ACCOUNT_PLAIN ? &gpu->plain : &gpu->pooled;
}

/* With the lock held: count so many bytes more, or fewer. */
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

/* Whether `bytes` more are at most `most`. `held`: driver_memory_bytes(), asked for without the lock. */
static inline bool account_fits(const struct gpu *gpu, size_t bytes, uint64_t held, uint64_t most) {
    uint64_t all = atomic_load_explicit(&gpu->managed, memory_order_relaxed) +
                   atomic_load_explicit(&gpu->plain, memory_order_relaxed) + held;
    return !__builtin_add_overflow(all, bytes, &all) && all <= most;
}

/* Bytes by which the process would have more. May ask the driver. */
static inline size_t account_growth(const struct gpu *gpu, const struct memory_wanted *wanted) {
    return wanted->account == ACCOUNT_POOLED ? pool_memory_growth(gpu, wanted->pool, wanted->bytes) : wanted->bytes;
}

/* Count what is wanted if all is then at most `most` (0: the allowance, as it is with the lock held). Takes the lock;
   may ask the driver for what it holds. */
bool account_take_within(struct gpu *gpu, const struct memory_wanted *wanted, uint64_t most);

/* Bytes of device memory of every kind that the process has allocated on the GPU. */
uint64_t account_used(const struct gpu *gpu);

/* Whether so much more is within the allowance as it is now: if so, the driver may be asked first, and the account
   afterwards (allocations_add_within). Takes no lock. */
static inline bool account_has_room(struct gpu *gpu, size_t bytes) {
    return account_fits(gpu, bytes, driver_memory_bytes(gpu),
                        atomic_load_explicit(&gpu->allowance, memory_order_relaxed));
}

/* What the agent is told. With an engine that moves no memory itself all of it is plain, and what calls wait for
 * counts: `short_of` bytes of it. May ask the driver. */
struct account_figures {
    uint64_t managed, plain, short_of;
};
struct account_figures account_told(const struct gpu *gpu);

/* Whoever changes the allowance, and then calls this, sees in the account every allocation that was compared with the
   allowance from before. Takes the lock. */
void account_settle(void);

/* A freed block of so many bytes begins or ends to be cached: it stays accounted for as managed memory, so that nobody
   takes its bytes on the way. No lock. */
void account_cached(struct gpu *gpu, size_t bytes, bool begins);

/* An account was changed: the background thread tells the agent within 10 ms. Mostly that has been said already: the
   background thread clears `changed` before it reads the account. */
void account_wake(struct gpu *gpu) __attribute__((cold, noinline));
static inline void account_changed(struct gpu *gpu) {
    if (unlikely(!atomic_load_explicit(&gpu->changed, memory_order_relaxed))) account_wake(gpu);
}

/* Count `bytes` fewer. Takes the lock. */
static inline void account_return(struct gpu *gpu, size_t bytes, enum account kind) {
    account_lock();
    account_subtract(gpu, bytes, kind);
    account_unlock();
    account_changed(gpu);
}

void account_forget(void); /* in a forked child */
