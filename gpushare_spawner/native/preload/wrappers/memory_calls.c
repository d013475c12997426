/* The wrappers of cuMemAlloc and its kin: device memory is served by managed memory where it may leave the GPU. */
#include "driver/driver.h"
#include "memory/allocations.h"
#include "memory/allowance.h"
#include "memory/block_cache.h"
#include "memory/conversion.h"

/* The pitch that the driver gives rows of a 2D allocation on every GPU so far. */
#define PITCH 512

/* Account, convert, remember. CUDA_ERROR_NOT_FOUND: not converted, the caller asks the driver for the plain thing. */
static CUresult allocate_managed(struct gpu *gpu, CUdeviceptr *out, size_t bytes) {
    CUdeviceptr at;
    if (account_has_room(gpu, bytes) && conversion_allocate(gpu, &at, bytes) == CUDA_SUCCESS) {
        if (allocations_add_within(gpu, at, bytes, ALLOCATION_CONVERTED)) {
            *out = at;
            return CUDA_SUCCESS;
        }
        real.cuMemFree_v2(at); /* another thread was faster */
    }
    if (!allowance_take(gpu, bytes, true, true)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (conversion_allocate(gpu, &at, bytes) != CUDA_SUCCESS) {
        /* freed blocks that are kept for the next allocations may be what is missing */
        if (!block_cache_trim(gpu, bytes) || conversion_allocate(gpu, &at, bytes) != CUDA_SUCCESS) {
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
    if (conversion_wanted(gpu)) {
        CUresult result = allocate_managed(gpu, out, bytes);
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
    if (conversion_wanted(gpu)) {
        CUresult result = allocate_managed(gpu, out, bytes);
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

/* Asked for as managed memory, it may exceed the GPU's by the driver's own rules: counted and moved, and
   refused only where host memory is short. */
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
    /* forgotten first: the pager must not touch what is being freed */
    bool known = allocations_remove(at, &allocation);
    if (!known && at && block_cache_has(at)) return CUDA_ERROR_INVALID_VALUE; /* freed twice */
    CUresult result = real.cuMemFree_v2(at);
    return known ? allocations_freed(&allocation, result) : result;
}
