#include "allocations.h"

#include <pthread.h>
#include <stdlib.h>

#include "allowance.h"
#include "block_cache.h"
#include "plain_memory.h"
#include "resolve.h"
#include "stream_ordered.h"
#include "worker.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation *root;
static uint64_t newest;
static struct {
    struct allocation *newest, *oldest;
    struct allocation *next; /* of the walk in progress */
} by_use[MAX_GPUS];

/* A treap: the priority is a hash of the address, so that it needs no state and no balance is kept by hand. */
static uint64_t priority(const struct allocation *node) {
    return (node->at >> 8) * 0x9E3779B97F4A7C15ull;
}

static void split(struct allocation *tree, CUdeviceptr at, struct allocation **below, struct allocation **above) {
    if (!tree) {
        *below = *above = NULL;
    } else if (tree->at < at) {
        split(tree->right, at, &tree->right, above);
        *below = tree;
    } else {
        split(tree->left, at, below, &tree->left);
        *above = tree;
    }
}

static struct allocation *joined(struct allocation *below, struct allocation *above) {
    if (!below) return above;
    if (!above) return below;
    if (priority(below) > priority(above)) {
        below->right = joined(below->right, above);
        return below;
    }
    above->left = joined(below, above->left);
    return above;
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
    struct allocation *below, *above;
    node->left = node->right = NULL;
    split(root, node->at, &below, &above);
    root = joined(joined(below, node), above);
    link_newest(node);
}

static void take_out(struct allocation *node) {
    struct allocation *below, *above, *rest;
    split(root, node->at, &below, &above);
    split(above, node->at + 1, &rest, &above);
    root = joined(below, above);
    unlink_by_use(node);
}

static void give_back(struct gpu *gpu, size_t bytes, bool managed) {
    _Atomic uint64_t *account = managed ? &gpu->managed : &gpu->plain;
    *account = *account > bytes ? *account - bytes : 0;
}

/* Add first, compare then: a recall of unused allowance either sees the addition, or is seen here. */
static bool take_within(struct gpu *gpu, size_t bytes, bool managed, uint64_t most) {
    _Atomic uint64_t *account = managed ? &gpu->managed : &gpu->plain;
    uint64_t graphs = graph_memory_bytes(gpu);
    pthread_mutex_lock(&lock);
    uint64_t before = gpu->managed + gpu->plain + graphs;
    bool fits = bytes <= UINT64_MAX - before;
    if (fits) {
        *account += bytes;
        fits = most == UINT64_MAX || before + bytes <= (most ? most : atomic_load(&gpu->allowance));
        if (!fits) *account -= bytes;
    }
    pthread_mutex_unlock(&lock);
    return fits;
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
    pthread_mutex_lock(&lock);
    if (begins) {
        gpu->managed += bytes;
        gpu->cached += bytes;
    } else {
        give_back(gpu, bytes, true);
        gpu->cached -= bytes;
    }
    pthread_mutex_unlock(&lock);
    worker_memory_changed(gpu);
}

void account_return(struct gpu *gpu, size_t bytes, bool managed) {
    pthread_mutex_lock(&lock);
    give_back(gpu, bytes, managed);
    pthread_mutex_unlock(&lock);
    worker_memory_changed(gpu);
}

static void drop(struct allocation *node) {
    take_out(node);
    give_back(node->gpu, node->bytes, node->kind != ALLOCATION_PLAIN);
    free(node);
}

void allocations_add(struct gpu *gpu, CUdeviceptr at, size_t bytes, size_t capacity, enum allocation_kind kind) {
    struct allocation *node = calloc(1, sizeof *node);
    if (!node) return; /* it stays accounted for, and is freed as what it is */
    node->at = at;
    node->bytes = bytes;
    node->capacity = capacity;
    node->kind = kind;
    node->gpu = gpu;
    if (real.cuCtxGetCurrent(&node->context) != CUDA_SUCCESS) node->context = NULL;
    pthread_mutex_lock(&lock);
    struct allocation *stale;
    while ((stale = last_up_to(at + capacity - 1)) && stale->at + stale->capacity > at) drop(stale);
    node->number = ++newest;
    insert(node);
    pthread_mutex_unlock(&lock);
}

bool allocations_find(CUdeviceptr at, struct allocation *copy) {
    pthread_mutex_lock(&lock);
    struct allocation *node = containing(at);
    if (node) *copy = *node;
    pthread_mutex_unlock(&lock);
    return node != NULL;
}

bool allocations_remove(CUdeviceptr at, struct allocation *copy) {
    pthread_mutex_lock(&lock);
    struct allocation *node = containing(at);
    if (node && node->at == at) {
        take_out(node);
        give_back(node->gpu, node->bytes, node->kind != ALLOCATION_PLAIN);
    } else {
        node = NULL;
    }
    pthread_mutex_unlock(&lock);
    if (!node) return false;
    *copy = *node;
    free(node);
    worker_memory_changed(copy->gpu);
    return true;
}

void allocations_restore(const struct allocation *copy) {
    struct allocation *node = malloc(sizeof *node);
    if (!node) return;
    *node = *copy;
    pthread_mutex_lock(&lock);
    insert(node);
    *(node->kind == ALLOCATION_PLAIN ? &node->gpu->plain : &node->gpu->managed) += node->bytes;
    pthread_mutex_unlock(&lock);
}

static struct allocation *any_of(struct allocation *node, CUcontext context, uint64_t until) {
    if (!node || (node->context == context && node->number <= until)) return node;
    struct allocation *found = any_of(node->left, context, until);
    return found ? found : any_of(node->right, context, until);
}

uint64_t allocations_newest(void) {
    pthread_mutex_lock(&lock);
    uint64_t number = newest;
    pthread_mutex_unlock(&lock);
    return number;
}

void allocations_of_context_gone(CUcontext context, uint64_t until) {
    block_cache_context_gone(context);
    pthread_mutex_lock(&lock);
    struct allocation *node;
    while ((node = any_of(root, context, until))) {
        struct gpu *gpu = node->gpu;
        drop(node);
        worker_memory_changed(gpu);
    }
    pthread_mutex_unlock(&lock);
}

bool allocations_walk(struct gpu *gpu, uint64_t walk, bool newest_first, size_t part, allocation_visit visit,
                      void *closure) {
    int g = gpu->index;
    bool ended = false;
    pthread_mutex_lock(&lock);
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
        if (!visit(closure, node->context, node->at + node->walked, bytes)) break;
        node->walked += bytes;
    }
    by_use[g].next = node;
    pthread_mutex_unlock(&lock);
    return ended;
}

void allocations_forget(void) {
    root = NULL;
    __builtin_memset(by_use, 0, sizeof by_use);
    pthread_mutex_init(&lock, NULL);
}
