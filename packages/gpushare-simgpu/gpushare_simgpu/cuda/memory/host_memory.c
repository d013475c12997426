/* Pinned host memory, allocated or registered. The device accesses it at its host address. */
#include <sys/mman.h>

#include "cuda/streams/call_lock.h"
#include "cuda/memory/memory.h"
#include "cuda/driver/ptsz.h"

#define HOST_ALLOC_FLAGS    7u
#define HOST_REGISTER_FLAGS 15u
#define DEVICE_MAP          2u

static CUresult allocate(void **out, size_t size, unsigned flags) {
    LOCKABLE();
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    REQUIRE(out && size && !(flags & ~HOST_ALLOC_FLAGS), CUDA_ERROR_INVALID_VALUE);
    void *memory = space_reserve(size, 1);
    REQUIRE(memory, CUDA_ERROR_OUT_OF_MEMORY);
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_add((uint64_t)(uintptr_t)memory, page_up(size), KIND_HOST, context);
    if (allocation) {
        allocation->requested = size;
        allocation->flags = flags | DEVICE_MAP;
    }
    pthread_mutex_unlock(&memory_lock);
    if (!allocation) {
        space_release((uint64_t)(uintptr_t)memory, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = memory;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    return allocate(out, size, flags);
}

EXPORT CUresult cuMemAllocHost_v2(void **out, size_t size) {
    return allocate(out, size, 0);
}

EXPORT CUresult cuMemFreeHost(void *memory) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(memory, CUDA_ERROR_INVALID_VALUE);
    synchronize_everything(); /* copies may still use it */
    CUresult error = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find((uint64_t)(uintptr_t)memory);
    if (allocation && allocation->kind == KIND_HOST && allocation->span.base == (uint64_t)(uintptr_t)memory) {
        space_release(allocation->span.base, allocation->span.size);
        allocation_drop(allocation);
        error = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&memory_lock);
    return error;
}

EXPORT CUresult cuMemHostRegister_v2(void *memory, size_t size, unsigned flags) {
    LOCKABLE();
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    REQUIRE(memory && size && !(flags & ~HOST_REGISTER_FLAGS), CUDA_ERROR_INVALID_VALUE);
    uint64_t base = (uint64_t)(uintptr_t)memory;
    pthread_mutex_lock(&memory_lock);
    if (allocation_find(base) || allocation_find(base + size - 1)) {
        error = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    } else {
        struct allocation *allocation = allocation_add(base, size, KIND_REGISTERED, context);
        if (allocation)
            allocation->flags = flags | DEVICE_MAP;
        else
            error = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&memory_lock);
    return error;
}

EXPORT CUresult cuMemHostUnregister(void *memory) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(memory, CUDA_ERROR_INVALID_VALUE);
    synchronize_everything();
    CUresult error = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find((uint64_t)(uintptr_t)memory);
    if (allocation && allocation->kind == KIND_REGISTERED && allocation->span.base == (uint64_t)(uintptr_t)memory) {
        allocation_drop(allocation);
        error = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&memory_lock);
    return error;
}

static int is_pinned(const void *memory, unsigned *flags) {
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find((uint64_t)(uintptr_t)memory);
    int pinned = allocation && (allocation->kind == KIND_HOST || allocation->kind == KIND_REGISTERED);
    if (pinned && flags) *flags = allocation->flags;
    pthread_mutex_unlock(&memory_lock);
    return pinned;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *memory, unsigned flags) {
    REQUIRE_INIT();
    REQUIRE(address && flags == 0 && is_pinned(memory, NULL), CUDA_ERROR_INVALID_VALUE);
    *address = (uint64_t)(uintptr_t)memory;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetFlags(unsigned *flags, void *memory) {
    REQUIRE_INIT();
    REQUIRE(flags && is_pinned(memory, flags), CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}
