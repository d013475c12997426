#include "wrappers/reported.h"

#include "memory/allocations.h"

bool reported_memory(struct gpu *gpu, uint64_t really_free, uint64_t *available, uint64_t *total, uint64_t *used) {
    uint64_t shown = atomic_load(&gpu->total);
    if (!shown) return false;
    uint64_t taken = account_used(gpu);
    uint64_t cached = atomic_load(&gpu->cached); /* available to the program's next allocations */
    taken = taken > cached ? taken - cached : 0;
    *total = shown;
    taken += atomic_load(&gpu->others);
    *used = taken < shown ? taken : shown;
    *available = shown - *used;
    /* without conversion no memory can leave the GPU, so only the GPU's free memory is available */
    if (!allocation_converts(gpu) && really_free < *available) *available = really_free;
    return true;
}

CUresult wrapped_cuMemGetInfo_v2(size_t *available, size_t *total) {
    CUresult result = real.cuMemGetInfo_v2(available, total);
    struct gpu *gpu = result == CUDA_SUCCESS ? gpu_current() : NULL;
    uint64_t shown_free, shown_total, used;
    if (gpu && reported_memory(gpu, available ? *available : UINT64_MAX, &shown_free, &shown_total, &used)) {
        if (available) *available = shown_free;
        if (total) *total = shown_total;
    }
    return result;
}

CUresult wrapped_cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    CUresult result = real.cuDeviceTotalMem_v2(bytes, device);
    struct gpu *gpu = result == CUDA_SUCCESS && bytes ? gpu_of_device(device) : NULL;
    uint64_t shown = gpu ? atomic_load(&gpu->total) : 0;
    if (shown) *bytes = shown;
    return result;
}
EXPORTED(cuDeviceTotalMem_v2);

/* Replace an attribute of converted memory by the attribute of device memory. */
static void as_device_memory(int attribute, void *data, const struct allocation *allocation) {
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(void **)data = NULL; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned char *)data = 0; break; /* written as one byte, the size of bool */
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = allocation->gpu->device; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = allocation->at; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = allocation->bytes; break;
    default: break;
    }
}

CUresult wrapped_cuPointerGetAttribute(void *data, int attribute, CUdeviceptr at) {
    struct allocation allocation;
    CUresult result = real.cuPointerGetAttribute(data, attribute, at);
    if (result != CUDA_SUCCESS || !data || !allocations_find_converted(at, &allocation)) return result;
    as_device_memory(attribute, data, &allocation);
    /* device memory has no host pointer: the query is an error */
    return attribute == CU_POINTER_ATTRIBUTE_HOST_POINTER ? CUDA_ERROR_INVALID_VALUE : result;
}

CUresult wrapped_cuPointerGetAttributes(unsigned count, int *attributes, void **data, CUdeviceptr at) {
    struct allocation allocation;
    CUresult result = real.cuPointerGetAttributes(count, attributes, data, at);
    if (result != CUDA_SUCCESS || !allocations_find_converted(at, &allocation)) return result;
    for (unsigned i = 0; i < count; i++)
        if (data[i]) as_device_memory(attributes[i], data[i], &allocation);
    return result;
}

CUresult wrapped_cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr at) {
    struct allocation allocation;
    CUresult result = real.cuMemGetAddressRange_v2(base, size, at);
    if (result != CUDA_SUCCESS || !allocations_find_converted(at, &allocation)) return result;
    if (base) *base = allocation.at;
    if (size) *size = allocation.bytes;
    return result;
}
