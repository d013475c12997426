/* Queries on a kernel: name, parameters, attributes, occupancy. */
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/module.h"

/* Attributes that a program may set. All kernels are alike, so the values are accepted and have no effect. */
enum {
    ATTRIBUTE_MAX_THREADS = 0,
    ATTRIBUTE_REGISTERS = 4,
    ATTRIBUTE_PTX_VERSION = 5,
    ATTRIBUTE_BINARY_VERSION = 6,
    ATTRIBUTE_MAX_DYNAMIC_SHARED = 8,
    ATTRIBUTE_COUNT = 16
};

static CUresult check(CUfunction function) {
    REQUIRE_INIT();
    REQUIRE(function && function->magic == FUNCTION_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetName(const char **name, CUfunction function) {
    CUresult error = check(function);
    if (error) return error;
    REQUIRE(name, CUDA_ERROR_INVALID_VALUE);
    *name = function->kernel->name;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetName(const char **name, CUkernel kernel) {
    return cuFuncGetName(name, kernel);
}

EXPORT CUresult cuFuncGetModule(CUmodule *module, CUfunction function) {
    CUresult error = check(function);
    if (error) return error;
    REQUIRE(module, CUDA_ERROR_INVALID_VALUE);
    *module = function->module;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
    CUresult error = check(function);
    if (error) return error;
    REQUIRE(offset && index < (size_t)function->kernel->parameter_count, CUDA_ERROR_INVALID_VALUE);
    *offset = function->kernel->parameters[index].offset;
    if (size) *size = function->kernel->parameters[index].size;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size) {
    return cuFuncGetParamInfo(kernel, index, offset, size);
}

EXPORT CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction function) {
    CUresult error = check(function);
    if (error) return error;
    REQUIRE(value && attribute >= 0 && attribute < ATTRIBUTE_COUNT, CUDA_ERROR_INVALID_VALUE);
    switch (attribute) {
    case ATTRIBUTE_MAX_THREADS: *value = 1024; break;
    case ATTRIBUTE_REGISTERS: *value = 16; break;
    case ATTRIBUTE_PTX_VERSION:
    case ATTRIBUTE_BINARY_VERSION: *value = 70; break;
    case ATTRIBUTE_MAX_DYNAMIC_SHARED: *value = 48 * 1024; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetAttribute(int *value, int attribute, CUkernel kernel, CUdevice device) {
    return cuFuncGetAttribute(value, attribute, kernel);
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
    CUresult error = check(function);
    if (error) return error;
    REQUIRE(attribute >= ATTRIBUTE_MAX_DYNAMIC_SHARED && attribute < ATTRIBUTE_COUNT, CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelSetAttribute(int attribute, int value, CUkernel kernel, CUdevice device) {
    return cuFuncSetAttribute(kernel, attribute, value);
}

EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, int config) {
    return check(function);
}

EXPORT CUresult cuKernelSetCacheConfig(CUkernel kernel, int config, CUdevice device) {
    return check(kernel);
}

EXPORT CUresult cuFuncIsLoaded(int *state, CUfunction function) {
    CUresult error = check(function);
    if (error) return error;
    REQUIRE(state, CUDA_ERROR_INVALID_VALUE);
    *state = 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncLoad(CUfunction function) {
    return check(function);
}

/* 2048 threads in up to 32 blocks on a multiprocessor, without other limits. */
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int block_size,
                                                            size_t shared) {
    CUresult error = check(function);
    if (error) return error;
    REQUIRE(blocks && block_size > 0, CUDA_ERROR_INVALID_VALUE);
    *blocks = block_size > 1024 ? 0 : 2048 / block_size < 32 ? 2048 / block_size : 32;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int block_size,
                                                                     size_t shared, unsigned flags) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, block_size, shared);
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction function, size_t (*shared)(int),
                                                 size_t shared_bytes, int limit) {
    CUresult error = check(function);
    if (error) return error;
    REQUIRE(grid && block, CUDA_ERROR_INVALID_VALUE);
    *block = limit > 0 && limit < 1024 ? limit : 1024;
    *grid = 160;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction function,
                                                          size_t (*shared)(int), size_t shared_bytes, int limit,
                                                          unsigned flags) {
    return cuOccupancyMaxPotentialBlockSize(grid, block, function, shared, shared_bytes, limit);
}
