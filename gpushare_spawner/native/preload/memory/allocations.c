#include "memory/allocations.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <time.h>

#include "memory/allowance.h"
#include "memory/block_cache.h"
#include "wrappers/plain_memory.h"
#include "driver/resolve.h"
#include "wrappers/stream_ordered.h"
#include "lease/worker.h"

/* The lock of the records. Letting it go is a plain store, which a mutex cannot have; it is held for tens of
   nanoseconds, except while the pager walks, so a thread that finds it taken sleeps after a short while. */
static _Atomic bool taken;

static __attribute__((noinline, cold)) void records_lock_contended(void) {
    unsigned tries = 0;
    do {
        while (atomic_load_explicit(&taken, memory_order_relaxed)) {
            struct timespec moment = {0, 20000};
            if (++tries > 200) nanosleep(&moment, NULL);
        }
    } while (atomic_exchange_explicit(&taken, true, memory_order_acquire));
}

static inline void records_lock(void) {
    if (unlikely(atomic_exchange_explicit(&taken, true, memory_order_acquire))) records_lock_contended();
}

static void records_unlock(void) {
    atomic_store_explicit(&taken, false, memory_order_release);
}

static struct allocation *root;
static uint64_t newest;
static struct {
    struct allocation *newest, *oldest;
    struct allocation *next; /* of the walk in progress */
} by_use[MAX_GPUS];

/* Records come from blocks of them, and are used again: an allocation need not wait for malloc. With the lock held. */
#define RECORDS_AT_ONCE 64
static struct allocation *spare_records;

static __attribute__((noinline, cold)) void more_records(void) {
    struct allocation *block = malloc(RECORDS_AT_ONCE * sizeof *block);
    for (int i = 0; block && i < RECORDS_AT_ONCE; i++) {
        block[i].left = spare_records;
        spare_records = &block[i];
    }
}

static struct allocation *record_new(void) {
    if (unlikely(!spare_records)) more_records();
    struct allocation *record = spare_records;
    if (record) spare_records = record->left;
    return record;
}

static void record_spare(struct allocation *record) {
    record->left = spare_records;
    spare_records = record;
}

/* What a copy has: the rest belongs to the record. */
static void copy_fields(struct allocation *to, const struct allocation *from) {
    __builtin_memcpy(to, from, offsetof(struct allocation, walk));
}

/* A treap: the priority is a hash of the address, so that it needs no state and no balance is kept by hand. */
static uint64_t priority(const struct allocation *node) {
    return (node->at >> 8) * 0x9E3779B97F4A7C15ull;
}

static void tree_insert(struct allocation *node) {
    struct allocation **link = &root;
    while (*link && priority(*link) >= priority(node)) link = (*link)->at < node->at ? &(*link)->right : &(*link)->left;
    struct allocation *tree = *link, **below = &node->left, **above = &node->right;
    *link = node;
    while (tree) { /* what was here is split into what lies below the node and above it */
        if (tree->at < node->at) {
            *below = tree;
            below = &tree->right;
            tree = tree->right;
        } else {
            *above = tree;
            above = &tree->left;
            tree = tree->left;
        }
    }
    *below = *above = NULL;
}

/* Where the tree holds the one that begins at `at`; a link to NULL: nowhere. */
static struct allocation **link_of(CUdeviceptr at) {
    struct allocation **link = &root;
    while (*link && (*link)->at != at) link = (*link)->at < at ? &(*link)->right : &(*link)->left;
    return link;
}

static void tree_remove(struct allocation **link) {
    struct allocation *below = (*link)->left, *above = (*link)->right;
    while (below && above) {
        if (priority(below) > priority(above)) {
            *link = below;
            link = &below->right;
            below = below->right;
        } else {
            *link = above;
            link = &above->left;
            above = above->left;
        }
    }
    *link = below ? below : above;
}

/* The last one that begins at or below `at`. */
static struct allocation *last_up_to(CUdeviceptr at) {
    struct allocation *best = NULL;
    for (struct allocation *node = root; node;) {
        if (node->at <= at) {
            best = node;
            node = node->right;
        } else {
            node = node->left;
        }
    }
    return best;
}

static struct allocation *containing(CUdeviceptr at) {
    struct allocation *best = last_up_to(at);
    return best && at - best->at < best->bytes ? best : NULL;
}

static void link_newest(struct allocation *node) {
    if (node->kind == ALLOCATION_PLAIN) return;
    int g = node->gpu->index;
    node->newer = NULL;
    node->older = by_use[g].newest;
    if (node->older)
        node->older->newer = node;
    else
        by_use[g].oldest = node;
    by_use[g].newest = node;
}

static void unlink_by_use(struct allocation *node) {
    if (node->kind == ALLOCATION_PLAIN) return;
    int g = node->gpu->index;
    /* a walk that stands here starts over at the next step; what it has visited carries the walk's number */
    if (by_use[g].next == node) by_use[g].next = NULL;
    *(node->newer ? &node->newer->older : &by_use[g].newest) = node->older;
    *(node->older ? &node->older->newer : &by_use[g].oldest) = node->newer;
}

static void insert(struct allocation *node) {
    node->walk = 0; /* of no walk yet */
    tree_insert(node);
    link_newest(node);
}

/* Accounts are changed with the lock held, so that no change needs an instruction of its own that locks. Anybody may
   read them. */
static void account_add(struct gpu *gpu, size_t bytes, bool managed) {
    _Atomic uint64_t *account = managed ? &gpu->managed : &gpu->plain;
    uint64_t before = atomic_load_explicit(account, memory_order_relaxed);
    atomic_store_explicit(account, before + bytes, memory_order_release);
}

static void give_back(struct gpu *gpu, size_t bytes, bool managed) {
    _Atomic uint64_t *account = managed ? &gpu->managed : &gpu->plain;
    uint64_t before = atomic_load_explicit(account, memory_order_relaxed);
    atomic_store_explicit(account, before > bytes ? before - bytes : 0, memory_order_release);
}

static inline bool fits_into(const struct gpu *gpu, size_t bytes, uint64_t graphs, uint64_t most) {
    uint64_t all = atomic_load_explicit(&gpu->managed, memory_order_relaxed) +
                   atomic_load_explicit(&gpu->plain, memory_order_relaxed) + graphs;
    return !__builtin_add_overflow(all, bytes, &all) && all <= most;
}

/* `most` of 0: the allowance. */
static bool take_within(struct gpu *gpu, size_t bytes, bool managed, uint64_t most) {
    uint64_t graphs = graph_memory_bytes(gpu);
    records_lock();
    bool fits = fits_into(gpu, bytes, graphs, most ? most : atomic_load(&gpu->allowance));
    if (fits) account_add(gpu, bytes, managed);
    records_unlock();
    return fits;
}

bool account_has_room(struct gpu *gpu, size_t bytes) {
    return fits_into(gpu, bytes, graph_memory_bytes(gpu), atomic_load_explicit(&gpu->allowance, memory_order_relaxed));
}

void account_settle(void) {
    records_lock();
    records_unlock();
}

/* The slow path: more than the allowance. The allowance of a session with several busy processes may be gone again
   before it is used, so it is asked for more than once. */
static bool take_after_asking(struct gpu *gpu, size_t bytes, bool managed, bool own) {
    uint64_t total = atomic_load(&gpu->total);
    for (int rounds = 0; rounds < 16; rounds++) {
        if (own && !atomic_load(&gpu->reserving)) return take_within(gpu, bytes, managed, UINT64_MAX);
        switch (allowance_ask(gpu, bytes, managed, own)) {
        case ALLOWANCE_REFUSED:
            /* an agent that went meanwhile leaves the process its own limit */
            return !atomic_load(&gpu->reserving) && take_within(gpu, bytes, managed, 0);
        case ALLOWANCE_UNCHECKED: return take_within(gpu, bytes, managed, own || !total ? UINT64_MAX : total);
        case ALLOWANCE_GREW: break;
        }
        if (take_within(gpu, bytes, managed, 0)) return true;
    }
    return false;
}

/* Whether the session would have more than it is shown with `bytes` more. */
static bool at_the_limit(struct gpu *gpu, size_t bytes) {
    uint64_t total = atomic_load(&gpu->total), used = allowance_used(gpu) + atomic_load(&gpu->others);
    return total && (bytes > total || used > total - bytes);
}

bool account_take(struct gpu *gpu, size_t bytes, bool managed, bool limited) {
    bool fits = take_within(gpu, bytes, managed, 0);
    /* what the program has freed itself must not be what is missing; short of the limit asking is cheaper than freeing
     */
    if (!fits && at_the_limit(gpu, bytes) && stream_ordered_trim(gpu, bytes))
        fits = take_within(gpu, bytes, managed, 0);
    if (!fits) fits = take_after_asking(gpu, bytes, managed, !limited);
    if (!fits && stream_ordered_trim(gpu, bytes))
        fits = take_within(gpu, bytes, managed, 0) || take_after_asking(gpu, bytes, managed, !limited);
    if (fits) worker_memory_changed(gpu);
    return fits;
}

void account_cached(struct gpu *gpu, size_t bytes, bool begins) {
    if (begins)
        atomic_fetch_add(&gpu->cached, bytes);
    else
        atomic_fetch_sub(&gpu->cached, bytes);
}

void account_return(struct gpu *gpu, size_t bytes, bool managed) {
    records_lock();
    give_back(gpu, bytes, managed);
    records_unlock();
    worker_memory_changed(gpu);
}

static inline void forget(struct allocation **link) {
    struct allocation *node = *link;
    tree_remove(link);
    unlink_by_use(node);
    record_spare(node);
}

static inline void drop(struct allocation **link) {
    give_back((*link)->gpu, (*link)->capacity, (*link)->kind != ALLOCATION_PLAIN);
    forget(link);
}

/* With the lock held. */
static __attribute__((noinline, cold)) void drop_stale(struct allocation *stale, CUdeviceptr at, size_t capacity) {
    do drop(link_of(stale->at));
    while ((stale = last_up_to(at + capacity - 1)) && stale->at + stale->capacity > at);
}

/* With the lock held. */
static void remember(struct gpu *gpu, CUdeviceptr at, size_t bytes, size_t capacity, enum allocation_kind kind,
                     CUcontext context) {
    struct allocation *stale = last_up_to(at + capacity - 1);
    if (unlikely(stale && stale->at + stale->capacity > at)) drop_stale(stale, at, capacity);
    struct allocation *node = record_new();
    if (!node) return; /* it stays accounted for, and is freed as what it is */
    node->at = at;
    node->bytes = bytes;
    node->capacity = capacity;
    node->kind = kind;
    node->gpu = gpu;
    node->context = context;
    node->number = ++newest;
    insert(node);
}

static CUcontext current_context(void) {
    CUcontext context = NULL;
    return real.cuCtxGetCurrent(&context) == CUDA_SUCCESS ? context : NULL;
}

void allocations_add(struct gpu *gpu, CUdeviceptr at, size_t bytes, size_t capacity, enum allocation_kind kind) {
    CUcontext context = current_context();
    records_lock();
    remember(gpu, at, bytes, capacity, kind, context);
    records_unlock();
}

bool allocations_add_within(struct gpu *gpu, CUdeviceptr at, size_t bytes, enum allocation_kind kind) {
    CUcontext context = current_context();
    uint64_t graphs = graph_memory_bytes(gpu);
    records_lock();
    bool fits = fits_into(gpu, bytes, graphs, atomic_load(&gpu->allowance));
    if (fits) {
        account_add(gpu, bytes, kind != ALLOCATION_PLAIN);
        remember(gpu, at, bytes, bytes, kind, context);
    }
    records_unlock();
    if (fits) worker_memory_changed(gpu);
    return fits;
}

bool allocations_find(CUdeviceptr at, struct allocation *copy) {
    records_lock();
    struct allocation *node = containing(at);
    if (node) copy_fields(copy, node);
    records_unlock();
    return node != NULL;
}

bool allocations_remove(CUdeviceptr at, struct allocation *copy) {
    records_lock();
    struct allocation **link = link_of(at);
    bool known = *link != NULL;
    if (known) {
        copy_fields(copy, *link);
        forget(link);
    }
    records_unlock();
    return known;
}

CUresult allocations_freed(const struct allocation *copy, CUresult result) {
    if (likely(result == CUDA_SUCCESS)) {
        account_return(copy->gpu, copy->capacity, copy->kind != ALLOCATION_PLAIN);
        return result;
    }
    records_lock();
    struct allocation *node = record_new();
    if (node) {
        copy_fields(node, copy);
        insert(node);
    }
    records_unlock();
    return result;
}

static struct allocation *any_of(struct allocation *node, CUcontext context, uint64_t until) {
    if (!node || (node->context == context && node->number <= until)) return node;
    struct allocation *found = any_of(node->left, context, until);
    return found ? found : any_of(node->right, context, until);
}

uint64_t allocations_newest(void) {
    records_lock();
    uint64_t number = newest;
    records_unlock();
    return number;
}

void allocations_of_context_gone(CUcontext context, uint64_t until) {
    block_cache_context_gone(context);
    records_lock();
    struct allocation *node;
    while ((node = any_of(root, context, until))) {
        struct gpu *gpu = node->gpu;
        drop(link_of(node->at));
        worker_memory_changed(gpu);
    }
    records_unlock();
}

bool allocations_walk(struct gpu *gpu, uint64_t walk, bool newest_first, size_t part, allocation_visit visit,
                      void *closure) {
    int g = gpu->index;
    bool ended = false;
    records_lock();
    struct allocation *node = by_use[g].next;
    if (!node || node->walk != walk) node = newest_first ? by_use[g].newest : by_use[g].oldest;
    while (true) {
        if (!node) {
            ended = true;
            break;
        }
        if (node->walk != walk) {
            node->walk = walk;
            node->walked = 0;
        }
        if (node->walked >= node->capacity) {
            node = newest_first ? node->older : node->newer;
            continue;
        }
        size_t left = node->capacity - node->walked, bytes = left < part ? left : part;
        if (!visit(closure, node->context, node->at + node->walked, bytes, node->number)) break;
        node->walked += bytes;
    }
    by_use[g].next = node;
    records_unlock();
    return ended;
}

void allocations_forget(void) {
    root = NULL;
    __builtin_memset(by_use, 0, sizeof by_use);
    atomic_store(&taken, false);
    spare_records = NULL;
}
