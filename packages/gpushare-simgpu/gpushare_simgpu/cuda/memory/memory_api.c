/* The driver calls that allocate and free. */
#include "common/mig.h"
#include "common/processes.h"
#include "cuda/streams/call_lock.h"
#include "cuda/streams/capture.h"
#include "cuda/memory/memory.h"
#include "cuda/driver/ptsz.h"

#define PITCH 512u

static CUresult allocate(CUdeviceptr *address, size_t size, enum memory_kind kind, unsigned flags) {
    LOCKABLE();
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    REQUIRE(address && size, CUDA_ERROR_INVALID_VALUE);
    if ((error = capture_forbids(context))) return error;
    return memory_allocate(context, context->device, kind, size, flags, NULL, address);
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    return allocate(address, size, KIND_PLAIN, 0);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t size, unsigned flags) {
    REQUIRE_INIT();
    REQUIRE(flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST, CUDA_ERROR_INVALID_VALUE);
    return allocate(address, size, KIND_MANAGED, flags);
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned element) {
    REQUIRE_INIT();
    REQUIRE(pitch && width && height, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(element == 4 || element == 8 || element == 16, CUDA_ERROR_INVALID_VALUE);
    size_t row = (width + PITCH - 1) / PITCH * PITCH;
    REQUIRE(row >= width && row <= SIZE_MAX / height, CUDA_ERROR_INVALID_VALUE);
    CUresult error = allocate(address, row * height, KIND_PLAIN, 0);
    if (!error) *pitch = row;
    return error;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
    LOCKABLE();
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    if (address == 0) return CUDA_SUCCESS;
    if ((error = capture_forbids(context))) return error;
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find(address);
    int device = allocation ? allocation->device : context->device;
    pthread_mutex_unlock(&memory_lock);
    REQUIRE(allocation, CUDA_ERROR_INVALID_VALUE);
    /* as in the driver, no kernel loses its memory while it runs */
    device_synchronize(device);
    return memory_free(address);
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    LOCKABLE();
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    REQUIRE(free && total, CUDA_ERROR_INVALID_VALUE);
    processes_reap(driver.state, 0);
    gpu_lock(driver.state, context->gpu);
    *free = driver.state->gpus[context->gpu].free.count * driver.state->settings.page;
    gpu_unlock(driver.state, context->gpu);
    *total = mig_memory(driver.state, context->gpu);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    REQUIRE_INIT();
    CUresult error = CUDA_ERROR_NOT_FOUND;
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find(address);
    if (allocation) {
        if (base) *base = allocation->span.base;
        if (size) *size = allocation->requested;
        error = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&memory_lock);
    return error;
}
