/* The driver calls for streams. */
#include "common/clock.h"
#include "cuda/streams/call_lock.h"
#include "cuda/streams/capture.h"
#include "cuda/streams/event.h"
#include "cuda/driver/ptsz.h"
#include "cuda/streams/stream.h"

/* A thread's per-thread default streams, one for each context that it has used. */
struct own_stream {
    struct context *context;
    uint64_t generation;
    struct stream *stream;
};
static __thread struct own_stream own_streams[MAX_GPUS];

static struct stream *per_thread(struct context *context) {
    struct own_stream *place = &own_streams[context->device];
    if (place->context != context || place->generation != context->generation) {
        struct stream *stream = stream_make(context, 0, 0, STREAM_IS_PER_THREAD);
        if (!stream) return NULL;
        *place = (struct own_stream){context, context->generation, stream};
    }
    return place->stream;
}

CUresult stream_resolve(CUstream handle, struct stream **stream) {
    struct context *context;
    if (handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        CUresult error = context_require(&context);
        if (error) return error;
        *stream = handle == CU_STREAM_PER_THREAD ? per_thread(context) : context->legacy;
        return *stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    REQUIRE_INIT();
    REQUIRE(handle->magic == STREAM_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    *stream = handle;
    return __atomic_load_n(&handle->context->error, __ATOMIC_ACQUIRE);
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority) {
    LOCKABLE();
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    REQUIRE(out && !(flags & ~CU_STREAM_NON_BLOCKING), CUDA_ERROR_INVALID_VALUE);
    struct stream *stream = stream_make(context, flags,
                                        priority > 0    ? 0
                                        : priority < -5 ? -5
                                                        : priority,
                                        STREAM_CREATED);
    REQUIRE(stream, CUDA_ERROR_OUT_OF_MEMORY);
    *out = stream;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreate(CUstream *out, unsigned flags) {
    return cuStreamCreateWithPriority(out, flags, 0);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(stream && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(stream->magic == STREAM_MAGIC && stream->kind == STREAM_CREATED, CUDA_ERROR_INVALID_HANDLE);
    stream_unlink(stream);
    stream_release(stream);
    return CUDA_SUCCESS;
}

static CUresult synchronize(CUstream handle) {
    LOCKABLE();
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    if (stream_is_captured(stream)) return capture_break(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (stream->kind == STREAM_IS_LEGACY && stream->context->blocking) {
        /* the legacy stream is done when the blocking streams are done */
        return stream_put_and_wait(stream, &(struct operation){.kind = OPERATION_NOTHING});
    }
    stream_drain(stream);
    return __atomic_load_n(&stream->context->error, __ATOMIC_ACQUIRE);
}
WITH_STREAM(cuStreamSynchronize, synchronize, (CUstream stream))

static CUresult query(CUstream handle) {
    LOCKABLE();
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    if (stream_is_captured(stream)) return capture_break(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return stream_idle(stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
WITH_STREAM(cuStreamQuery, query, (CUstream stream))

static CUresult wait_event(struct event *event, unsigned flags, CUstream handle) {
    LOCKABLE();
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(event && event->magic == EVENT_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    if (capture_join(stream, event, &error)) return error;
    uint64_t number = __atomic_load_n(&event->recorded, __ATOMIC_ACQUIRE);
    if (__atomic_load_n(&event->completed, __ATOMIC_ACQUIRE) >= number) return CUDA_SUCCESS;
    event_retain(event);
    error = stream_put(stream, &(struct operation){.kind = OPERATION_WAIT_EVENT, .event = {event, number}}, NULL);
    if (error) event_release(event);
    return error;
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    return wait_event(event, flags, stream);
}

EXPORT CUresult cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned flags) {
    return wait_event(event, flags, PER_THREAD(stream));
}

static CUresult get_flags(unsigned *flags, CUstream handle) {
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(flags, CUDA_ERROR_INVALID_VALUE);
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetFlags(CUstream stream, unsigned *flags) {
    return get_flags(flags, stream);
}

EXPORT CUresult cuStreamGetFlags_ptsz(CUstream stream, unsigned *flags) {
    return get_flags(flags, PER_THREAD(stream));
}

static CUresult get_priority(int *priority, CUstream handle) {
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(priority, CUDA_ERROR_INVALID_VALUE);
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetPriority(CUstream stream, int *priority) {
    return get_priority(priority, stream);
}

EXPORT CUresult cuStreamGetPriority_ptsz(CUstream stream, int *priority) {
    return get_priority(priority, PER_THREAD(stream));
}

static CUresult get_id(unsigned long long *id, CUstream handle) {
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(id, CUDA_ERROR_INVALID_VALUE);
    *id = stream->id;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetId(CUstream stream, unsigned long long *id) {
    return get_id(id, stream);
}

EXPORT CUresult cuStreamGetId_ptsz(CUstream stream, unsigned long long *id) {
    return get_id(id, PER_THREAD(stream));
}

static CUresult get_context(CUcontext *context, CUstream handle) {
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(context, CUDA_ERROR_INVALID_VALUE);
    *context = stream->context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
    return get_context(context, stream);
}

EXPORT CUresult cuStreamGetCtx_ptsz(CUstream stream, CUcontext *context) {
    return get_context(context, PER_THREAD(stream));
}

EXPORT CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext *context, void **green) {
    if (green) *green = NULL;
    return get_context(context, stream);
}

EXPORT CUresult cuStreamGetCtx_v2_ptsz(CUstream stream, CUcontext *context, void **green) {
    if (green) *green = NULL;
    return get_context(context, PER_THREAD(stream));
}

static CUresult get_device(CUdevice *device, CUstream handle) {
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(device, CUDA_ERROR_INVALID_VALUE);
    *device = stream->context->device;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetDevice(CUstream stream, CUdevice *device) {
    return get_device(device, stream);
}

EXPORT CUresult cuStreamGetDevice_ptsz(CUstream stream, CUdevice *device) {
    return get_device(device, PER_THREAD(stream));
}

static CUresult host_function(CUhostFn fn, void *data, CUstream handle) {
    LOCKABLE();
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(fn, CUDA_ERROR_INVALID_VALUE);
    return stream_put(stream, &(struct operation){.kind = OPERATION_HOST, .host = {fn, data}}, NULL);
}

EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn fn, void *data) {
    return host_function(fn, data, stream);
}

EXPORT CUresult cuLaunchHostFunc_ptsz(CUstream stream, CUhostFn fn, void *data) {
    return host_function(fn, data, PER_THREAD(stream));
}

static CUresult add_callback(CUstreamCallback callback, void *data, unsigned flags, CUstream handle) {
    LOCKABLE();
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(callback && flags == 0, CUDA_ERROR_INVALID_VALUE);
    if (stream_is_captured(stream)) return capture_break(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return stream_put(stream, &(struct operation){.kind = OPERATION_CALLBACK, .callback = {callback, data, handle}},
                      NULL);
}

EXPORT CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void *data, unsigned flags) {
    return add_callback(callback, data, flags, stream);
}

EXPORT CUresult cuStreamAddCallback_ptsz(CUstream stream, CUstreamCallback callback, void *data, unsigned flags) {
    return add_callback(callback, data, flags, PER_THREAD(stream));
}
