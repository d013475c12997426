/* Launching kernels. */
#include <string.h>

#include "cuda/kernels/kernels.h"
#include "cuda/kernels/module.h"
#include "cuda/driver/ptsz.h"
#include "cuda/streams/call_lock.h"
#include "cuda/streams/capture.h"
#include "cuda/streams/stream.h"
#include "cuda/kernels/launch.h"

/* Pack the arguments in the kernel's layout, from an array of pointers or from the block that `extra` refers to. */
static CUresult pack(const struct kernel *kernel, void **params, void **extra, unsigned char *out) {
    if (params) {
        for (int i = 0; i < kernel->parameter_count; i++) {
            REQUIRE(params[i], CUDA_ERROR_INVALID_VALUE);
            memcpy(out + kernel->parameters[i].offset, params[i], kernel->parameters[i].size);
        }
        return CUDA_SUCCESS;
    }
    REQUIRE(extra, CUDA_ERROR_INVALID_VALUE);
    const void *block = NULL;
    size_t size = 0;
    for (; extra[0] != CU_LAUNCH_PARAM_END; extra += 2) {
        if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER)
            block = extra[1];
        else if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE)
            size = *(const size_t *)extra[1];
        else
            return CUDA_ERROR_INVALID_VALUE;
    }
    int last = kernel->parameter_count - 1;
    size_t wanted = kernel->parameters[last].offset + kernel->parameters[last].size;
    REQUIRE(block && size >= wanted, CUDA_ERROR_INVALID_VALUE);
    memcpy(out, block, wanted);
    return CUDA_SUCCESS;
}

CUresult launch_prepare(struct kernel_launch *launch, CUfunction function, const unsigned grid[3],
                        const unsigned block[3], unsigned shared, void **params, void **extra) {
    REQUIRE(function && function->magic == FUNCTION_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(grid[0] && grid[1] && grid[2] && grid[0] <= 0x7fffffffu && grid[1] <= 65535 && grid[2] <= 65535,
            CUDA_ERROR_INVALID_VALUE);
    REQUIRE(block[0] && block[1] && block[2] && block[0] <= 1024 && block[1] <= 1024 && block[2] <= 64,
            CUDA_ERROR_INVALID_VALUE);
    REQUIRE(block[0] * block[1] * block[2] <= 1024, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(shared <= 48 * 1024, CUDA_ERROR_INVALID_VALUE);
    launch->function = function;
    for (int i = 0; i < 3; i++) {
        launch->grid[i] = grid[i];
        launch->block[i] = block[i];
    }
    launch->shared = shared;
    launch->queued_ns = 0;
    return pack(function->kernel, params, extra, launch->arguments);
}

static CUresult launch(CUfunction function, const unsigned grid[3], const unsigned block[3], unsigned shared,
                       void **params, void **extra, CUstream handle) {
    struct stream *stream;
    struct operation operation;
    CUresult error = stream_resolve(handle, &stream);
    if (__builtin_expect(error != CUDA_SUCCESS, 0)) return error;
    operation.kind = OPERATION_KERNEL;
    error = launch_prepare(&operation.kernel, function, grid, block, shared, params, extra);
    if (__builtin_expect(error != CUDA_SUCCESS || driver.null_launch, 0)) return error;
    LOCKABLE();
    int number = stream->context->gpu;
    if (!stream_is_captured(stream)) operation.kernel.queued_ns = kernel_device_ns(number, &operation.kernel);
    uint64_t *queued = &driver.state->gpus[number].queued_ns[driver.slot];
    __atomic_add_fetch(queued, operation.kernel.queued_ns, __ATOMIC_RELAXED);
    error = stream_put(stream, &operation, NULL);
    if (error) __atomic_sub_fetch(queued, operation.kernel.queued_ns, __ATOMIC_RELAXED);
    return error;
}

#define SHAPE                                                                                                          \
    (const unsigned[]){grid_x, grid_y, grid_z}, (const unsigned[]) {                                                   \
        block_x, block_y, block_z                                                                                      \
    }

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **params,
                               void **extra) {
    return launch(function, SHAPE, shared, params, extra, stream);
}

EXPORT CUresult cuLaunchKernel_ptsz(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                    unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                    CUstream stream, void **params, void **extra) {
    return launch(function, SHAPE, shared, params, extra, PER_THREAD(stream));
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                          CUstream stream, void **params) {
    return launch(function, SHAPE, shared, params, NULL, stream);
}

EXPORT CUresult cuLaunchCooperativeKernel_ptsz(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                               unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                               CUstream stream, void **params) {
    return launch(function, SHAPE, shared, params, NULL, PER_THREAD(stream));
}

/* Launch attributes are hints for a real GPU's scheduler; none changes what a kernel computes. */
static CUresult launch_ex(const CUlaunchConfig *c, CUfunction function, void **params, void **extra, int per_thread) {
    REQUIRE(c, CUDA_ERROR_INVALID_VALUE);
    return launch(function, (const unsigned[]){c->grid_x, c->grid_y, c->grid_z},
                  (const unsigned[]){c->block_x, c->block_y, c->block_z}, c->shared_bytes, params, extra,
                  per_thread ? PER_THREAD(c->stream) : c->stream);
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
    return launch_ex(config, function, params, extra, 0);
}

EXPORT CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
    return launch_ex(config, function, params, extra, 1);
}
