/* Peer access: every device can access the memory of all others over the bus. Copies between devices work with or
 * without it. */
#include "cuda/streams/call_lock.h"
#include "cuda/streams/context.h"

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    REQUIRE_INIT();
    REQUIRE(can, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_exists(device) && device_exists(peer), CUDA_ERROR_INVALID_DEVICE);
    *can = device != peer;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetP2PAttribute(int *value, int attribute, CUdevice device, CUdevice peer) {
    enum { PERFORMANCE_RANK = 1, ACCESS_SUPPORTED = 2, NATIVE_ATOMICS = 3, ARRAYS = 4 };
    REQUIRE_INIT();
    REQUIRE(value && attribute >= PERFORMANCE_RANK && attribute <= ARRAYS, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_exists(device) && device_exists(peer) && device != peer, CUDA_ERROR_INVALID_DEVICE);
    *value = attribute == ACCESS_SUPPORTED;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    LOCKABLE();
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    REQUIRE(peer && peer->magic == CONTEXT_MAGIC && peer->device != context->device, CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
    uint32_t bit = 1u << peer->device;
    REQUIRE(!(__atomic_fetch_or(&context->peers, bit, __ATOMIC_ACQ_REL) & bit), CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxDisablePeerAccess(CUcontext peer) {
    LOCKABLE();
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    REQUIRE(peer && peer->magic == CONTEXT_MAGIC, CUDA_ERROR_INVALID_CONTEXT);
    uint32_t bit = 1u << peer->device;
    REQUIRE(__atomic_fetch_and(&context->peers, ~bit, __ATOMIC_ACQ_REL) & bit, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    return CUDA_SUCCESS;
}
