/* Settings of a context that are stored and returned; nothing in the simulator depends on them. */
#include "cuda/streams/call_lock.h"
#include "cuda/streams/context.h"

#define LIMITS 7

static const size_t STANDARD[LIMITS] = {1024, 1 << 20, 8 << 20, 2, 2048, 64, 0};
static size_t limits[MAX_GPUS][LIMITS];
static uint8_t limit_set[MAX_GPUS][LIMITS];

EXPORT CUresult cuCtxGetLimit(size_t *value, int limit) {
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    REQUIRE(value, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(limit >= 0 && limit < LIMITS, CUDA_ERROR_UNSUPPORTED_LIMIT);
    *value = limit_set[context->device][limit] ? limits[context->device][limit] : STANDARD[limit];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetLimit(int limit, size_t value) {
    LOCKABLE();
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    REQUIRE(limit >= 0 && limit < LIMITS, CUDA_ERROR_UNSUPPORTED_LIMIT);
    limits[context->device][limit] = value;
    limit_set[context->device][limit] = 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCacheConfig(int *config) {
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    REQUIRE(config, CUDA_ERROR_INVALID_VALUE);
    *config = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCacheConfig(int config) {
    struct context *context;
    return context_require(&context);
}

EXPORT CUresult cuCtxGetSharedMemConfig(int *config) {
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    REQUIRE(config, CUDA_ERROR_INVALID_VALUE);
    *config = 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetSharedMemConfig(int config) {
    struct context *context;
    return context_require(&context);
}

EXPORT CUresult cuCtxResetPersistingL2Cache(void) {
    struct context *context;
    return context_require(&context);
}

/* A program may start a profiler around a section of code; the simulator has none. */
EXPORT CUresult cuProfilerStart(void) {
    struct context *context;
    return context_require(&context);
}

EXPORT CUresult cuProfilerStop(void) {
    struct context *context;
    return context_require(&context);
}
