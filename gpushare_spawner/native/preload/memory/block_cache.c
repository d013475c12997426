/* Each context has a cache with a pool, a tree ordered by capacity, for each stream in which blocks were freed. A block
   may be used in another stream or returned to the driver after its stream has passed the free. An event of the pool,
   the mark, covers all frees before it, so that a free itself needs no driver call. */
#include "memory/block_cache.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "contexts/captures.h"
#include "contexts/contexts.h"
#include "memory/account.h"
#include "memory/tree.h"

/* The minimum bound on the cache, so that a program's first blocks are not freed immediately. */
#define ALWAYS_CACHED (64ull << 20)
/* Maximum numbers of pools and blocks that an allocation examines, so that its time does not depend on their total
   number. */
#define POOLS_EXAMINED  16
#define BLOCKS_EXAMINED 4
/* The longest wait for a stream. */
#define STREAM_PATIENCE (30 * SECOND)
/* The longest step of the background thread, which reads its socket between steps. */
#define STEP_TIME MILLISECOND

struct block {
    CUdeviceptr at;
    struct tree_node place; /* in the pool: ordered by capacity, then by the number of the free in the cache */
    struct pool *pool;
    struct block *older, *newer; /* in the cache; `older` also links spare blocks */
};

enum pool_state {
    POOL_UNUSED,
    POOL_OF_STREAM,
    POOL_OF_DESTROYED_STREAM, /* the stream is destroyed; the mark is behind its last work */
    POOL_UNMARKED,            /* the stream is destroyed and has no mark; it has passed when the GPU is idle */
};

struct pool {
    enum pool_state state;
    struct cache_stream of;
    struct tree_node *tree;
    CUevent mark;
    bool pending;                    /* the mark is recorded and had not passed at the last query */
    uint64_t newest, marked, passed; /* numbers of blocks: last freed; covered by the mark; certainly passed */
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

static size_t capacity_of(const struct block *block) {
    return block->place.key;
}

static uint64_t number_of(const struct block *block) {
    return block->place.order;
}

static struct block *block_of(struct tree_node *node) {
    return node ? tree_record(node, struct block, place) : NULL;
}

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
        *link = pool->next; /* move it to the front, because the program is likely to use it again */
        pool->next = cache->pools;
        cache->pools = pool;
        return pool;
    }
    return NULL;
}

static struct pool *pool_for(struct cache *cache, const struct cache_stream *of) {
    struct pool *pool = pool_of(cache, of);
    if (pool) return pool;
    /* an event belongs to a context, so a pool is reused only within its context */
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

/* Record the mark behind every freed block. With captures_lock held, and the pool's context current. */
static void record_mark(struct pool *pool, CUstream stream) {
    if (captures_in_progress()) return; /* it would become part of the graph or break the capture */
    if (!pool->mark && real.cuEventCreate(&pool->mark, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) pool->mark = NULL;
    if (!pool->mark || real.cuEventRecord(pool->mark, stream) != CUDA_SUCCESS) return;
    pool->pending = true;
    pool->marked = pool->newest;
}

/* Query the mark. */
static void query_mark(struct pool *pool) {
    /* an error counts as passed: a failed context does no work */
    if (!pool->pending || real.cuEventQuery(pool->mark) == CUDA_ERROR_NOT_READY) return;
    pool->pending = false;
    if (pool->passed < pool->marked) pool->passed = pool->marked;
}

/* Query a pool's mark, and record it again if blocks were freed after it. Called by a thread in context `current`. */
static void update_mark(struct pool *pool, CUcontext current, uint64_t thread) {
    query_mark(pool);
    if (pool->pending || pool->passed >= pool->newest || pool->state != POOL_OF_STREAM) return;
    if (pool->of.context != current || pool->of.thread != thread) return;
    record_mark(pool, pool->of.stream);
}

static void unlink_block(struct cache *cache, struct block *block) {
    struct pool *pool = block->pool;
    tree_remove(tree_link(&pool->tree, block->place.key, block->place.order));
    *(block->older ? &block->older->newer : &cache->oldest) = block->newer;
    *(block->newer ? &block->newer->older : &cache->newest) = block->older;
    if (!pool->tree && pool->state != POOL_OF_STREAM) pool->state = POOL_UNUSED;
}

static void block_spare(struct block *block) {
    block->older = spare_blocks;
    spare_blocks = block;
}

/* ---- taking and keeping ---- */

/* Return a block of the pool for an allocation of `bytes`. `same`: the allocation is in the pool's stream. */
static struct block *fitting(struct pool *pool, size_t bytes, bool same) {
    size_t most = bytes + bytes / 4;
    struct block *block = block_of(tree_first_from(pool->tree, bytes, 0));
    for (int i = 0; block && capacity_of(block) <= most && i < BLOCKS_EXAMINED; i++) {
        if (same || number_of(block) <= pool->passed) return block;
        block = block_of(tree_first_from(pool->tree, capacity_of(block), number_of(block) + 1));
    }
    return NULL;
}

static struct block *fitting_elsewhere(struct cache *cache, const struct cache_stream *by, size_t bytes) {
    int examined = 0;
    for (struct pool *pool = cache->pools; pool && examined < POOLS_EXAMINED; pool = pool->next) {
        if (!pool->tree) continue;
        examined++;
        update_mark(pool, by->context, pool->of.thread ? block_cache_thread() : 0);
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
        captures_lock();
        pthread_mutex_lock(&lock);
        cache = cache_of(gpu, context);
        block = cache ? fitting_elsewhere(cache, by, bytes) : NULL;
        if (block) unlink_block(cache, block);
        pthread_mutex_unlock(&lock);
        captures_unlock();
    }
    if (!block) return false;
    *taken = (struct cached_memory){block->at, capacity_of(block)};
    account_cached(gpu, capacity_of(block), false);
    pthread_mutex_lock(&lock);
    block_spare(block);
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
    if (block) spare_blocks = block->older;
    struct cache *cache = cache_for(gpu, context);
    struct pool *pool = cache ? pool_for(cache, by) : NULL;
    if (!block) block = malloc(sizeof *block);
    if (!block || !pool) {
        if (block) block_spare(block);
        pthread_mutex_unlock(&lock);
        return false;
    }
    *block = (struct block){.at = memory.at, .place = {.key = memory.capacity, .order = ++cache->number}, .pool = pool};
    pool->newest = number_of(block);
    tree_insert(&pool->tree, &block->place);
    block->older = cache->newest;
    *(cache->newest ? &cache->newest->newer : &cache->oldest) = block;
    cache->newest = block;
    /* A single stream can use the block immediately. Another stream would wait for a mark, so the mark is recorded now;
       only the thread of a per-thread default stream can record that stream's mark. */
    bool mark_now = !pool->pending && (cache->pools->next || pool->of.thread);
    account_cached(gpu, memory.capacity, true); /* with the lock held, so that the block is not taken before it is
                                                   counted */
    pthread_mutex_unlock(&lock);
    if (mark_now) {
        captures_lock();
        pthread_mutex_lock(&lock);
        if ((cache = cache_of(gpu, context)) && (pool = pool_of(cache, by))) update_mark(pool, by->context, by->thread);
        pthread_mutex_unlock(&lock);
        captures_unlock();
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

/* Remove the oldest block whose free its stream has passed. `idle`: all work of the process on the GPU is done. With
   the lock held. */
static struct block *take_oldest_passed(struct cache *cache, bool idle) {
    for (struct block *block = cache->oldest; block; block = block->newer) {
        struct pool *pool = block->pool;
        if (number_of(block) > pool->passed && !(idle && pool->state == POOL_UNMARKED)) continue;
        unlink_block(cache, block);
        return block;
    }
    return NULL;
}

/* Return a block to the driver. With the memory's context current and without the lock, because a free may wait for the
   whole device. */
static bool free_block(struct gpu *gpu, struct block *block) {
    /* otherwise this free would be a forbidden call during another thread's capture and would end the capture */
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    real.cuThreadExchangeStreamCaptureMode(&mode);
    CUresult result = real.cuMemFree_v2(block->at);
    real.cuThreadExchangeStreamCaptureMode(&mode);
    if (result != CUDA_SUCCESS) {
        static _Atomic bool logged;
        if (!atomic_exchange(&logged, true))
            log_line(LOG_ERROR, "GPU %d: %zu bytes of freed memory cannot be returned to the driver: CUDA error %d",
                     gpu->index, capacity_of(block), result);
    }
    /* even after an error: the block is not reused, and a failed context releases its memory */
    account_cached(gpu, capacity_of(block), false);
    account_return(gpu, capacity_of(block), ACCOUNT_MANAGED);
    pthread_mutex_lock(&lock);
    block_spare(block);
    pthread_mutex_unlock(&lock);
    return result == CUDA_SUCCESS;
}

static void sleep_shortly(uint64_t waited) {
    struct timespec moment = {0, waited < MILLISECOND ? 20000 : 500000};
    nanosleep(&moment, NULL);
}

static bool trim(struct gpu *gpu, CUcontext current, size_t bytes) {
    size_t freed = 0;
    bool any = false;
    uint64_t begun = clock_now();
    while (freed < bytes && atomic_load(&gpu->cached) && !captures_in_progress()) {
        captures_lock();
        pthread_mutex_lock(&lock);
        struct cache *cache = cache_of(gpu, current);
        struct block *block = NULL;
        bool pending = false;
        if (cache) {
            for (struct pool *pool = cache->pools; pool; pool = pool->next) {
                if (!pool->tree) continue;
                update_mark(pool, current, pool->of.thread ? block_cache_thread() : 0);
                pending |= pool->pending;
            }
            block = take_oldest_passed(cache, false);
        }
        pthread_mutex_unlock(&lock);
        captures_unlock();
        if (block) {
            freed += capacity_of(block);
            any |= free_block(gpu, block);
        } else {
            uint64_t waited = clock_now() - begun;
            if (!pending || waited > STREAM_PATIENCE) break;
            sleep_shortly(waited);
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
    /* `bytes` are counted already */
    uint64_t in_use = managed > cached ? managed - cached : bytes;
    _Atomic uint64_t *most = &of_gpu[gpu->index].most_in_use;
    uint64_t before = atomic_load(most);
    while (in_use > before && !atomic_compare_exchange_weak(most, &before, in_use)) {
    }
    uint64_t bound = in_use > before ? in_use : before;
    if (bound < ALWAYS_CACHED) bound = ALWAYS_CACHED;
    /* down to half of it, so that the next allocations do not need to wait as well */
    if (cached > bound) trim(gpu, current, cached - bound / 2);
}

/* ---- the background thread ---- */

static void record_all_marks(struct gpu *gpu) {
    captures_lock();
    if (contexts_turn_begin()) {
        pthread_mutex_lock(&lock);
        for (struct cache *cache = caches; cache; cache = cache->next) {
            if (cache->gpu != gpu) continue;
            for (struct pool *pool = cache->pools; pool; pool = pool->next) {
                if (!pool->tree || context_in_destruction(pool->of.context)) continue;
                query_mark(pool);
                if (pool->pending || pool->passed >= pool->newest || pool->state != POOL_OF_STREAM) continue;
                if (real.cuCtxSetCurrent(pool->of.context) != CUDA_SUCCESS) continue;
                /* this thread has no handle for another thread's default stream; the legacy stream waits for that
                   stream */
                record_mark(pool, pool->of.thread ? CU_STREAM_LEGACY : pool->of.stream);
            }
        }
        pthread_mutex_unlock(&lock);
        contexts_turn_end();
    }
    captures_unlock();
}

void block_cache_quiet(struct gpu *gpu) {
    of_gpu[gpu->index].giving_back = false; /* there has been work in between */
    if (atomic_load(&gpu->cached)) record_all_marks(gpu);
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
    record_all_marks(gpu);
    if (!contexts_turn_begin()) return UINT64_MAX;
    bool any = true;
    while (any && clock_now() - now < STEP_TIME) {
        any = false;
        pthread_mutex_lock(&lock);
        struct cache *cache = caches;
        struct block *block = NULL;
        CUcontext context = NULL;
        for (; cache && !block; cache = cache->next) {
            if (cache->gpu != gpu || context_in_destruction(cache->context) ||
                !(block = take_oldest_passed(cache, true)))
                continue;
            context = cache->context;
        }
        pthread_mutex_unlock(&lock);
        if (!block) break;
        any = true;
        real.cuCtxSetCurrent(context);
        free_block(gpu, block);
    }
    contexts_turn_end();
    return now + (any ? STEP_TIME : 4 * MILLISECOND);
}

/* ---- streams and contexts that are destroyed ---- */

void block_cache_remove_stream(CUstream stream) {
    CUcontext current = NULL, popped;
    captures_lock();
    pthread_mutex_lock(&lock);
    for (struct cache *cache = caches; cache; cache = cache->next) {
        for (struct pool *pool = cache->pools; pool; pool = pool->next) {
            if (pool->state != POOL_OF_STREAM || pool->of.stream != stream) continue;
            pool->state =
                pool->tree ? POOL_OF_DESTROYED_STREAM : POOL_UNUSED; /* its handle may be reused for another stream */
            if (!pool->tree) continue;
            query_mark(pool);
            if (pool->passed < pool->newest) {
                real.cuCtxGetCurrent(&current);
                bool entered =
                    current == pool->of.context || real.cuCtxPushCurrent_v2(pool->of.context) == CUDA_SUCCESS;
                if (entered) record_mark(pool, stream);
                if (entered && current != pool->of.context) real.cuCtxPopCurrent_v2(&popped);
                if (!pool->pending || pool->marked < pool->newest) pool->state = POOL_UNMARKED;
            }
        }
    }
    pthread_mutex_unlock(&lock);
    captures_unlock();
}

/* Update the pools of a destroyed context: its work is done, and its events no longer exist. With the lock held. */
static void end_pools_of_context(struct cache *cache, CUcontext context) {
    for (struct pool *pool = cache->pools; pool; pool = pool->next) {
        if (pool->of.context != context) continue;
        pool->mark = NULL;
        pool->pending = false;
        pool->passed = pool->newest;
        pool->state = pool->tree ? POOL_OF_DESTROYED_STREAM : POOL_UNUSED;
    }
}

bool block_cache_has_context(CUcontext context) {
    bool has = false;
    pthread_mutex_lock(&lock);
    for (const struct cache *cache = caches; cache && !has; cache = cache->next) {
        has = cache->context == context && cache->oldest;
        for (const struct pool *pool = cache->pools; pool && !has; pool = pool->next)
            has = pool->of.context == context && pool->tree;
    }
    pthread_mutex_unlock(&lock);
    return has;
}

void block_cache_move_context(CUcontext from, CUcontext to) {
    pthread_mutex_lock(&lock);
    for (struct cache *cache = caches; cache; cache = cache->next) {
        end_pools_of_context(cache, from);
        if (cache->context == from) cache->context = to;
    }
    pthread_mutex_unlock(&lock);
}

void block_cache_remove_context(CUcontext context) {
    pthread_mutex_lock(&lock);
    for (struct cache **link = &caches; *link;) {
        struct cache *cache = *link;
        if (cache->context == context) {
            while (cache->oldest) {
                struct block *block = cache->oldest;
                cache->oldest = block->newer;
                account_cached(cache->gpu, capacity_of(block), false);
                account_return(cache->gpu, capacity_of(block), ACCOUNT_MANAGED);
                block_spare(block);
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
        end_pools_of_context(cache, context);
        link = &cache->next;
    }
    pthread_mutex_unlock(&lock);
}

RESET_IN_CHILD(block_cache_reset);
void block_cache_reset(void) {
    caches = NULL;
    spare_blocks = NULL;
    memset(of_gpu, 0, sizeof of_gpu);
    pthread_mutex_init(&lock, NULL);
}
