/* Wrappers of the calls that allocate and free device memory: cuMemAlloc and similar calls, and the stream-ordered
   calls. If the memory may leave the GPU, it is replaced by managed memory.

   A block that is freed in a stream goes into the cache (block_cache.c), from which later allocations take it. It is
   returned to the driver when memory is short or the GPU has been quiet for a while: a free of managed memory may wait
   for the whole device, but a training step must not wait. */
#include <pthread.h>
#include <stdlib.h>

#include "contexts/captures.h"
#include "memory/allocations.h"
#include "memory/allowance.h"
#include "memory/block_cache.h"
#include "memory/ties.h"
#include "platform/settings.h"

/* The row pitch of a 2D allocation, which has been the same on every GPU so far. */
#define PITCH 512

/* Count, convert and record an allocation. CUDA_ERROR_NOT_FOUND: not converted; the caller requests plain memory from
   the driver. */
static CUresult allocate_converted(struct gpu *gpu, CUdeviceptr *out, size_t bytes) {
    CUdeviceptr at;
    if (account_has_room(gpu, bytes) && allocation_convert(gpu, &at, bytes) == CUDA_SUCCESS) {
        if (allocations_add_within(gpu, at, bytes, ALLOCATION_CONVERTED)) {
            *out = at;
            return CUDA_SUCCESS;
        }
        real.cuMemFree_v2(at); /* another thread has taken the allowance */
    }
    if (!allowance_take(gpu, bytes, true, true)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (allocation_convert(gpu, &at, bytes) != CUDA_SUCCESS) {
        /* freed blocks in the cache may take the missing memory */
        if (!block_cache_trim(gpu, bytes) || allocation_convert(gpu, &at, bytes) != CUDA_SUCCESS) {
            account_return(gpu, bytes, ACCOUNT_MANAGED);
            return CUDA_ERROR_NOT_FOUND;
        }
    }
    allocations_add(gpu, at, bytes, bytes, ALLOCATION_CONVERTED);
    *out = at;
    return CUDA_SUCCESS;
}

CUresult wrapped_cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
    struct gpu *gpu = out && bytes ? gpu_current() : NULL;
    if (!gpu) return real.cuMemAlloc_v2(out, bytes);
    if (allocation_converts(gpu)) {
        CUresult result = allocate_converted(gpu, out, bytes);
        if (result != CUDA_ERROR_NOT_FOUND) return result;
    }
    if (!allowance_take(gpu, bytes, false, true)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real.cuMemAlloc_v2(out, bytes);
    if (result == CUDA_SUCCESS)
        allocations_add(gpu, *out, bytes, bytes, ALLOCATION_PLAIN);
    else
        account_return(gpu, bytes, ACCOUNT_PLAIN);
    return result;
}

CUresult wrapped_cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element) {
    bool sound = out && pitch && width && height && (element == 4 || element == 8 || element == 16);
    struct gpu *gpu = sound ? gpu_current() : NULL;
    size_t row = (width + PITCH - 1) / PITCH * PITCH, bytes;
    if (!gpu || row < width || __builtin_mul_overflow(row, height, &bytes))
        return real.cuMemAllocPitch_v2(out, pitch, width, height, element);
    if (allocation_converts(gpu)) {
        CUresult result = allocate_converted(gpu, out, bytes);
        if (result == CUDA_SUCCESS) *pitch = row;
        if (result != CUDA_ERROR_NOT_FOUND) return result;
    }
    if (!allowance_take(gpu, bytes, false, true)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real.cuMemAllocPitch_v2(out, pitch, width, height, element);
    if (result == CUDA_SUCCESS)
        allocations_add(gpu, *out, bytes, bytes, ALLOCATION_PLAIN);
    else
        account_return(gpu, bytes, ACCOUNT_PLAIN);
    return result;
}

/* Memory that the program requests as managed may exceed the GPU's memory by the driver's own rules: it is counted and
   moved, and refused only if host memory is short. */
CUresult wrapped_cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags) {
    struct gpu *gpu = out && bytes ? gpu_current() : NULL;
    if (!gpu) return real.cuMemAllocManaged(out, bytes, flags);
    if (!allowance_take(gpu, bytes, true, false)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real.cuMemAllocManaged(out, bytes, flags);
    if (result == CUDA_SUCCESS)
        allocations_add(gpu, *out, bytes, bytes, ALLOCATION_MANAGED);
    else
        account_return(gpu, bytes, ACCOUNT_MANAGED);
    return result;
}

CUresult wrapped_cuMemFree_v2(CUdeviceptr at) {
    struct allocation allocation;
    /* removed first, because the pager must not use memory that is being freed */
    bool recorded = allocations_remove(at, &allocation);
    if (!recorded && at && block_cache_has(at)) return CUDA_ERROR_INVALID_VALUE; /* freed twice */
    CUresult result = real.cuMemFree_v2(at);
    return recorded ? allocations_freed(&allocation, result) : result;
}

/* ---- stream-ordered memory ---- */

/* A pool whose memory cannot be replaced by converted memory. */
struct plain_pool {
    CUmempool pool;
    enum pool_kind {
        POOL_OWN,     /* belongs to this process, is on a GPU, and can be shared with others */
        POOL_FOREIGN, /* belongs to another process or is not on a GPU */
        POOL_MANAGED, /* of managed memory, which the program requested */
    } kind;
    struct plain_pool *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct plain_pool *plain_pools;

/* Round up the size of a block, so that it can serve another allocation of about the same size. */
static size_t rounded(size_t bytes) {
    size_t step = bytes < (1u << 20) ? 512 : 2u << 20;
    return bytes > SIZE_MAX - step ? bytes : (bytes + step - 1) / step * step;
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

/* Return the pool from which the driver takes plain memory; NULL: its reserved memory is not this process's memory on a
   GPU. */
static CUmempool counted_pool(const struct gpu *gpu, CUmempool pool) {
    if (!pool && (!driver_has(cuDeviceGetMemPool) || real.cuDeviceGetMemPool(&pool, gpu->device) != CUDA_SUCCESS))
        return NULL;
    pthread_mutex_lock(&lock);
    const struct plain_pool *entry = plain_pool_of(pool);
    bool counted = !entry || entry->kind == POOL_OWN;
    pthread_mutex_unlock(&lock);
    return counted ? pool : NULL;
}

/* Take a block from the cache, or convert an allocation. CUDA_ERROR_NOT_FOUND: not converted. */
static CUresult allocate_block(struct gpu *gpu, CUdeviceptr *out, size_t bytes, CUstream stream) {
    CUcontext current = NULL;
    real.cuCtxGetCurrent(&current);
    struct cache_stream by = used_by(current, stream);
    struct cached_memory block = {0, rounded(bytes)};
    bool cached = block_cache_take(gpu, current, &by, block.capacity, &block);
    if (!cached) {
        if (!allowance_take(gpu, block.capacity, true, true)) return CUDA_ERROR_OUT_OF_MEMORY;
        block_cache_make_room(gpu, current, block.capacity);
        CUresult result = allocation_convert(gpu, &block.at, block.capacity);
        if (result != CUDA_SUCCESS && block_cache_trim(gpu, block.capacity))
            result = allocation_convert(gpu, &block.at, block.capacity);
        if (result != CUDA_SUCCESS) {
            account_return(gpu, block.capacity, ACCOUNT_MANAGED);
            return CUDA_ERROR_NOT_FOUND;
        }
    }
    *out = block.at;
    allocations_add(gpu, *out, bytes, block.capacity, ALLOCATION_CONVERTED);
    return CUDA_SUCCESS;
}

/* Count plain memory. `pool`: the pool of the driver's call, NULL for the GPU's current pool; becomes the pool whose
   reserved memory counts, or NULL if the allocation itself counts. */
static bool take_plain(struct gpu *gpu, size_t bytes, CUmempool *pool) {
    *pool = counted_pool(gpu, *pool);
    if (*pool && !account_pool_add(gpu, *pool)) *pool = NULL;
    return *pool ? allowance_take_from_pool(gpu, bytes, *pool) : allowance_take(gpu, bytes, false, true);
}

/* Record a tie to a pool of managed memory, which is the program's or the driver's own. */
static void tie_managed_pool(CUmempool pool, CUdeviceptr at, size_t bytes) {
    unsigned char managed = 0;
    if (real.cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, at) == CUDA_SUCCESS && managed)
        ties_add_once((struct tie){TIE_MANAGED, TIE_POOL, (uintptr_t)pool, 0, bytes, NULL});
}

/* Record the driver's own stream-ordered allocation. `pool`: the program's pool; NULL: the GPU's own pool. */
static CUresult record_plain(struct gpu *gpu, CUresult result, CUdeviceptr *out, size_t bytes, bool pooled,
                             CUmempool pool) {
    if (result == CUDA_SUCCESS && pool && settings_engine_suspends()) tie_managed_pool(pool, *out, bytes);
    if (result == CUDA_SUCCESS)
        allocations_add(gpu, *out, bytes, bytes, pooled ? ALLOCATION_POOLED : ALLOCATION_PLAIN);
    else
        account_return(gpu, bytes, pooled ? ACCOUNT_POOLED : ACCOUNT_PLAIN);
    return result;
}

/* Record memory from a pool of managed memory, which is counted and moved like memory from cuMemAllocManaged. */
static CUresult record_managed(struct gpu *gpu, CUresult result, CUdeviceptr *out, size_t bytes, CUmempool pool) {
    if (result == CUDA_SUCCESS) {
        if (settings_engine_suspends()) tie_managed_pool(pool, *out, bytes);
        allocations_add(gpu, *out, bytes, bytes, ALLOCATION_MANAGED);
    } else {
        account_return(gpu, bytes, ACCOUNT_MANAGED);
    }
    return result;
}

#define ALLOCATING(call, from_pool, order)                                                                             \
    struct gpu *gpu = out && bytes ? gpu_current() : NULL;                                                             \
    if (!gpu) return call;                                                                                             \
    if (captures_in_progress() && capture_records(order)) {                                                            \
        account_graph_on(gpu); /* a node of a graph, counted by the driver */                                          \
        return call;                                                                                                   \
    }                                                                                                                  \
    CUmempool pool_used = from_pool;                                                                                   \
    if (pool_used && is_managed(pool_used)) {                                                                          \
        if (!allowance_take(gpu, bytes, true, false)) return CUDA_ERROR_OUT_OF_MEMORY;                                 \
        return record_managed(gpu, call, out, bytes, pool_used);                                                       \
    }                                                                                                                  \
    if (allocation_converts(gpu) && !(pool_used && is_plain(pool_used)) && !captures_in_progress()) {                  \
        CUresult result = allocate_block(gpu, out, bytes, order);                                                      \
        if (result != CUDA_ERROR_NOT_FOUND) return result;                                                             \
    }                                                                                                                  \
    if (!take_plain(gpu, bytes, &pool_used)) return CUDA_ERROR_OUT_OF_MEMORY;                                          \
    return record_plain(gpu, call, out, bytes, pool_used != NULL, from_pool)

CUresult wrapped_cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream) {
    ALLOCATING(real.cuMemAllocAsync(out, bytes, stream), NULL, stream);
}

CUresult wrapped_cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream stream) {
    ALLOCATING(real.cuMemAllocAsync_ptsz(out, bytes, stream), NULL, driver_twin_stream(stream));
}

CUresult wrapped_cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmempool pool, CUstream stream) {
    ALLOCATING(real.cuMemAllocFromPoolAsync(out, bytes, pool, stream), pool, stream);
}

CUresult wrapped_cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmempool pool, CUstream stream) {
    ALLOCATING(real.cuMemAllocFromPoolAsync_ptsz(out, bytes, pool, stream), pool, driver_twin_stream(stream));
}

/* Put a converted block into the cache behind the stream's work. False: not converted; the driver frees it. */
static bool free_into_cache(CUdeviceptr at, CUstream stream, CUresult *result) {
    struct allocation allocation;
    if (!allocations_find(at, &allocation) || allocation.at != at || allocation.kind != ALLOCATION_CONVERTED)
        return false;
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    /* the driver's own error for an invalid stream; also an error during a capture, because the block is not a graph's
       memory */
    *result = driver_has(cuStreamIsCapturing) ? real.cuStreamIsCapturing(stream, &status) : CUDA_SUCCESS;
    if (*result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE) *result = CUDA_ERROR_INVALID_VALUE;
    if (*result != CUDA_SUCCESS) return true;
    CUcontext current = NULL;
    real.cuCtxGetCurrent(&current);
    struct cache_stream by = used_by(current ? current : allocation.context, stream);
    if (!allocations_remove(at, &allocation)) {
        *result = CUDA_ERROR_INVALID_VALUE; /* freed by another thread in the meantime */
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
    if (free_into_cache(at, stream, &result)) return result;
    struct allocation allocation;
    bool recorded = allocations_remove(at, &allocation);
    if (!recorded && block_cache_has(at)) return CUDA_ERROR_INVALID_VALUE; /* freed twice */
    result = real.cuMemFreeAsync(at, stream);
    return recorded ? allocations_freed(&allocation, result) : result;
}

CUresult wrapped_cuMemFreeAsync_ptsz(CUdeviceptr at, CUstream stream) {
    CUresult result;
    if (free_into_cache(at, driver_twin_stream(stream), &result)) return result;
    struct allocation allocation;
    bool recorded = allocations_remove(at, &allocation);
    if (!recorded && block_cache_has(at)) return CUDA_ERROR_INVALID_VALUE; /* freed twice */
    result = real.cuMemFreeAsync_ptsz(at, stream);
    return recorded ? allocations_freed(&allocation, result) : result;
}

static void add_plain_pool(CUmempool pool, enum pool_kind kind) {
    pthread_mutex_lock(&lock);
    struct plain_pool *entry = plain_pool_of(pool); /* the driver can return its own pools again */
    if (!entry && (entry = malloc(sizeof *entry))) {
        *entry = (struct plain_pool){pool, kind, plain_pools};
        plain_pools = entry;
    }
    pthread_mutex_unlock(&lock);
}

static CUresult add_returned_pool(CUresult result, const CUmempool *out, int type) {
    if (result == CUDA_SUCCESS && type == CU_MEM_ALLOCATION_TYPE_MANAGED) add_plain_pool(*out, POOL_MANAGED);
    return result;
}

CUresult wrapped_cuMemGetDefaultMemPool(CUmempool *out, CUmemLocation *location, int type) {
    return add_returned_pool(real.cuMemGetDefaultMemPool(out, location, type), out, type);
}

CUresult wrapped_cuMemGetMemPool(CUmempool *out, CUmemLocation *location, int type) {
    return add_returned_pool(real.cuMemGetMemPool(out, location, type), out, type);
}

CUresult wrapped_cuMemPoolCreate(CUmempool *out, const CUmemPoolProps *props) {
    CUresult result = real.cuMemPoolCreate(out, props);
    bool on_gpu = result == CUDA_SUCCESS && props->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (result == CUDA_SUCCESS && props->allocType != CU_MEM_ALLOCATION_TYPE_MANAGED && (props->handleTypes || !on_gpu))
        add_plain_pool(*out, on_gpu ? POOL_OWN : POOL_FOREIGN);
    return add_returned_pool(result, out, result == CUDA_SUCCESS ? props->allocType : 0);
}

CUresult wrapped_cuMemPoolImportFromShareableHandle(CUmempool *out, void *handle, int type, unsigned long long flags) {
    CUresult result = real.cuMemPoolImportFromShareableHandle(out, handle, type, flags);
    if (result == CUDA_SUCCESS) add_plain_pool(*out, POOL_FOREIGN);
    if (result == CUDA_SUCCESS && settings_engine_suspends())
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
    return account_pool_destroy(pool);
}

RESET_IN_CHILD(memory_calls_reset);
void memory_calls_reset(void) {
    plain_pools = NULL;
    pthread_mutex_init(&lock, NULL);
}
