/* Sharing memory between processes. The simulator's memory belongs to one process; programs get the result of a driver
 * that cannot share memory. A real driver gives the same result for managed memory, which cannot be shared. */
#include "cuda/memory/memory.h"

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    REQUIRE_INIT();
    REQUIRE(handle, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find(address);
    int plain = allocation && allocation->kind == KIND_PLAIN && !allocation->pool;
    pthread_mutex_unlock(&memory_lock);
    REQUIRE(plain, CUDA_ERROR_INVALID_VALUE);
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    REQUIRE_INIT();
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    REQUIRE_INIT();
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuIpcGetEventHandle(CUipcMemHandle *handle, CUevent event) {
    REQUIRE_INIT();
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuIpcOpenEventHandle(CUevent *event, CUipcMemHandle handle) {
    REQUIRE_INIT();
    return CUDA_ERROR_NOT_SUPPORTED;
}
