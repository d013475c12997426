/* The driver calls that set memory. On a GPU the synchronous forms for device memory return when the work is queued in
 * the stream; here they wait, which a program cannot distinguish from a fast GPU. */
#include "cuda/memory/memory.h"
#include "cuda/driver/ptsz.h"
#include "cuda/streams/call_lock.h"
#include "cuda/streams/stream.h"

static CUresult set(CUdeviceptr dst, size_t pitch, uint32_t value, uint32_t element, size_t width, size_t height,
                    int wait, CUstream handle) {
    LOCKABLE();
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    if (width == 0 || height == 0) return CUDA_SUCCESS;
    REQUIRE(dst % element == 0 && (height == 1 || (pitch >= width * element && pitch % element == 0)),
            CUDA_ERROR_INVALID_VALUE);
    REQUIRE(memory_accessible(dst, (height - 1) * pitch + width * element, stream->context->device, 1),
            CUDA_ERROR_INVALID_VALUE);
    struct operation operation = {.kind = OPERATION_SET, .set = {dst, pitch, width, height, value, element}};
    return wait ? stream_put_and_wait(stream, &operation) : stream_put(stream, &operation, NULL);
}

ON_DEFAULT_STREAM(cuMemsetD8_v2, set, (CUdeviceptr dst, unsigned char value, size_t n), dst, 0, value, 1, n, 1, 1)
ON_DEFAULT_STREAM(cuMemsetD16_v2, set, (CUdeviceptr dst, unsigned short value, size_t n), dst, 0, value, 2, n, 1, 1)
ON_DEFAULT_STREAM(cuMemsetD32_v2, set, (CUdeviceptr dst, unsigned value, size_t n), dst, 0, value, 4, n, 1, 1)
ON_DEFAULT_STREAM(cuMemsetD2D8_v2, set,
                  (CUdeviceptr dst, size_t pitch, unsigned char value, size_t width, size_t height), dst, pitch, value,
                  1, width, height, 1)
ON_DEFAULT_STREAM(cuMemsetD2D16_v2, set,
                  (CUdeviceptr dst, size_t pitch, unsigned short value, size_t width, size_t height), dst, pitch, value,
                  2, width, height, 1)
ON_DEFAULT_STREAM(cuMemsetD2D32_v2, set, (CUdeviceptr dst, size_t pitch, unsigned value, size_t width, size_t height),
                  dst, pitch, value, 4, width, height, 1)
LAST_IS_STREAM(cuMemsetD8Async, set, (CUdeviceptr dst, unsigned char value, size_t n, CUstream stream), dst, 0, value,
               1, n, 1, 0)
LAST_IS_STREAM(cuMemsetD16Async, set, (CUdeviceptr dst, unsigned short value, size_t n, CUstream stream), dst, 0, value,
               2, n, 1, 0)
LAST_IS_STREAM(cuMemsetD32Async, set, (CUdeviceptr dst, unsigned value, size_t n, CUstream stream), dst, 0, value, 4, n,
               1, 0)
LAST_IS_STREAM(cuMemsetD2D8Async, set,
               (CUdeviceptr dst, size_t pitch, unsigned char value, size_t width, size_t height, CUstream stream), dst,
               pitch, value, 1, width, height, 0)
LAST_IS_STREAM(cuMemsetD2D16Async, set,
               (CUdeviceptr dst, size_t pitch, unsigned short value, size_t width, size_t height, CUstream stream), dst,
               pitch, value, 2, width, height, 0)
LAST_IS_STREAM(cuMemsetD2D32Async, set,
               (CUdeviceptr dst, size_t pitch, unsigned value, size_t width, size_t height, CUstream stream), dst,
               pitch, value, 4, width, height, 0)
