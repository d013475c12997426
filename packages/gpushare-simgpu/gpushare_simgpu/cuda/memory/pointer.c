/* Attributes of an address. */
#include <string.h>

#include "cuda/memory/memory.h"

static CUresult tell(void *data, CUpointer_attribute attribute, struct allocation *a, CUdeviceptr address) {
    int on_host = a->kind == KIND_HOST || a->kind == KIND_REGISTERED, managed = a->kind == KIND_MANAGED;
    switch (attribute) {
    case POINTER_CONTEXT:
        REQUIRE(a->kind != KIND_MAPPED, CUDA_ERROR_INVALID_VALUE);
        *(CUcontext *)data = a->context;
        return CUDA_SUCCESS;
    case POINTER_MEMORY_TYPE: *(unsigned *)data = on_host ? MEMORY_HOST : MEMORY_DEVICE; return CUDA_SUCCESS;
    case POINTER_DEVICE_POINTER: *(CUdeviceptr *)data = address; return CUDA_SUCCESS;
    case POINTER_HOST_POINTER:
        REQUIRE(on_host || managed, CUDA_ERROR_INVALID_VALUE);
        *(void **)data = (void *)(uintptr_t)address;
        return CUDA_SUCCESS;
    case POINTER_SYNC_MEMOPS: *(unsigned *)data = (unsigned)a->sync_memops; return CUDA_SUCCESS;
    case POINTER_BUFFER_ID:
    case POINTER_BLOCK_ID: *(unsigned long long *)data = a->id; return CUDA_SUCCESS;
    case POINTER_IS_MANAGED: *(unsigned *)data = (unsigned)managed; return CUDA_SUCCESS;
    case POINTER_DEVICE_ORDINAL: *(int *)data = a->device; return CUDA_SUCCESS;
    case POINTER_IS_LEGACY_IPC_CAPABLE: *(unsigned *)data = 0; return CUDA_SUCCESS;
    case POINTER_RANGE_START:
    case POINTER_MAPPING_BASE: *(CUdeviceptr *)data = a->span.base; return CUDA_SUCCESS;
    case POINTER_RANGE_SIZE: *(size_t *)data = a->requested; return CUDA_SUCCESS;
    case POINTER_MAPPING_SIZE: *(size_t *)data = a->span.size; return CUDA_SUCCESS;
    case POINTER_MAPPED: *(unsigned *)data = 1; return CUDA_SUCCESS;
    case POINTER_ALLOWED_HANDLE_TYPES: *(unsigned long long *)data = 0; return CUDA_SUCCESS;
    case POINTER_IS_RDMA_CAPABLE: *(unsigned *)data = 0; return CUDA_SUCCESS;
    case POINTER_ACCESS_FLAGS:
        *(unsigned *)data = a->kind == KIND_MAPPED ? (unsigned)a->access : 3;
        return CUDA_SUCCESS;
    case POINTER_MEMPOOL_HANDLE: *(CUmemoryPool *)data = a->pool; return CUDA_SUCCESS;
    case POINTER_P2P_TOKENS: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    REQUIRE_INIT();
    REQUIRE(data, CUDA_ERROR_INVALID_VALUE);
    CUresult error = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find(address);
    if (allocation) error = tell(data, attribute, allocation, address);
    pthread_mutex_unlock(&memory_lock);
    return error;
}

/* Write an attribute's value for an address that is unknown to CUDA. */
static void tell_unknown(void *data, CUpointer_attribute attribute) {
    switch (attribute) {
    case POINTER_MEMORY_TYPE:
    case POINTER_SYNC_MEMOPS:
    case POINTER_IS_MANAGED:
    case POINTER_IS_LEGACY_IPC_CAPABLE:
    case POINTER_MAPPED:
    case POINTER_IS_RDMA_CAPABLE:
    case POINTER_ACCESS_FLAGS: *(unsigned *)data = 0; break;
    case POINTER_DEVICE_ORDINAL: *(int *)data = CU_DEVICE_INVALID; break;
    default: *(uint64_t *)data = 0;
    }
}

EXPORT CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **data,
                                       CUdeviceptr address) {
    REQUIRE_INIT();
    REQUIRE(attributes && data, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find(address);
    for (unsigned i = 0; i < count; i++)
        if (!allocation || tell(data[i], attributes[i], allocation, address) != CUDA_SUCCESS)
            tell_unknown(data[i], attributes[i]);
    pthread_mutex_unlock(&memory_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    REQUIRE_INIT();
    REQUIRE(value && attribute == POINTER_SYNC_MEMOPS, CUDA_ERROR_INVALID_VALUE);
    CUresult error = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find(address);
    if (allocation) {
        allocation->sync_memops = *(const unsigned *)value != 0;
        error = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&memory_lock);
    return error;
}
