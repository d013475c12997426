#include "cuda/memory/pool.h"

#include <stdlib.h>
#include <string.h>

#include "cuda/streams/call_lock.h"
#include "cuda/streams/capture.h"
#include "cuda/memory/memory.h"
#include "cuda/driver/ptsz.h"
#include "cuda/streams/stream.h"

#define POOL_MAGIC 0x504f4f4cu

/* A pool counts the memory taken from it. It retains no freed memory: a free releases its frames immediately, which
 * corresponds to a release threshold of 0, the default, at the next synchronization. */
struct pool {
    uint32_t magic;
    int device;
    int is_default, managed;
    pthread_mutex_t lock;
    uint64_t threshold, used, used_high;
    int flags[3]; /* the reuse attributes */
    unsigned access[MAX_GPUS];
};

static pthread_mutex_t pools_lock = PTHREAD_MUTEX_INITIALIZER;
static struct pool *defaults[MAX_GPUS], *currents[MAX_GPUS], *managed_defaults[MAX_GPUS];

static struct pool *make(int device, int is_default) {
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->magic = POOL_MAGIC;
    pool->device = device;
    pool->is_default = is_default;
    pool->flags[0] = pool->flags[1] = pool->flags[2] = 1;
    pool->access[device] = 3;
    pthread_mutex_init(&pool->lock, NULL);
    return pool;
}

/* The pool of managed memory of a device. CUDA 13 has them. */
static struct pool *managed_default_of(int device) {
    pthread_mutex_lock(&pools_lock);
    if (!managed_defaults[device] && (managed_defaults[device] = make(device, 1)))
        managed_defaults[device]->managed = 1;
    struct pool *pool = managed_defaults[device];
    pthread_mutex_unlock(&pools_lock);
    return pool;
}

static struct pool *default_of(int device) {
    pthread_mutex_lock(&pools_lock);
    if (!defaults[device]) defaults[device] = make(device, 1);
    struct pool *pool = defaults[device];
    pthread_mutex_unlock(&pools_lock);
    return pool;
}

struct pool *pool_of_device(int device) {
    struct pool *pool = __atomic_load_n(&currents[device], __ATOMIC_ACQUIRE);
    return pool ? pool : default_of(device);
}

static void use(struct pool *pool, int64_t bytes) {
    pthread_mutex_lock(&pool->lock);
    pool->used += (uint64_t)bytes;
    if (pool->used > pool->used_high) pool->used_high = pool->used;
    pthread_mutex_unlock(&pool->lock);
}

void pool_free(uint64_t address) {
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find(address);
    struct pool *pool = allocation ? allocation->pool : NULL;
    int64_t size = allocation ? (int64_t)allocation->span.size : 0;
    pthread_mutex_unlock(&memory_lock);
    if (memory_free(address) == CUDA_SUCCESS && pool) use(pool, -size);
}

/* The caller gets the address immediately, so work in the stream cannot precede the allocation. */
static CUresult allocate(CUdeviceptr *address, size_t size, struct pool *pool, CUstream handle) {
    LOCKABLE();
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    if (stream_is_captured(stream)) return capture_break(stream, CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(address && size, CUDA_ERROR_INVALID_VALUE);
    if (!pool) pool = pool_of_device(stream->context->device);
    REQUIRE(pool && pool->magic == POOL_MAGIC, CUDA_ERROR_INVALID_VALUE);
    enum memory_kind kind = pool->managed ? KIND_MANAGED : KIND_PLAIN;
    error = memory_allocate(stream->context, pool->device, kind, size, 0, pool, address);
    if (error == CUDA_ERROR_OUT_OF_MEMORY) {
        /* queued frees may release memory */
        device_synchronize(pool->device);
        error = memory_allocate(stream->context, pool->device, kind, size, 0, pool, address);
    }
    if (!error) {
        pthread_mutex_lock(&memory_lock);
        int64_t taken = (int64_t)allocation_find(*address)->span.size;
        pthread_mutex_unlock(&memory_lock);
        use(pool, taken);
    }
    return error;
}

static CUresult allocate_default(CUdeviceptr *address, size_t size, CUstream stream) {
    return allocate(address, size, NULL, stream);
}

static CUresult allocate_from(CUdeviceptr *address, size_t size, struct pool *pool, CUstream stream) {
    REQUIRE_INIT();
    REQUIRE(pool, CUDA_ERROR_INVALID_VALUE);
    return allocate(address, size, pool, stream);
}

static CUresult free_later(CUdeviceptr address, CUstream handle) {
    LOCKABLE();
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    if (stream_is_captured(stream)) return capture_break(stream, CUDA_ERROR_NOT_SUPPORTED);
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find(address);
    int ours = allocation && allocation->span.base == address && allocation->region;
    pthread_mutex_unlock(&memory_lock);
    REQUIRE(ours, CUDA_ERROR_INVALID_VALUE);
    return stream_put(stream, &(struct operation){.kind = OPERATION_FREE, .free = {address}}, NULL);
}

LAST_IS_STREAM(cuMemAllocAsync, allocate_default, (CUdeviceptr * address, size_t size, CUstream stream), address, size)
LAST_IS_STREAM(cuMemAllocFromPoolAsync, allocate_from,
               (CUdeviceptr * address, size_t size, CUmemoryPool pool, CUstream stream), address, size, pool)
LAST_IS_STREAM(cuMemFreeAsync, free_later, (CUdeviceptr address, CUstream stream), address)

static CUresult check(CUmemoryPool pool) {
    REQUIRE_INIT();
    REQUIRE(pool && pool->magic == POOL_MAGIC, CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *properties) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(out && properties && (properties->type == 1 || properties->type == ALLOCATION_TYPE_MANAGED),
            CUDA_ERROR_INVALID_VALUE);
    REQUIRE(properties->location.type == LOCATION_DEVICE, CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(device_exists(properties->location.id), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(properties->handle_types == 0, CUDA_ERROR_NOT_SUPPORTED);
    *out = make(properties->location.id, 0);
    if (*out) (*out)->managed = properties->type == ALLOCATION_TYPE_MANAGED;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Return a default pool. Only for devices. */
static CUresult default_for(CUmemoryPool *pool, const CUmemLocation *location, int type, int current) {
    REQUIRE_INIT();
    REQUIRE(pool && location && (type == 1 || type == ALLOCATION_TYPE_MANAGED), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(location->type == LOCATION_DEVICE, CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(device_exists(location->id), CUDA_ERROR_INVALID_DEVICE);
    int managed = type == ALLOCATION_TYPE_MANAGED;
    *pool = managed   ? managed_default_of(location->id)
            : current ? pool_of_device(location->id)
                      : default_of(location->id);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, int type) {
    return default_for(pool, location, type, 0);
}

EXPORT CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, int type) {
    return default_for(pool, location, type, 1);
}

EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    LOCKABLE();
    CUresult error = check(pool);
    if (error) return error;
    REQUIRE(!pool->is_default, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&pools_lock);
    if (currents[pool->device] == pool) currents[pool->device] = NULL;
    pthread_mutex_unlock(&pools_lock);
    pool->magic = 0; /* stays allocated, because its allocations outlive it and refer to it */
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
    REQUIRE_INIT();
    REQUIRE(pool, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_exists(device), CUDA_ERROR_INVALID_DEVICE);
    *pool = default_of(device);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
    REQUIRE_INIT();
    REQUIRE(pool, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_exists(device), CUDA_ERROR_INVALID_DEVICE);
    *pool = pool_of_device(device);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
    CUresult error = check(pool);
    if (error) return error;
    REQUIRE(device_exists(device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(pool->device == device, CUDA_ERROR_INVALID_VALUE);
    __atomic_store_n(&currents[device], pool, __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    LOCKABLE();
    return check(pool); /* no freed memory is retained */
}

EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    CUresult error = check(pool);
    if (error) return error;
    REQUIRE(value, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&pool->lock);
    switch (attribute) {
    case POOL_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case POOL_REUSE_ALLOW_OPPORTUNISTIC:
    case POOL_REUSE_ALLOW_INTERNAL_DEPENDENCIES: *(int *)value = pool->flags[attribute - 1]; break;
    case POOL_RELEASE_THRESHOLD: *(uint64_t *)value = pool->threshold; break;
    case POOL_RESERVED_CURRENT:
    case POOL_USED_CURRENT: *(uint64_t *)value = pool->used; break;
    case POOL_RESERVED_HIGH:
    case POOL_USED_HIGH: *(uint64_t *)value = pool->used_high; break;
    default: error = CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_unlock(&pool->lock);
    return error;
}

EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    CUresult error = check(pool);
    if (error) return error;
    REQUIRE(value, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&pool->lock);
    switch (attribute) {
    case POOL_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case POOL_REUSE_ALLOW_OPPORTUNISTIC:
    case POOL_REUSE_ALLOW_INTERNAL_DEPENDENCIES: pool->flags[attribute - 1] = *(int *)value; break;
    case POOL_RELEASE_THRESHOLD: pool->threshold = *(uint64_t *)value; break;
    case POOL_RESERVED_HIGH:
    case POOL_USED_HIGH:
        if (*(uint64_t *)value == 0)
            pool->used_high = pool->used;
        else
            error = CUDA_ERROR_INVALID_VALUE;
        break;
    default: error = CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_unlock(&pool->lock);
    return error;
}

EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count) {
    CUresult error = check(pool);
    if (error) return error;
    REQUIRE(access || count == 0, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        REQUIRE(access[i].location.type == LOCATION_DEVICE, CUDA_ERROR_INVALID_VALUE);
        REQUIRE(device_exists(access[i].location.id), CUDA_ERROR_INVALID_DEVICE);
        pool->access[access[i].location.id] = access[i].flags;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolGetAccess(unsigned *flags, CUmemoryPool pool, CUmemLocation *location) {
    CUresult error = check(pool);
    if (error) return error;
    REQUIRE(flags && location && location->type == LOCATION_DEVICE, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_exists(location->id), CUDA_ERROR_INVALID_DEVICE);
    *flags = pool->access[location->id];
    return CUDA_SUCCESS;
}
