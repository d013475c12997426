/* A block that is freed in a stream is parked with an event behind the work that may still use it. An allocation in the
   same stream takes a parked block at once, since the stream keeps the order; one in another stream only when the event
   has passed. The driver gets parked blocks back when the GPU is quiet, or when memory is short: a free of managed
   memory may wait for the whole device, and a training step must not. */
#include "stream_ordered.h"

#include <pthread.h>
#include <stdlib.h>

#include "allocations.h"
#include "capture.h"
#include "contexts.h"
#include "driver_turn.h"
#include "managed.h"
#include "resolve.h"

struct parked {
    CUdeviceptr at;
    size_t capacity;
    struct gpu *gpu;
    CUcontext context;
    CUstream stream;
    CUevent passed;
    struct parked *next;
};

/* Pools that managed memory cannot stand in for: those that are shared between processes, or do not lie on a GPU. */
struct plain_pool {
    CUmempool pool;
    struct plain_pool *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct parked *parked;
static struct plain_pool *plain_pools;

/* Blocks are rounded up so that one can serve another allocation of about its size. */
static size_t rounded(size_t bytes) {
    size_t step = bytes < (1u << 20) ? 512 : 2u << 20;
    return bytes > SIZE_MAX - step ? bytes : (bytes + step - 1) / step * step;
}

static bool passed(const struct parked *block) {
    return real.cuEventQuery(block->passed) != CUDA_ERROR_NOT_READY;
}

static struct parked *take_parked(struct gpu *gpu, CUcontext context, size_t capacity, CUstream stream) {
    struct parked *found = NULL, **place = NULL;
    pthread_mutex_lock(&lock);
    for (struct parked **link = &parked; *link; link = &(*link)->next) {
        struct parked *block = *link;
        if (block->gpu != gpu || block->context != context || block->capacity != capacity) continue;
        /* the thread's own default stream has one handle for many streams */
        bool same = block->stream == stream && stream != CU_STREAM_PER_THREAD;
        if (same || passed(block)) {
            found = block;
            place = link;
            break;
        }
    }
    if (found) *place = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}

/* With contexts_lock held: no context goes meanwhile, and takes its events and memory with it. */
static bool trim(struct gpu *gpu) {
    struct parked *done = NULL;
    pthread_mutex_lock(&lock);
    for (struct parked **link = &parked; *link;) {
        struct parked *block = *link;
        if (block->gpu == gpu && passed(block)) {
            *link = block->next;
            block->next = done;
            done = block;
        } else {
            link = &block->next;
        }
    }
    pthread_mutex_unlock(&lock);
    bool any = done != NULL;
    while (done) {
        struct parked *next = done->next;
        real.cuEventDestroy_v2(done->passed);
        real.cuMemFree_v2(done->at);
        free(done);
        done = next;
    }
    return any;
}

bool stream_ordered_trim(struct gpu *gpu) {
    pthread_mutex_lock(&contexts_lock);
    bool any = trim(gpu);
    pthread_mutex_unlock(&contexts_lock);
    return any;
}

void stream_ordered_quiet(struct gpu *gpu) {
    if (captures_in_progress() || !driver_turn_begin()) return;
    trim(gpu);
    driver_turn_end();
}

void stream_ordered_context_gone(CUcontext context) {
    pthread_mutex_lock(&lock);
    for (struct parked **link = &parked; *link;) {
        struct parked *block = *link;
        if (block->context == context) {
            *link = block->next;
            free(block);
        } else {
            link = &block->next;
        }
    }
    pthread_mutex_unlock(&lock);
}

void stream_ordered_stream_gone(CUstream stream) {
    pthread_mutex_lock(&lock);
    for (struct parked *block = parked; block; block = block->next)
        if (block->stream == stream) block->stream = CU_STREAM_PER_THREAD; /* its handle may be given to another */
    pthread_mutex_unlock(&lock);
}

void stream_ordered_forget(void) {
    parked = NULL;
    plain_pools = NULL;
    pthread_mutex_init(&lock, NULL);
}

static bool is_plain(CUmempool pool) {
    bool plain = false;
    pthread_mutex_lock(&lock);
    for (struct plain_pool *entry = plain_pools; entry && !plain; entry = entry->next) plain = entry->pool == pool;
    pthread_mutex_unlock(&lock);
    return plain;
}

/* CUDA_ERROR_NOT_FOUND: not converted. */
static CUresult allocate_managed(struct gpu *gpu, CUdeviceptr *out, size_t bytes, CUstream stream) {
    if (!account_take(gpu, bytes, true, true)) return CUDA_ERROR_OUT_OF_MEMORY;
    size_t capacity = rounded(bytes);
    CUcontext context = NULL;
    real.cuCtxGetCurrent(&context);
    struct parked *block = take_parked(gpu, context, capacity, stream);
    if (block) {
        *out = block->at;
        real.cuEventDestroy_v2(block->passed);
        free(block);
    } else {
        uint64_t total = atomic_load(&gpu->total);
        if (total && bytes > total / 16) stream_ordered_trim(gpu);
        CUdeviceptr at;
        if (managed_allocate(gpu, &at, capacity) != CUDA_SUCCESS) {
            account_return(gpu, bytes, true);
            return CUDA_ERROR_NOT_FOUND;
        }
        *out = at;
    }
    allocations_add(gpu, *out, bytes, capacity, ALLOCATION_CONVERTED);
    return CUDA_SUCCESS;
}

/* What the driver itself allocated, in the order of the stream. */
static CUresult counted(struct gpu *gpu, CUresult result, CUdeviceptr *out, size_t bytes) {
    if (result == CUDA_SUCCESS)
        allocations_add(gpu, *out, bytes, bytes, ALLOCATION_PLAIN);
    else
        account_return(gpu, bytes, false);
    return result;
}

#define ALLOCATING(call, pool_is_plain, meant)                                                                         \
    struct gpu *gpu = out && bytes ? gpu_current() : NULL;                                                             \
    if (!gpu) return call;                                                                                             \
    if (captures_in_progress() && is_capturing(meant)) {                                                               \
        atomic_store(&gpu->graph_memory, true); /* a node of a graph, counted by the driver */                         \
        return call;                                                                                                   \
    }                                                                                                                  \
    if (managed_wanted(gpu) && !(pool_is_plain) && !captures_in_progress()) {                                          \
        CUresult result = allocate_managed(gpu, out, bytes, meant);                                                    \
        if (result != CUDA_ERROR_NOT_FOUND) return result;                                                             \
    }                                                                                                                  \
    if (!account_take(gpu, bytes, false, true)) return CUDA_ERROR_OUT_OF_MEMORY;                                       \
    return counted(gpu, call, out, bytes)

static CUstream own(CUstream stream) {
    return stream ? stream : CU_STREAM_PER_THREAD;
}

CUresult wrapped_cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream) {
    ALLOCATING(real.cuMemAllocAsync(out, bytes, stream), false, stream);
}
EXPORTED(cuMemAllocAsync);

CUresult wrapped_cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream stream) {
    ALLOCATING(real.cuMemAllocAsync_ptsz(out, bytes, stream), false, own(stream));
}
EXPORTED(cuMemAllocAsync_ptsz);

CUresult wrapped_cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmempool pool, CUstream stream) {
    ALLOCATING(real.cuMemAllocFromPoolAsync(out, bytes, pool, stream), is_plain(pool), stream);
}
EXPORTED(cuMemAllocFromPoolAsync);

CUresult wrapped_cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmempool pool, CUstream stream) {
    ALLOCATING(real.cuMemAllocFromPoolAsync_ptsz(out, bytes, pool, stream), is_plain(pool), own(stream));
}
EXPORTED(cuMemAllocFromPoolAsync_ptsz);

/* Park a converted block behind the stream's work. False: it is not one of ours, the driver frees it. */
static bool park(CUdeviceptr at, CUstream stream, CUresult *result) {
    struct allocation allocation;
    if (!allocations_find(at, &allocation) || allocation.at != at || allocation.kind != ALLOCATION_CONVERTED)
        return false;
    if (captures_in_progress() && is_capturing(stream)) {
        *result = CUDA_ERROR_INVALID_VALUE; /* not memory of a graph: what the driver says of such a free */
        return true;
    }
    struct parked *block = malloc(sizeof *block);
    CUevent event;
    *result = block ? real.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) : CUDA_ERROR_OUT_OF_MEMORY;
    if (*result == CUDA_SUCCESS && (*result = real.cuEventRecord(event, stream)) != CUDA_SUCCESS)
        real.cuEventDestroy_v2(event);
    if (*result != CUDA_SUCCESS) {
        free(block);
        return true;
    }
    allocations_remove(at, &allocation);
    *block = (struct parked){at, allocation.capacity, allocation.gpu, allocation.context, stream, event, NULL};
    pthread_mutex_lock(&lock);
    block->next = parked;
    parked = block;
    pthread_mutex_unlock(&lock);
    return true;
}

CUresult wrapped_cuMemFreeAsync(CUdeviceptr at, CUstream stream) {
    CUresult result;
    if (park(at, stream, &result)) return result;
    struct allocation allocation;
    bool known = allocations_remove(at, &allocation);
    result = real.cuMemFreeAsync(at, stream);
    if (known && result != CUDA_SUCCESS) allocations_restore(&allocation);
    return result;
}
EXPORTED(cuMemFreeAsync);

CUresult wrapped_cuMemFreeAsync_ptsz(CUdeviceptr at, CUstream stream) {
    CUresult result;
    if (park(at, own(stream), &result)) return result;
    struct allocation allocation;
    bool known = allocations_remove(at, &allocation);
    result = real.cuMemFreeAsync_ptsz(at, stream);
    if (known && result != CUDA_SUCCESS) allocations_restore(&allocation);
    return result;
}
EXPORTED(cuMemFreeAsync_ptsz);

static void remember_plain(CUmempool pool) {
    struct plain_pool *entry = malloc(sizeof *entry);
    if (!entry) return;
    entry->pool = pool;
    pthread_mutex_lock(&lock);
    entry->next = plain_pools;
    plain_pools = entry;
    pthread_mutex_unlock(&lock);
}

CUresult wrapped_cuMemPoolCreate(CUmempool *out, const CUmemPoolProps *props) {
    CUresult result = real.cuMemPoolCreate(out, props);
    if (result == CUDA_SUCCESS && (props->handleTypes || props->location.type != CU_MEM_LOCATION_TYPE_DEVICE))
        remember_plain(*out);
    return result;
}
EXPORTED(cuMemPoolCreate);

CUresult wrapped_cuMemPoolImportFromShareableHandle(CUmempool *out, void *handle, int type, unsigned long long flags) {
    CUresult result = real.cuMemPoolImportFromShareableHandle(out, handle, type, flags);
    if (result == CUDA_SUCCESS) remember_plain(*out);
    return result;
}
EXPORTED(cuMemPoolImportFromShareableHandle);

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
    return real.cuMemPoolDestroy(pool);
}
EXPORTED(cuMemPoolDestroy);
