/* The driver calls that copy. Each is one rectangle in a stream, and the call waits for it or not. */
#include <stdlib.h>
#include <string.h>

#include "cuda/streams/call_lock.h"
#include "cuda/streams/capture.h"
#include "cuda/memory/copy_rectangle.h"
#include "cuda/memory/memory.h"
#include "cuda/driver/ptsz.h"
#include "cuda/streams/stream.h"

static struct operation linear(uint64_t dst, uint64_t src, size_t size) {
    return (struct operation){.kind = OPERATION_COPY,
                              .copy = {.dst = dst, .src = src, .width = size, .height = 1, .depth = 1}};
}

/* The call stages pageable memory up to this size, as CUDA does. */
#define STAGED_MOST (64u << 10)

enum side_kind { SIDE_DEVICE, SIDE_PINNED, SIDE_PAGEABLE };

/* Managed memory counts as device memory. Memory that is only partly registered is pageable. */
static enum side_kind kind_of(uint64_t address, uint64_t size) {
    enum side_kind kind = SIDE_PAGEABLE;
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find(address);
    if (allocation && allocation->kind != KIND_HOST && allocation->kind != KIND_REGISTERED)
        kind = SIDE_DEVICE;
    else if (allocation && size <= allocation->span.base + allocation->span.size - address)
        kind = SIDE_PINNED;
    pthread_mutex_unlock(&memory_lock);
    return kind;
}

static uint64_t extent(uint64_t width, uint64_t pitch, uint64_t slice, const struct rectangle *r) {
    return width + (r->height - 1) * pitch + (r->depth - 1) * slice;
}

/* The meaning of "asynchronous" for a copy depends on its memory (CUDA's manual, "API synchronization behavior"). When
 * the call returns, a copy to pageable memory or between host memory is done, and a copy from pageable memory has read
 * its source. The call returns before the copy only with pinned memory and on the device. */
static CUresult enqueue(const struct operation *operation, CUstream handle) {
    LOCKABLE();
    struct stream *stream;
    const struct rectangle *r = &operation->copy;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    if (stream_is_captured(stream) || r->width == 0 || r->height == 0 || r->depth == 0)
        return stream_put(stream, operation, NULL);
    enum side_kind dst = kind_of(r->dst, extent(r->width, r->dst_pitch, r->dst_slice, r)),
                   src = kind_of(r->src, extent(r->width, r->src_pitch, r->src_slice, r));
    if (dst == SIDE_PAGEABLE || (dst == SIDE_PINNED && src != SIDE_DEVICE))
        return stream_put_and_wait(stream, operation);
    if (src != SIDE_PAGEABLE) return stream_put(stream, operation, NULL);
    void *aside = r->height == 1 && r->depth == 1 && r->width <= STAGED_MOST ? malloc(r->width) : NULL;
    if (!aside) return stream_put_and_wait(stream, operation);
    struct operation staged = *operation;
    memcpy(aside, (const void *)(uintptr_t)r->src, r->width);
    staged.copy.src = (uint64_t)(uintptr_t)aside;
    staged.copy.staged = 1;
    error = stream_put(stream, &staged, NULL);
    if (error) free(aside);
    return error;
}

static CUresult carry_out(const struct operation *operation, CUstream handle) {
    LOCKABLE();
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    return error ? error : stream_put_and_wait(stream, operation);
}

/* Device addresses must belong to allocations; the rest of such a range, and host memory, are the program's
 * responsibility. */
static int known(CUdeviceptr address, size_t size, CUresult *error) {
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find(address);
    int fits = allocation &&
               (allocation->kind == KIND_MAPPED || size <= allocation->span.base + allocation->span.size - address);
    pthread_mutex_unlock(&memory_lock);
    if (!fits) *error = CUDA_ERROR_INVALID_VALUE;
    return fits;
}

static CUresult check(CUdeviceptr dst, int dst_known, CUdeviceptr src, int src_known, size_t size) {
    CUresult error = CUDA_SUCCESS;
    REQUIRE_INIT();
    if (size == 0) return CUDA_SUCCESS;
    REQUIRE(dst && src, CUDA_ERROR_INVALID_VALUE);
    if ((dst_known && !known(dst, size, &error)) || (src_known && !known(src, size, &error))) return error;
    return CUDA_SUCCESS;
}

#define ADDRESS(pointer) ((CUdeviceptr)(uintptr_t)(pointer))

static CUresult copy(CUdeviceptr dst, int dst_known, CUdeviceptr src, int src_known, size_t size, int wait,
                     CUstream stream) {
    CUresult error = check(dst, dst_known, src, src_known, size);
    if (error) return error;
    struct operation operation = linear(dst, src, size);
    return wait ? carry_out(&operation, stream) : enqueue(&operation, stream);
}

ON_DEFAULT_STREAM(cuMemcpy, copy, (CUdeviceptr dst, CUdeviceptr src, size_t size), dst, 0, src, 0, size, 1)
LAST_IS_STREAM(cuMemcpyAsync, copy, (CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream), dst, 0, src, 0,
               size, 0)

ON_DEFAULT_STREAM(cuMemcpyHtoD_v2, copy, (CUdeviceptr dst, const void *src, size_t size), dst, 1, ADDRESS(src), 0, size,
                  1)
ON_DEFAULT_STREAM(cuMemcpyDtoH_v2, copy, (void *dst, CUdeviceptr src, size_t size), ADDRESS(dst), 0, src, 1, size, 1)
ON_DEFAULT_STREAM(cuMemcpyDtoD_v2, copy, (CUdeviceptr dst, CUdeviceptr src, size_t size), dst, 1, src, 1, size, 1)
LAST_IS_STREAM(cuMemcpyHtoDAsync_v2, copy, (CUdeviceptr dst, const void *src, size_t size, CUstream stream), dst, 1,
               ADDRESS(src), 0, size, 0)
LAST_IS_STREAM(cuMemcpyDtoHAsync_v2, copy, (void *dst, CUdeviceptr src, size_t size, CUstream stream), ADDRESS(dst), 0,
               src, 1, size, 0)
LAST_IS_STREAM(cuMemcpyDtoDAsync_v2, copy, (CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream), dst, 1,
               src, 1, size, 0)

/* Addresses are unique over all devices, so the contexts add no information. */
ON_DEFAULT_STREAM(cuMemcpyPeer, copy, (CUdeviceptr dst, CUcontext to, CUdeviceptr src, CUcontext from, size_t size),
                  dst, 1, src, 1, size, 1)
LAST_IS_STREAM(cuMemcpyPeerAsync, copy,
               (CUdeviceptr dst, CUcontext to, CUdeviceptr src, CUcontext from, size_t size, CUstream stream), dst, 1,
               src, 1, size, 0)

static uint64_t base_of(CUmemorytype type, const void *host, CUdeviceptr device) {
    return type == MEMORY_HOST ? ADDRESS(host) : type == MEMORY_DEVICE || type == MEMORY_UNIFIED ? device : 0;
}

CUresult copy_rectangle(const CUDA_MEMCPY3D *c, struct operation *operation) {
    REQUIRE(c, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(c->src_type != MEMORY_ARRAY && c->dst_type != MEMORY_ARRAY, CUDA_ERROR_NOT_SUPPORTED);
    uint64_t src = base_of(c->src_type, c->src_host, c->src_device),
             dst = base_of(c->dst_type, c->dst_host, c->dst_device);
    uint64_t src_pitch = c->src_pitch ? c->src_pitch : c->width, dst_pitch = c->dst_pitch ? c->dst_pitch : c->width;
    uint64_t src_height = c->src_height ? c->src_height : c->height,
             dst_height = c->dst_height ? c->dst_height : c->height;
    int empty = c->width == 0 || c->height == 0 || c->depth == 0;
    REQUIRE(empty || (src && dst), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(src_pitch >= c->src_x + c->width && dst_pitch >= c->dst_x + c->width, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(c->depth <= 1 || (src_height >= c->src_y + c->height && dst_height >= c->dst_y + c->height),
            CUDA_ERROR_INVALID_VALUE);
    *operation = (struct operation){
        .kind = OPERATION_COPY,
        .copy = {.dst = dst + c->dst_z * dst_height * dst_pitch + c->dst_y * dst_pitch + c->dst_x,
                 .src = src + c->src_z * src_height * src_pitch + c->src_y * src_pitch + c->src_x,
                 .width = c->width,
                 .height = c->height,
                 .depth = c->depth,
                 .dst_pitch = dst_pitch,
                 .src_pitch = src_pitch,
                 .dst_slice = dst_height * dst_pitch,
                 .src_slice = src_height * src_pitch},
    };
    return CUDA_SUCCESS;
}

static CUresult copy_3d(const CUDA_MEMCPY3D *c, int wait, CUstream stream) {
    struct operation operation;
    REQUIRE_INIT();
    CUresult error = copy_rectangle(c, &operation);
    if (error) return error;
    return wait ? carry_out(&operation, stream) : enqueue(&operation, stream);
}

static CUresult copy_2d(const CUDA_MEMCPY2D *c, int wait, CUstream stream) {
    REQUIRE_INIT();
    REQUIRE(c, CUDA_ERROR_INVALID_VALUE);
    CUDA_MEMCPY3D as3d = {.src_x = c->src_x,
                          .src_y = c->src_y,
                          .src_type = c->src_type,
                          .src_host = c->src_host,
                          .src_device = c->src_device,
                          .src_pitch = c->src_pitch,
                          .dst_x = c->dst_x,
                          .dst_y = c->dst_y,
                          .dst_type = c->dst_type,
                          .dst_host = c->dst_host,
                          .dst_device = c->dst_device,
                          .dst_pitch = c->dst_pitch,
                          .width = c->width,
                          .height = c->height,
                          .depth = 1};
    return copy_3d(&as3d, wait, stream);
}

ON_DEFAULT_STREAM(cuMemcpy2D_v2, copy_2d, (const CUDA_MEMCPY2D *c), c, 1)
ON_DEFAULT_STREAM(cuMemcpy2DUnaligned_v2, copy_2d, (const CUDA_MEMCPY2D *c), c, 1)
LAST_IS_STREAM(cuMemcpy2DAsync_v2, copy_2d, (const CUDA_MEMCPY2D *c, CUstream stream), c, 0)
ON_DEFAULT_STREAM(cuMemcpy3D_v2, copy_3d, (const CUDA_MEMCPY3D *c), c, 1)
LAST_IS_STREAM(cuMemcpy3DAsync_v2, copy_3d, (const CUDA_MEMCPY3D *c, CUstream stream), c, 0)
ON_DEFAULT_STREAM(cuMemcpy3DPeer, copy_3d, (const CUDA_MEMCPY3D *c), c, 1)
LAST_IS_STREAM(cuMemcpy3DPeerAsync, copy_3d, (const CUDA_MEMCPY3D *c, CUstream stream), c, 0)

static CUresult batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, size_t *failed,
                      CUstream stream) {
    REQUIRE_INIT();
    /* the default streams are excluded from batches by the API */
    REQUIRE(dsts && srcs && sizes && count && stream && stream != CU_STREAM_LEGACY, CUDA_ERROR_INVALID_VALUE);
    if (failed) *failed = SIZE_MAX;
    for (size_t i = 0; i < count; i++) {
        CUresult error = copy(dsts[i], 0, srcs[i], 0, sizes[i], 0, stream);
        if (error) {
            if (failed) *failed = i;
            return error;
        }
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                   CUmemcpyAttributes *attributes, size_t *indices, size_t attribute_count,
                                   size_t *failed, CUstream stream) {
    return batch(dsts, srcs, sizes, count, failed, stream);
}

EXPORT CUresult cuMemcpyBatchAsync_ptsz(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                        CUmemcpyAttributes *attributes, size_t *indices, size_t attribute_count,
                                        size_t *failed, CUstream stream) {
    return batch(dsts, srcs, sizes, count, failed, stream);
}

EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                      CUmemcpyAttributes *attributes, size_t *indices, size_t attribute_count,
                                      CUstream stream) {
    return batch(dsts, srcs, sizes, count, NULL, stream);
}

EXPORT CUresult cuMemcpyBatchAsync_v2_ptsz(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                           CUmemcpyAttributes *attributes, size_t *indices, size_t attribute_count,
                                           CUstream stream) {
    return batch(dsts, srcs, sizes, count, NULL, stream);
}
