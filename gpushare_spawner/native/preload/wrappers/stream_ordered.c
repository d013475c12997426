/* A block that is freed in a stream goes into the cache (block_cache.c), from which later allocations take it. The
   driver gets it back when memory is short or the GPU has been quiet for a while: a free of managed memory may wait for
   the whole device, and a training step must not. */
#include "wrappers/stream_ordered.h"

#include <pthread.h>
#include <stdlib.h>

#include "memory/allocations.h"
#include "memory/block_cache.h"
#include "contexts/captures.h"
#include "driver/driver.h"
#include "memory/allowance.h"
#include "memory/conversion.h"
#include "memory/graph_memory.h"
#include "memory/pool_memory.h"
#include "memory/ties.h"
#include "platform/engine.h"
#include "wrappers/exported.h"

/* Pools that converted memory cannot stand in for. */
struct plain_pool {
    CUmempool pool;
    enum pool_kind {
        POOL_OWN,     /* of this process, on a GPU, and made to be shared with others */
        POOL_FOREIGN, /* of another process, or not on a GPU */
        POOL_MANAGED, /* of managed memory, which the program asked for */
    } kind;
    struct plain_pool *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct plain_pool *plain_pools;

/* Blocks are rounded up so that one can serve another allocation of about its size. */
static size_t rounded(size_t bytes) {
    size_t step = bytes < (1u << 20) ? 512 : 2u << 20;
    return bytes > SIZE_MAX - step ? bytes : (bytes + step - 1) / step * step;
}

void stream_ordered_forget(void) {
    plain_pools = NULL;
    pthread_mutex_init(&lock, NULL);
}

static struct cache_stream used_by(CUcontext current, CUstream stream) {
    if (stream == CU_STREAM_LEGACY) stream = NULL;
    return (struct cache_stream){current, stream, stream == CU_STREAM_PER_THREAD ? block_cache_thread() : 0};
}

/* With the lock held. */
static struct plain_pool *plain_pool_of(CUmempool pool) {
    struct plain_pool *entry = plain_pools;
    while (entry && entry->pool != pool) entry = entry->next;
    return entry;
}

static bool is_plain(CUmempool pool) {
    pthread_mutex_lock(&lock);
    bool plain = plain_pool_of(pool) != NULL;
    pthread_mutex_unlock(&lock);
    return plain;
}

static bool is_managed(CUmempool pool) {
    pthread_mutex_lock(&lock);
    const struct plain_pool *entry = plain_pool_of(pool);
    bool managed = entry && entry->kind == POOL_MANAGED;
    pthread_mutex_unlock(&lock);
    return managed;
}

/* The pool that the driver takes plain memory from; NULL: none whose reserved memory is this process's on a GPU. */
static CUmempool counted_pool(const struct gpu *gpu, CUmempool pool) {
    if (!pool && (!driver_has(cuDeviceGetMemPool) || real.cuDeviceGetMemPool(&pool, gpu->device) != CUDA_SUCCESS))
        return NULL;
    pthread_mutex_lock(&lock);
    const struct plain_pool *entry = plain_pool_of(pool);
    bool counted = !entry || entry->kind == POOL_OWN;
    pthread_mutex_unlock(&lock);
    return counted ? pool : NULL;
}

/* CUDA_ERROR_NOT_FOUND: not converted. */
static CUresult allocate_managed(struct gpu *gpu, CUdeviceptr *out, size_t bytes, CUstream stream) {
    CUcontext current = NULL;
    real.cuCtxGetCurrent(&current);
    struct cache_stream by = used_by(current, stream);
    struct cached_memory block = {0, rounded(bytes)};
    bool again = block_cache_take(gpu, current, &by, block.capacity, &block);
    if (!again) {
        if (!allowance_take(gpu, block.capacity, true, true)) return CUDA_ERROR_OUT_OF_MEMORY;
        block_cache_make_room(gpu, current, block.capacity);
        CUresult result = conversion_allocate(gpu, &block.at, block.capacity);
        if (result != CUDA_SUCCESS && block_cache_trim(gpu, block.capacity))
            result = conversion_allocate(gpu, &block.at, block.capacity);
        if (result != CUDA_SUCCESS) {
            account_return(gpu, block.capacity, ACCOUNT_MANAGED);
            return CUDA_ERROR_NOT_FOUND;
        }
    }
    *out = block.at;
    allocations_add(gpu, *out, bytes, block.capacity, ALLOCATION_CONVERTED);
    return CUDA_SUCCESS;
}

/* Set plain memory aside. `pool`: of the driver's call, NULL for the current one of the GPU; becomes the pool whose
   reserved memory counts, NULL: the allocation counts by itself. */
static bool take_plain(struct gpu *gpu, size_t bytes, CUmempool *pool) {
    *pool = counted_pool(gpu, *pool);
    if (*pool && !pool_memory_seen(gpu, *pool)) *pool = NULL;
    return *pool ? allowance_take_from_pool(gpu, bytes, *pool) : allowance_take(gpu, bytes, false, true);
}

/* A pool can be one of managed memory, made by the program or the driver's own. */
static void pool_used_for(CUmempool pool, CUdeviceptr at, size_t bytes) {
    unsigned char managed = 0;
    if (real.cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, at) == CUDA_SUCCESS && managed)
        ties_add_once((struct tie){TIE_MANAGED, TIE_POOL, (uintptr_t)pool, 0, bytes, NULL});
}

/* What the driver itself allocated, in the order of the stream. `pool`: the program's; NULL: the GPU's own. */
static CUresult counted(struct gpu *gpu, CUresult result, CUdeviceptr *out, size_t bytes, bool pooled, CUmempool pool) {
    if (result == CUDA_SUCCESS && pool && engine_suspends()) pool_used_for(pool, *out, bytes);
    if (result == CUDA_SUCCESS)
        allocations_add(gpu, *out, bytes, bytes, pooled ? ALLOCATION_POOLED : ALLOCATION_PLAIN);
    else
        account_return(gpu, bytes, pooled ? ACCOUNT_POOLED : ACCOUNT_PLAIN);
    return result;
}

/* What the driver took from a pool of managed memory: counted and moved as that of cuMemAllocManaged. */
static CUresult managed(struct gpu *gpu, CUresult result, CUdeviceptr *out, size_t bytes, CUmempool pool) {
    if (result == CUDA_SUCCESS) {
        if (engine_suspends()) pool_used_for(pool, *out, bytes);
        allocations_add(gpu, *out, bytes, bytes, ALLOCATION_MANAGED);
    } else {
        account_return(gpu, bytes, ACCOUNT_MANAGED);
    }
    return result;
}

#define ALLOCATING(call, from_pool, meant)                                                                             \
    struct gpu *gpu = out && bytes ? gpu_current() : NULL;                                                             \
    if (!gpu) return call;                                                                                             \
    if (captures_in_progress() && capture_records(meant)) {                                                            \
        graph_memory_seen_on(gpu); /* a node of a graph, counted by the driver */                                      \
        return call;                                                                                                   \
    }                                                                                                                  \
    CUmempool pool_used = from_pool;                                                                                   \
    if (pool_used && is_managed(pool_used)) {                                                                          \
        if (!allowance_take(gpu, bytes, true, false)) return CUDA_ERROR_OUT_OF_MEMORY;                                 \
        return managed(gpu, call, out, bytes, pool_used);                                                              \
    }                                                                                                                  \
    if (conversion_wanted(gpu) && !(pool_used && is_plain(pool_used)) && !captures_in_progress()) {                    \
        CUresult result = allocate_managed(gpu, out, bytes, meant);                                                    \
        if (result != CUDA_ERROR_NOT_FOUND) return result;                                                             \
    }                                                                                                                  \
    if (!take_plain(gpu, bytes, &pool_used)) return CUDA_ERROR_OUT_OF_MEMORY;                                          \
    return counted(gpu, call, out, bytes, pool_used != NULL, from_pool)

CUresult wrapped_cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream) {
    ALLOCATING(real.cuMemAllocAsync(out, bytes, stream), NULL, stream);
}

CUresult wrapped_cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream stream) {
    ALLOCATING(real.cuMemAllocAsync_ptsz(out, bytes, stream), NULL, own(stream));
}

CUresult wrapped_cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmempool pool, CUstream stream) {
    ALLOCATING(real.cuMemAllocFromPoolAsync(out, bytes, pool, stream), pool, stream);
}

CUresult wrapped_cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmempool pool, CUstream stream) {
    ALLOCATING(real.cuMemAllocFromPoolAsync_ptsz(out, bytes, pool, stream), pool, own(stream));
}

/* Put a converted block into the cache behind the stream's work. False: it is not one of ours, the driver frees it. */
static bool keep(CUdeviceptr at, CUstream stream, CUresult *result) {
    struct allocation allocation;
    if (!allocations_find(at, &allocation) || allocation.at != at || allocation.kind != ALLOCATION_CONVERTED)
        return false;
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    /* the driver's own answer to a stream that is none, or that is being captured: the block is not a graph's memory */
    *result = driver_has(cuStreamIsCapturing) ? real.cuStreamIsCapturing(stream, &status) : CUDA_SUCCESS;
    if (*result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE) *result = CUDA_ERROR_INVALID_VALUE;
    if (*result != CUDA_SUCCESS) return true;
    CUcontext current = NULL;
    real.cuCtxGetCurrent(&current);
    struct cache_stream by = used_by(current ? current : allocation.context, stream);
    if (!allocations_remove(at, &allocation)) {
        *result = CUDA_ERROR_INVALID_VALUE; /* freed by another thread just now */
        return true;
    }
    struct cached_memory block = {at, allocation.capacity};
    if (!block_cache_put(allocation.gpu, allocation.context, &by, block)) {
        *result = real.cuMemFree_v2(at);
        account_return(allocation.gpu, allocation.capacity, ACCOUNT_MANAGED);
    }
    return true;
}

CUresult wrapped_cuMemFreeAsync(CUdeviceptr at, CUstream stream) {
    CUresult result;
    if (keep(at, stream, &result)) return result;
    struct allocation allocation;
    bool known = allocations_remove(at, &allocation);
    if (!known && block_cache_has(at)) return CUDA_ERROR_INVALID_VALUE; /* freed twice */
    result = real.cuMemFreeAsync(at, stream);
    return known ? allocations_freed(&allocation, result) : result;
}

CUresult wrapped_cuMemFreeAsync_ptsz(CUdeviceptr at, CUstream stream) {
    CUresult result;
    if (keep(at, own(stream), &result)) return result;
    struct allocation allocation;
    bool known = allocations_remove(at, &allocation);
    if (!known && block_cache_has(at)) return CUDA_ERROR_INVALID_VALUE; /* freed twice */
    result = real.cuMemFreeAsync_ptsz(at, stream);
    return known ? allocations_freed(&allocation, result) : result;
}

static void remember_plain(CUmempool pool, enum pool_kind kind) {
    pthread_mutex_lock(&lock);
    struct plain_pool *entry = plain_pool_of(pool); /* one of the driver's own can be asked for again */
    if (!entry && (entry = malloc(sizeof *entry))) {
        *entry = (struct plain_pool){pool, kind, plain_pools};
        plain_pools = entry;
    }
    pthread_mutex_unlock(&lock);
}

static CUresult got(CUresult result, const CUmempool *out, int type) {
    if (result == CUDA_SUCCESS && type == CU_MEM_ALLOCATION_TYPE_MANAGED) remember_plain(*out, POOL_MANAGED);
    return result;
}

CUresult wrapped_cuMemGetDefaultMemPool(CUmempool *out, CUmemLocation *location, int type) {
    return got(real.cuMemGetDefaultMemPool(out, location, type), out, type);
}

CUresult wrapped_cuMemGetMemPool(CUmempool *out, CUmemLocation *location, int type) {
    return got(real.cuMemGetMemPool(out, location, type), out, type);
}

CUresult wrapped_cuMemPoolCreate(CUmempool *out, const CUmemPoolProps *props) {
    CUresult result = real.cuMemPoolCreate(out, props);
    bool on_gpu = result == CUDA_SUCCESS && props->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (result == CUDA_SUCCESS && props->allocType != CU_MEM_ALLOCATION_TYPE_MANAGED && (props->handleTypes || !on_gpu))
        remember_plain(*out, on_gpu ? POOL_OWN : POOL_FOREIGN);
    return got(result, out, result == CUDA_SUCCESS ? props->allocType : 0);
}

CUresult wrapped_cuMemPoolImportFromShareableHandle(CUmempool *out, void *handle, int type, unsigned long long flags) {
    CUresult result = real.cuMemPoolImportFromShareableHandle(out, handle, type, flags);
    if (result == CUDA_SUCCESS) remember_plain(*out, POOL_FOREIGN);
    if (result == CUDA_SUCCESS && engine_suspends())
        ties_add((struct tie){TIE_OPENED, TIE_POOL, (uintptr_t)*out, 0, 0, NULL});
    return result;
}

CUresult wrapped_cuMemPoolExportToShareableHandle(void *out, CUmempool pool, int type, unsigned long long flags) {
    CUresult result = real.cuMemPoolExportToShareableHandle(out, pool, type, flags);
    if (result == CUDA_SUCCESS) ties_add_once((struct tie){TIE_EXPORTED, TIE_POOL, (uintptr_t)pool, 0, 0, NULL});
    return result;
}

CUresult wrapped_cuMemPoolDestroy(CUmempool pool) {
    pthread_mutex_lock(&lock);
    for (struct plain_pool **link = &plain_pools; *link; link = &(*link)->next) {
        if ((*link)->pool != pool) continue;
        struct plain_pool *entry = *link;
        *link = entry->next;
        free(entry);
        break;
    }
    pthread_mutex_unlock(&lock);
    ties_remove_all(TIE_POOL, (uintptr_t)pool);
    return pool_memory_destroy(pool);
}
