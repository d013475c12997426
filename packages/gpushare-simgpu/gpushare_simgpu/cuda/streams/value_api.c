/* Writing a word of memory from a stream, and waiting for one. */
#include "cuda/streams/call_lock.h"
#include "cuda/streams/capture.h"
#include "cuda/memory/memory.h"
#include "cuda/driver/ptsz.h"
#include "cuda/streams/stream.h"

static CUresult enqueue(enum operation_kind kind, uint64_t address, uint64_t value, int wide, unsigned flags,
                        CUstream handle) {
    LOCKABLE();
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    if (stream_is_captured(stream)) return capture_break(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    REQUIRE(address % (wide ? 8 : 4) == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(memory_accessible(address, wide ? 8 : 4, stream->context->device, 1), CUDA_ERROR_INVALID_VALUE);
    return stream_put(stream, &(struct operation){.kind = kind, .value = {address, value, wide, flags}}, NULL);
}

#define VALUE_CALL(name, kind, wide)                                                                                   \
    EXPORT CUresult name(CUstream stream, CUdeviceptr address, uint##wide##_t value, unsigned flags) {                 \
        return enqueue(kind, address, value, wide == 64, flags, stream);                                               \
    }                                                                                                                  \
    EXPORT CUresult name##_ptsz(CUstream stream, CUdeviceptr address, uint##wide##_t value, unsigned flags) {          \
        return enqueue(kind, address, value, wide == 64, flags, PER_THREAD(stream));                                   \
    }

VALUE_CALL(cuStreamWriteValue32_v2, OPERATION_WRITE_VALUE, 32)
VALUE_CALL(cuStreamWriteValue64_v2, OPERATION_WRITE_VALUE, 64)
VALUE_CALL(cuStreamWaitValue32_v2, OPERATION_WAIT_VALUE, 32)
VALUE_CALL(cuStreamWaitValue64_v2, OPERATION_WAIT_VALUE, 64)
