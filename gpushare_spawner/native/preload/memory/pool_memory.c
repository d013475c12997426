#include "memory/pool_memory.h"

#include <pthread.h>
#include <stdlib.h>

#include "contexts/captures.h"
#include "driver/driver.h"
#include "driver/suspension.h"

struct pool {
    CUmempool handle;
    const struct gpu *gpu;
    struct pool *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* also held while a pool is asked: it is not destroyed then */
static struct pool *pools;

/* 0 where the driver does not say. */
static uint64_t attribute(CUmempool pool, int which) {
    uint64_t bytes = 0;
    if (!driver_has(cuMemPoolGetAttribute) || real.cuMemPoolGetAttribute(pool, which, &bytes) != CUDA_SUCCESS) return 0;
    return bytes;
}

static uint64_t reserved_with_lock(const struct gpu *gpu) {
    uint64_t bytes = 0;
    for (struct pool *pool = pools; pool; pool = pool->next)
        if (pool->gpu == gpu) bytes += attribute(pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
    return bytes;
}

static uint64_t reserved(const struct gpu *gpu) {
    pthread_mutex_lock(&lock);
    uint64_t bytes = reserved_with_lock(gpu);
    pthread_mutex_unlock(&lock);
    return bytes;
}

static uint64_t larger(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

uint64_t pool_memory_bytes(const struct gpu *gpu) {
    /* an allocation counts before the driver has made it */
    return larger(reserved(gpu), atomic_load(&gpu->pooled));
}

bool pool_memory_seen(struct gpu *gpu, CUmempool handle) {
    pthread_mutex_lock(&lock);
    struct pool *pool = pools;
    while (pool && (pool->handle != handle || pool->gpu != gpu)) pool = pool->next;
    if (!pool && (pool = malloc(sizeof *pool))) {
        *pool = (struct pool){handle, gpu, pools};
        pools = pool;
        atomic_fetch_or(&gpu->driver_memory, DRIVER_MEMORY_OF_POOLS);
    }
    pthread_mutex_unlock(&lock);
    return pool != NULL;
}

uint64_t pool_memory_growth(const struct gpu *gpu, CUmempool pool, uint64_t bytes) {
    pthread_mutex_lock(&lock);
    uint64_t all = reserved_with_lock(gpu);
    uint64_t own = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
    /* not what was freed in a stream that has not come there: the driver does not count that as unused */
    uint64_t used = attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
    pthread_mutex_unlock(&lock);
    uint64_t reusable = own > used ? own - used : 0, allocated = atomic_load(&gpu->pooled);
    uint64_t new = bytes > reusable ? bytes - reusable : 0;
    if (allocated > UINT64_MAX - bytes || all > UINT64_MAX - new) return UINT64_MAX;
    return larger(all + new, allocated + bytes) - larger(all, allocated);
}

static void trim(const struct gpu *gpu) {
    pthread_mutex_lock(&lock);
    for (struct pool *pool = pools; pool; pool = pool->next)
        if (pool->gpu == gpu && driver_has(cuMemPoolTrimTo)) real.cuMemPoolTrimTo(pool->handle, 0);
    pthread_mutex_unlock(&lock);
}

bool pool_memory_release(const struct gpu *gpu, bool wait) {
    if (suspension_stops_background()) return false;
    uint64_t before = atomic_load(&gpu->driver_memory) & DRIVER_MEMORY_OF_POOLS ? reserved(gpu) : 0;
    if (before <= atomic_load(&gpu->pooled)) return false;
    trim(gpu);
    if (reserved(gpu) < before) return true;
    /* the call would break a capture */
    if (!wait || captures_in_progress() || real.cuCtxSynchronize() != CUDA_SUCCESS) return false;
    trim(gpu);
    return reserved(gpu) < before;
}

CUresult pool_memory_destroy(CUmempool handle) {
    pthread_mutex_lock(&lock);
    for (struct pool **link = &pools; *link;) {
        struct pool *pool = *link;
        if (pool->handle == handle) {
            *link = pool->next;
            free(pool);
        } else {
            link = &pool->next;
        }
    }
    CUresult result = real.cuMemPoolDestroy(handle);
    pthread_mutex_unlock(&lock);
    return result;
}

void pool_memory_forget(void) {
    pools = NULL;
    pthread_mutex_init(&lock, NULL);
}
