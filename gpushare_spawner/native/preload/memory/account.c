#include "memory/account.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "contexts/captures.h"
#include "platform/settings.h"
#include "platform/wake.h"

/* ---- memory that the driver itself holds ---- */

struct pool {
    CUmempool handle;
    const struct gpu *gpu;
    struct pool *next;
};

static pthread_mutex_t pools_lock = PTHREAD_MUTEX_INITIALIZER; /* held while a pool is used, to keep it alive */
static struct pool *pools;

/* Return an attribute of a pool; 0 if the driver does not provide it. */
static uint64_t pool_attribute(CUmempool pool, int which) {
    uint64_t bytes = 0;
    if (!driver_has(cuMemPoolGetAttribute) || real.cuMemPoolGetAttribute(pool, which, &bytes) != CUDA_SUCCESS) return 0;
    return bytes;
}

static uint64_t pools_reserved_locked(const struct gpu *gpu) {
    uint64_t bytes = 0;
    for (struct pool *pool = pools; pool; pool = pool->next)
        if (pool->gpu == gpu) bytes += pool_attribute(pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
    return bytes;
}

static uint64_t pools_reserved(const struct gpu *gpu) {
    pthread_mutex_lock(&pools_lock);
    uint64_t bytes = pools_reserved_locked(gpu);
    pthread_mutex_unlock(&pools_lock);
    return bytes;
}

static uint64_t larger(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

bool account_pool_add(struct gpu *gpu, CUmempool handle) {
    pthread_mutex_lock(&pools_lock);
    struct pool *pool = pools;
    while (pool && (pool->handle != handle || pool->gpu != gpu)) pool = pool->next;
    if (!pool && (pool = malloc(sizeof *pool))) {
        *pool = (struct pool){handle, gpu, pools};
        pools = pool;
        atomic_fetch_or(&gpu->driver_memory, DRIVER_MEMORY_OF_POOLS);
    }
    pthread_mutex_unlock(&pools_lock);
    return pool != NULL;
}

uint64_t account_pool_growth(const struct gpu *gpu, CUmempool pool, uint64_t bytes) {
    pthread_mutex_lock(&pools_lock);
    uint64_t all = pools_reserved_locked(gpu);
    uint64_t own = pool_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
    /* includes memory whose free the stream has not passed yet, which the driver cannot reuse */
    uint64_t used = pool_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
    pthread_mutex_unlock(&pools_lock);
    uint64_t reusable = own > used ? own - used : 0, allocated = atomic_load(&gpu->pooled);
    uint64_t new = bytes > reusable ? bytes - reusable : 0;
    if (allocated > UINT64_MAX - bytes || all > UINT64_MAX - new) return UINT64_MAX;
    return larger(all + new, allocated + bytes) - larger(all, allocated);
}

static void trim_pools(const struct gpu *gpu) {
    pthread_mutex_lock(&pools_lock);
    for (struct pool *pool = pools; pool; pool = pool->next)
        if (pool->gpu == gpu && driver_has(cuMemPoolTrimTo)) real.cuMemPoolTrimTo(pool->handle, 0);
    pthread_mutex_unlock(&pools_lock);
}

bool account_pools_trim(const struct gpu *gpu, bool wait) {
    if (driver_background_suspended()) return false;
    uint64_t before = atomic_load(&gpu->driver_memory) & DRIVER_MEMORY_OF_POOLS ? pools_reserved(gpu) : 0;
    if (before <= atomic_load(&gpu->pooled)) return false;
    trim_pools(gpu);
    if (pools_reserved(gpu) < before) return true;
    /* the call would break a capture */
    if (!wait || captures_in_progress() || real.cuCtxSynchronize() != CUDA_SUCCESS) return false;
    trim_pools(gpu);
    return pools_reserved(gpu) < before;
}

CUresult account_pool_destroy(CUmempool handle) {
    pthread_mutex_lock(&pools_lock);
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
    pthread_mutex_unlock(&pools_lock);
    return result;
}

void account_graph_on(struct gpu *gpu) {
    atomic_fetch_or(&gpu->driver_memory, DRIVER_MEMORY_OF_GRAPHS);
}

void account_graph(void) {
    for (int i = 0; i < gpu_count; i++) account_graph_on(&gpus[i]);
}

static uint64_t graph_bytes(const struct gpu *gpu) {
    uint64_t bytes = 0;
    if (!(atomic_load(&gpu->driver_memory) & DRIVER_MEMORY_OF_GRAPHS) ||
        real.cuDeviceGetGraphMemAttribute(gpu->device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &bytes) != CUDA_SUCCESS)
        return 0;
    return bytes;
}

static _Atomic uint64_t last_answers[MAX_GPUS];

uint64_t account_query_driver(const struct gpu *gpu) {
    _Atomic uint64_t *last = &last_answers[gpu->index];
    if (driver_background_suspended()) return atomic_load(last); /* the driver may block the query */
    /* an allocation is counted before the driver has made it */
    uint64_t bytes = graph_bytes(gpu) + larger(pools_reserved(gpu), atomic_load(&gpu->pooled));
    atomic_store(last, bytes);
    return bytes;
}

/* ---- the sums ---- */

_Atomic bool account_taken;

void account_lock_contended(void) {
    unsigned tries = 0;
    do {
        while (atomic_load_explicit(&account_taken, memory_order_relaxed)) {
            struct timespec moment = {0, 20000};
            if (++tries > 200) nanosleep(&moment, NULL);
        }
    } while (atomic_exchange_explicit(&account_taken, true, memory_order_acquire));
}

bool account_take_within(struct gpu *gpu, const struct memory_request *request, uint64_t most) {
    uint64_t held = account_driver_bytes(gpu);
    size_t growth = account_growth(gpu, request);
    account_lock();
    bool fits = account_fits(gpu, growth, held, most ? most : atomic_load(&gpu->allowance));
    if (fits) account_add(gpu, request->bytes, request->account);
    account_unlock();
    return fits;
}

uint64_t account_used(const struct gpu *gpu) {
    return atomic_load(&gpu->managed) + atomic_load(&gpu->plain) + account_driver_bytes(gpu);
}

struct account_figures account_reported(const struct gpu *gpu) {
    uint64_t managed = atomic_load(&gpu->managed), plain = atomic_load(&gpu->plain) + account_driver_bytes(gpu);
    if (settings_engine() == ENGINE_MANAGED) return (struct account_figures){managed, plain, 0};
    uint64_t all = managed + plain, missing = atomic_load(&gpu->short_of);
    uint64_t needed = missing ? atomic_load(&gpu->short_above) + missing : 0;
    return all >= needed ? (struct account_figures){0, all, 0} : (struct account_figures){0, needed, needed - all};
}

void account_settle(void) {
    account_lock();
    account_unlock();
}

void account_cached(struct gpu *gpu, size_t bytes, bool begins) {
    if (begins)
        atomic_fetch_add(&gpu->cached, bytes);
    else
        atomic_fetch_sub(&gpu->cached, bytes);
}

void account_wake(struct gpu *gpu) {
    if (wake_listens() && !atomic_exchange(&gpu->changed, true)) wake_up();
}

RESET_IN_CHILD(account_reset);
void account_reset(void) {
    atomic_store(&account_taken, false);
    pools = NULL;
    pthread_mutex_init(&pools_lock, NULL);
    memset(last_answers, 0, sizeof last_answers);
}
