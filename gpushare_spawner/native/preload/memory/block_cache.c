/* For each context a cache; in it a pool for each stream that blocks were freed in, a tree by size. A block may be used
   in another stream, or given back, once its stream has passed the free. That is learnt from one event for each pool,
   the mark: it covers every free before it, so a free itself needs no driver call. */
#include "memory/block_cache.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "memory/account.h"
#include "contexts/captures.h"
#include "contexts/contexts.h"
#include "contexts/driver_turn.h"
#include "driver/driver.h"

/* Below this the bound on the cache does not count: a program's first blocks are not freed at once. */
#define ALWAYS_CACHED (64ull << 20)
/* Streams and blocks that are looked at for one allocation, so that it takes no longer the more there are. */
#define POOLS_LOOKED_AT  16
#define BLOCKS_LOOKED_AT 4
/* A stream that does not come to its end in this time is not waited for. */
#define STREAM_PATIENCE (30 * SECOND)
/* The background thread gives back for so long at a time, and then looks at its socket. */
#define STEP_TIME MILLISECOND

struct block {
    CUdeviceptr at;
    size_t capacity;
    uint64_t number; /* counts the frees of a cache */
    struct pool *pool;
    struct block *left, *right;  /* in the pool: by capacity, then by number; a treap */
    struct block *older, *newer; /* in the cache */
};

enum pool_state {
    POOL_UNUSED,
    POOL_OF_STREAM,
    POOL_OF_GONE_STREAM, /* destroyed; the mark is behind its last work */
    POOL_UNMARKED,       /* destroyed without a mark: passed when the GPU is known to be idle */
};

struct pool {
    enum pool_state state;
    struct cache_stream of;
    struct block *tree;
    CUevent mark;
    bool pending;                    /* the mark is recorded and was not passed when last seen */
    uint64_t newest, marked, passed; /* numbers: last freed; covered by the mark; known to be passed */
    struct pool *next;
};

struct cache {
    CUcontext context;
    struct gpu *gpu;
    struct block *oldest, *newest;
    struct pool *pools;
    uint64_t number;
    struct cache *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct cache *caches;
static struct block *spare_blocks;

static struct {
    _Atomic uint64_t most_in_use;
    bool giving_back; /* background thread only */
} of_gpu[MAX_GPUS];

uint64_t block_cache_thread(void) {
    static _Atomic uint64_t threads;
    static __thread uint64_t number __attribute__((tls_model("initial-exec")));
    if (!number) number = atomic_fetch_add(&threads, 1) + 1;
    return number;
}

/* ---- trees ---- */

static uint64_t priority(const struct block *block) {
    return block->number * 0x9E3779B97F4A7C15ull;
}

static bool before(const struct block *block, size_t capacity, uint64_t number) {
    return block->capacity < capacity || (block->capacity == capacity && block->number < number);
}

static void split(struct block *tree, size_t capacity, uint64_t number, struct block **below, struct block **above) {
    while (tree) {
        if (before(tree, capacity, number)) {
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

static void tree_insert(struct block **link, struct block *block) {
    while (*link && priority(*link) >= priority(block))
        link = before(*link, block->capacity, block->number) ? &(*link)->right : &(*link)->left;
    split(*link, block->capacity, block->number, &block->left, &block->right);
    *link = block;
}

static void tree_remove(struct block **link, struct block *block) {
    while (*link != block) link = before(*link, block->capacity, block->number) ? &(*link)->right : &(*link)->left;
    struct block *below = block->left, *above = block->right;
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

/* The smallest that is not before (capacity, number). */
static struct block *tree_from(struct block *tree, size_t capacity, uint64_t number) {
    struct block *best = NULL;
    while (tree) {
        if (before(tree, capacity, number)) {
            tree = tree->right;
        } else {
            best = tree;
            tree = tree->left;
        }
    }
    return best;
}

/* ---- pools, with the lock held ---- */

static struct cache *cache_of(const struct gpu *gpu, CUcontext context) {
    for (struct cache *cache = caches; cache; cache = cache->next)
        if (cache->context == context && cache->gpu == gpu) return cache;
    return NULL;
}

static bool same_stream(const struct cache_stream *a, const struct cache_stream *b) {
    return a->stream == b->stream && a->context == b->context && a->thread == b->thread;
}

static struct pool *pool_of(struct cache *cache, const struct cache_stream *of) {
    for (struct pool **link = &cache->pools; *link; link = &(*link)->next) {
        struct pool *pool = *link;
        if (pool->state != POOL_OF_STREAM || !same_stream(&pool->of, of)) continue;
        *link = pool->next; /* to the front: it will be asked for again */
        pool->next = cache->pools;
        cache->pools = pool;
        return pool;
    }
    return NULL;
}

static struct pool *pool_for(struct cache *cache, const struct cache_stream *of) {
    struct pool *pool = pool_of(cache, of);
    if (pool) return pool;
    /* an event belongs to a context, so a record is used again within its context only */
    for (pool = cache->pools; pool; pool = pool->next)
        if (pool->state == POOL_UNUSED && pool->of.context == of->context) break;
    if (!pool) {
        if (!(pool = calloc(1, sizeof *pool))) return NULL;
        pool->next = cache->pools;
        cache->pools = pool;
    }
    pool->state = POOL_OF_STREAM;
    pool->of = *of;
    return pool;
}

/* Record the mark behind everything that was freed. With captures held off, and the pool's context current. */
static void mark(struct pool *pool, CUstream stream) {
    if (captures_in_progress()) return; /* it would become part of the graph, or break the capture */
    if (!pool->mark && real.cuEventCreate(&pool->mark, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) pool->mark = NULL;
    if (!pool->mark || real.cuEventRecord(pool->mark, stream) != CUDA_SUCCESS) return;
    pool->pending = true;
    pool->marked = pool->newest;
}

static void look(struct pool *pool) {
    /* an error is no reason to wait: a context that has failed does no work */
    if (!pool->pending || real.cuEventQuery(pool->mark) == CUDA_ERROR_NOT_READY) return;
    pool->pending = false;
    if (pool->passed < pool->marked) pool->passed = pool->marked;
}

/* Mark a pool again where blocks lie behind its last mark. By a thread in context `current`. */
static void look_and_mark(struct pool *pool, CUcontext current, uint64_t thread) {
    look(pool);
    if (pool->pending || pool->passed >= pool->newest || pool->state != POOL_OF_STREAM) return;
    if (pool->of.context != current || pool->of.thread != thread) return;
    mark(pool, pool->of.stream);
}

static void unlink_block(struct cache *cache, struct block *block) {
    struct pool *pool = block->pool;
    tree_remove(&pool->tree, block);
    *(block->older ? &block->older->newer : &cache->oldest) = block->newer;
    *(block->newer ? &block->newer->older : &cache->newest) = block->older;
    if (!pool->tree && pool->state != POOL_OF_STREAM) pool->state = POOL_UNUSED;
}

static void spare(struct block *block) {
    block->left = spare_blocks;
    spare_blocks = block;
}

/* ---- taking and keeping ---- */

static struct block *fitting(struct pool *pool, size_t bytes, bool same) {
    size_t most = bytes + bytes / 4;
    struct block *block = tree_from(pool->tree, bytes, 0);
    for (int i = 0; block && block->capacity <= most && i < BLOCKS_LOOKED_AT; i++) {
        if (same || block->number <= pool->passed) return block;
        block = tree_from(pool->tree, block->capacity, block->number + 1);
    }
    return NULL;
}

static struct block *fitting_elsewhere(struct cache *cache, const struct cache_stream *by, size_t bytes) {
    int looked_at = 0;
    for (struct pool *pool = cache->pools; pool && looked_at < POOLS_LOOKED_AT; pool = pool->next) {
        if (!pool->tree) continue;
        looked_at++;
        look_and_mark(pool, by->context, pool->of.thread ? block_cache_thread() : 0);
        struct block *block = fitting(pool, bytes, false);
        if (block) return block;
    }
    return NULL;
}

bool block_cache_take(struct gpu *gpu, CUcontext context, const struct cache_stream *by, size_t bytes,
                      struct cached_memory *taken) {
    if (!atomic_load_explicit(&gpu->cached, memory_order_relaxed)) return false;
    pthread_mutex_lock(&lock);
    struct cache *cache = cache_of(gpu, context);
    struct pool *pool = cache ? pool_of(cache, by) : NULL;
    struct block *block = pool ? fitting(pool, bytes, true) : NULL;
    bool others = cache && cache->oldest && !block;
    if (block) unlink_block(cache, block);
    pthread_mutex_unlock(&lock);
    if (others) {
        captures_hold_off();
        pthread_mutex_lock(&lock);
        cache = cache_of(gpu, context);
        block = cache ? fitting_elsewhere(cache, by, bytes) : NULL;
        if (block) unlink_block(cache, block);
        pthread_mutex_unlock(&lock);
        captures_let_on();
    }
    if (!block) return false;
    *taken = (struct cached_memory){block->at, block->capacity};
    account_cached(gpu, block->capacity, false);
    pthread_mutex_lock(&lock);
    spare(block);
    pthread_mutex_unlock(&lock);
    return true;
}

static struct cache *cache_for(struct gpu *gpu, CUcontext context) {
    struct cache *cache = cache_of(gpu, context);
    if (cache || !(cache = calloc(1, sizeof *cache))) return cache;
    cache->context = context;
    cache->gpu = gpu;
    cache->next = caches;
    return caches = cache;
}

bool block_cache_put(struct gpu *gpu, CUcontext context, const struct cache_stream *by, struct cached_memory memory) {
    pthread_mutex_lock(&lock);
    struct block *block = spare_blocks;
    if (block) spare_blocks = block->left;
    struct cache *cache = cache_for(gpu, context);
    struct pool *pool = cache ? pool_for(cache, by) : NULL;
    if (!block) block = malloc(sizeof *block);
    if (!block || !pool) {
        if (block) spare(block);
        pthread_mutex_unlock(&lock);
        return false;
    }
    *block = (struct block){.at = memory.at, .capacity = memory.capacity, .number = ++cache->number, .pool = pool};
    pool->newest = block->number;
    tree_insert(&pool->tree, block);
    block->older = cache->newest;
    *(cache->newest ? &cache->newest->newer : &cache->oldest) = block;
    cache->newest = block;
    /* The only stream can use the block at once. Another one would wait for a mark, which had better be on its way; a
     * thread's own default stream can be marked by nobody else. */
    bool wanted = !pool->pending && (cache->pools->next || pool->of.thread);
    account_cached(gpu, memory.capacity, true); /* with the lock held: it is not taken before it is counted */
    pthread_mutex_unlock(&lock);
    if (wanted) {
        captures_hold_off();
        pthread_mutex_lock(&lock);
        if ((cache = cache_of(gpu, context)) && (pool = pool_of(cache, by)))
            look_and_mark(pool, by->context, by->thread);
        pthread_mutex_unlock(&lock);
        captures_let_on();
    }
    return true;
}

bool block_cache_has(CUdeviceptr at) {
    bool has = false;
    pthread_mutex_lock(&lock);
    for (struct cache *cache = caches; cache && !has; cache = cache->next)
        for (struct block *block = cache->oldest; block && !has; block = block->newer) has = block->at == at;
    pthread_mutex_unlock(&lock);
    return has;
}

/* ---- giving back ---- */

/* With the lock held: the oldest block that its stream has passed, out of the cache. */
/* `idle`: all work of the process on the GPU is known to be over. */
static struct block *oldest_passed(struct cache *cache, bool idle) {
    for (struct block *block = cache->oldest; block; block = block->newer) {
        struct pool *pool = block->pool;
        if (block->number > pool->passed && !(idle && pool->state == POOL_UNMARKED)) continue;
        unlink_block(cache, block);
        return block;
    }
    return NULL;
}

/* With the memory's context current, and the cache's lock not held: a free may wait for the whole device. */
static bool give_back(struct gpu *gpu, struct block *block) {
    /* a free by this thread must not count as a forbidden call during another thread's capture */
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    real.cuThreadExchangeStreamCaptureMode(&mode);
    CUresult result = real.cuMemFree_v2(block->at);
    real.cuThreadExchangeStreamCaptureMode(&mode);
    if (result != CUDA_SUCCESS) {
        static _Atomic bool said;
        if (!atomic_exchange(&said, true))
            log_line(LOG_ERROR, "GPU %d: %zu bytes of freed memory cannot be returned to the driver: CUDA error %d",
                     gpu->index, block->capacity, result);
    }
    /* whatever the driver said: nobody will use it, and a context that has failed takes its memory with it */
    account_cached(gpu, block->capacity, false);
    account_return(gpu, block->capacity, ACCOUNT_MANAGED);
    pthread_mutex_lock(&lock);
    spare(block);
    pthread_mutex_unlock(&lock);
    return result == CUDA_SUCCESS;
}

static void pause_a_moment(uint64_t waited) {
    struct timespec moment = {0, waited < MILLISECOND ? 20000 : 500000};
    nanosleep(&moment, NULL);
}

static bool trim(struct gpu *gpu, CUcontext current, size_t bytes) {
    size_t freed = 0;
    bool any = false;
    uint64_t begun = clock_now();
    while (freed < bytes && atomic_load(&gpu->cached) && !captures_in_progress()) {
        captures_hold_off();
        pthread_mutex_lock(&lock);
        struct cache *cache = cache_of(gpu, current);
        struct block *block = NULL;
        bool pending = false;
        if (cache) {
            for (struct pool *pool = cache->pools; pool; pool = pool->next) {
                if (!pool->tree) continue;
                look_and_mark(pool, current, pool->of.thread ? block_cache_thread() : 0);
                pending |= pool->pending;
            }
            block = oldest_passed(cache, false);
        }
        pthread_mutex_unlock(&lock);
        captures_let_on();
        if (block) {
            freed += block->capacity;
            any |= give_back(gpu, block);
        } else {
            uint64_t waited = clock_now() - begun;
            if (!pending || waited > STREAM_PATIENCE) break;
            pause_a_moment(waited);
        }
    }
    return any;
}

bool block_cache_trim(struct gpu *gpu, size_t bytes) {
    CUcontext current = NULL;
    if (!atomic_load(&gpu->cached) || real.cuCtxGetCurrent(&current) != CUDA_SUCCESS || !current) return false;
    return trim(gpu, current, bytes);
}

void block_cache_make_room(struct gpu *gpu, CUcontext current, size_t bytes) {
    uint64_t managed = atomic_load(&gpu->managed), cached = atomic_load(&gpu->cached);
    /* `bytes` are accounted for already */
    uint64_t in_use = managed > cached ? managed - cached : bytes;
    _Atomic uint64_t *most = &of_gpu[gpu->index].most_in_use;
    uint64_t before = atomic_load(most);
    while (in_use > before && !atomic_compare_exchange_weak(most, &before, in_use)) {
    }
    uint64_t bound = in_use > before ? in_use : before;
    if (bound < ALWAYS_CACHED) bound = ALWAYS_CACHED;
    /* half of it then, so that the next allocations need not wait as well */
    if (cached > bound) trim(gpu, current, cached - bound / 2);
}

/* ---- the background thread ---- */

static void mark_all(struct gpu *gpu) {
    captures_hold_off();
    if (driver_turn_begin()) {
        pthread_mutex_lock(&lock);
        for (struct cache *cache = caches; cache; cache = cache->next) {
            if (cache->gpu != gpu) continue;
            for (struct pool *pool = cache->pools; pool; pool = pool->next) {
                if (!pool->tree || context_leaves(pool->of.context)) continue;
                look(pool);
                if (pool->pending || pool->passed >= pool->newest || pool->state != POOL_OF_STREAM) continue;
                if (real.cuCtxSetCurrent(pool->of.context) != CUDA_SUCCESS) continue;
                /* a thread's own default stream has no handle that means it here; the legacy stream waits for it */
                mark(pool, pool->of.thread ? CU_STREAM_LEGACY : pool->of.stream);
            }
        }
        pthread_mutex_unlock(&lock);
        driver_turn_end();
    }
    captures_let_on();
}

void block_cache_quiet(struct gpu *gpu) {
    of_gpu[gpu->index].giving_back = false; /* there was work since */
    if (atomic_load(&gpu->cached)) mark_all(gpu);
}

void block_cache_give_back(struct gpu *gpu) {
    of_gpu[gpu->index].giving_back = true;
    atomic_store(&of_gpu[gpu->index].most_in_use, 0);
}

uint64_t block_cache_step(struct gpu *gpu, uint64_t now, bool work_may_come) {
    if (!of_gpu[gpu->index].giving_back) return UINT64_MAX;
    if (!atomic_load(&gpu->cached) || work_may_come) { /* a free would wait for new work */
        of_gpu[gpu->index].giving_back = false;
        return UINT64_MAX;
    }
    if (captures_in_progress()) return now + 10 * MILLISECOND;
    mark_all(gpu);
    if (!driver_turn_begin()) return UINT64_MAX;
    bool any = true;
    while (any && clock_now() - now < STEP_TIME) {
        any = false;
        pthread_mutex_lock(&lock);
        struct cache *cache = caches;
        struct block *block = NULL;
        CUcontext context = NULL;
        for (; cache && !block; cache = cache->next) {
            if (cache->gpu != gpu || context_leaves(cache->context) || !(block = oldest_passed(cache, true))) continue;
            context = cache->context;
        }
        pthread_mutex_unlock(&lock);
        if (!block) break;
        any = true;
        real.cuCtxSetCurrent(context);
        give_back(gpu, block);
    }
    driver_turn_end();
    return now + (any ? STEP_TIME : 4 * MILLISECOND);
}

/* ---- what goes ---- */

void block_cache_stream_gone(CUstream stream) {
    CUcontext current = NULL, popped;
    captures_hold_off();
    pthread_mutex_lock(&lock);
    for (struct cache *cache = caches; cache; cache = cache->next) {
        for (struct pool *pool = cache->pools; pool; pool = pool->next) {
            if (pool->state != POOL_OF_STREAM || pool->of.stream != stream) continue;
            pool->state = pool->tree ? POOL_OF_GONE_STREAM : POOL_UNUSED; /* its handle may be given to another */
            if (!pool->tree) continue;
            look(pool);
            if (pool->passed < pool->newest) {
                real.cuCtxGetCurrent(&current);
                bool entered =
                    current == pool->of.context || real.cuCtxPushCurrent_v2(pool->of.context) == CUDA_SUCCESS;
                if (entered) mark(pool, stream);
                if (entered && current != pool->of.context) real.cuCtxPopCurrent_v2(&popped);
                if (!pool->pending || pool->marked < pool->newest) pool->state = POOL_UNMARKED;
            }
        }
    }
    pthread_mutex_unlock(&lock);
    captures_let_on();
}

/* Work that was done in the context is over, and its events went with it. With the lock held. */
static void pools_of_context_gone(struct cache *cache, CUcontext context) {
    for (struct pool *pool = cache->pools; pool; pool = pool->next) {
        if (pool->of.context != context) continue;
        pool->mark = NULL;
        pool->pending = false;
        pool->passed = pool->newest;
        pool->state = pool->tree ? POOL_OF_GONE_STREAM : POOL_UNUSED;
    }
}

bool block_cache_of_context(CUcontext context) {
    bool found = false;
    pthread_mutex_lock(&lock);
    for (const struct cache *cache = caches; cache && !found; cache = cache->next) {
        found = cache->context == context && cache->oldest;
        for (const struct pool *pool = cache->pools; pool && !found; pool = pool->next)
            found = pool->of.context == context && pool->tree;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

void block_cache_context_moved(CUcontext from, CUcontext to) {
    pthread_mutex_lock(&lock);
    for (struct cache *cache = caches; cache; cache = cache->next) {
        pools_of_context_gone(cache, from);
        if (cache->context == from) cache->context = to;
    }
    pthread_mutex_unlock(&lock);
}

void block_cache_context_gone(CUcontext context) {
    pthread_mutex_lock(&lock);
    for (struct cache **link = &caches; *link;) {
        struct cache *cache = *link;
        if (cache->context == context) {
            while (cache->oldest) {
                struct block *block = cache->oldest;
                cache->oldest = block->newer;
                account_cached(cache->gpu, block->capacity, false);
                account_return(cache->gpu, block->capacity, ACCOUNT_MANAGED);
                spare(block);
            }
            while (cache->pools) {
                struct pool *pool = cache->pools;
                cache->pools = pool->next;
                free(pool);
            }
            *link = cache->next;
            free(cache);
            continue;
        }
        pools_of_context_gone(cache, context);
        link = &cache->next;
    }
    pthread_mutex_unlock(&lock);
}

void block_cache_forget(void) {
    caches = NULL;
    __builtin_memset(of_gpu, 0, sizeof of_gpu);
    pthread_mutex_init(&lock, NULL);
}
