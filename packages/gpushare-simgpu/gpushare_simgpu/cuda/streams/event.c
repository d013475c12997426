#include "cuda/streams/call_lock.h"
#include "cuda/streams/event.h"

#include <stdlib.h>

#include "common/futex.h"
#include "cuda/streams/capture.h"
#include "cuda/driver/ptsz.h"
#include "cuda/streams/stream.h"

void event_retain(struct event *event) {
    __atomic_add_fetch(&event->references, 1, __ATOMIC_RELAXED);
}

void event_release(struct event *event) {
    if (__atomic_sub_fetch(&event->references, 1, __ATOMIC_ACQ_REL)) return;
    capture_forget(event);
    free(event);
}

void event_reach(struct event *event, uint64_t number, uint64_t instant) {
    __atomic_store_n(&event->time, instant, __ATOMIC_RELAXED);
    /* two streams may reach their records of one event out of order; the newest record counts */
    if (number > __atomic_load_n(&event->completed, __ATOMIC_RELAXED))
        __atomic_store_n(&event->completed, number, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&event->watchers, __ATOMIC_SEQ_CST)) {
        __atomic_add_fetch(&event->reached, 1, __ATOMIC_SEQ_CST);
        futex_wake_all(&event->reached, 0);
    }
}

void event_wait(struct event *event, uint64_t number) {
    while (__atomic_load_n(&event->completed, __ATOMIC_ACQUIRE) < number) {
        __atomic_add_fetch(&event->watchers, 1, __ATOMIC_SEQ_CST);
        uint32_t seen = __atomic_load_n(&event->reached, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&event->completed, __ATOMIC_SEQ_CST) < number) futex_wait(&event->reached, seen, 0, 0);
        __atomic_sub_fetch(&event->watchers, 1, __ATOMIC_SEQ_CST);
    }
}

EXPORT CUresult cuEventCreate(CUevent *out, unsigned flags) {
    LOCKABLE();
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    REQUIRE(out && !(flags & ~7u), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!(flags & 4u) || (flags & CU_EVENT_DISABLE_TIMING), CUDA_ERROR_INVALID_VALUE);
    struct event *event = calloc(1, sizeof *event);
    REQUIRE(event, CUDA_ERROR_OUT_OF_MEMORY);
    event->magic = EVENT_MAGIC;
    event->references = 1;
    event->context = context;
    event->flags = flags;
    *out = event;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent event) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(event && event->magic == EVENT_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    event->magic = 0;
    event_release(event);
    return CUDA_SUCCESS;
}

static CUresult record(CUevent event, unsigned flags, CUstream handle) {
    LOCKABLE();
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(event && event->magic == EVENT_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(event->context == stream->context, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(!(flags & ~CU_EVENT_EXTERNAL), CUDA_ERROR_INVALID_VALUE);
    if (!(flags & CU_EVENT_EXTERNAL) && capture_record(stream, event, &error)) return error;
    capture_forget(event);
    event_retain(event);
    struct operation operation = {.kind = OPERATION_RECORD, .event = {event, 0}};
    if (!stream_is_captured(stream)) operation.event.number = __atomic_add_fetch(&event->recorded, 1, __ATOMIC_ACQ_REL);
    error = stream_put(stream, &operation, NULL);
    if (error) event_release(event);
    return error;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
    return record(event, 0, stream);
}

EXPORT CUresult cuEventRecord_ptsz(CUevent event, CUstream stream) {
    return record(event, 0, PER_THREAD(stream));
}

EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
    return record(event, flags, stream);
}

EXPORT CUresult cuEventRecordWithFlags_ptsz(CUevent event, CUstream stream, unsigned flags) {
    return record(event, flags, PER_THREAD(stream));
}

EXPORT CUresult cuEventQuery(CUevent event) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(event && event->magic == EVENT_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(!event_is_captured(event), CUDA_ERROR_CAPTURED_EVENT);
    CUresult error = __atomic_load_n(&event->context->error, __ATOMIC_ACQUIRE);
    if (error) return error;
    uint64_t recorded = __atomic_load_n(&event->recorded, __ATOMIC_ACQUIRE);
    return __atomic_load_n(&event->completed, __ATOMIC_ACQUIRE) >= recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuEventSynchronize(CUevent event) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(event && event->magic == EVENT_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(!event_is_captured(event), CUDA_ERROR_CAPTURED_EVENT);
    event_wait(event, __atomic_load_n(&event->recorded, __ATOMIC_ACQUIRE));
    return __atomic_load_n(&event->context->error, __ATOMIC_ACQUIRE);
}

EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    REQUIRE_INIT();
    REQUIRE(milliseconds, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(start && start->magic == EVENT_MAGIC && end && end->magic == EVENT_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(!((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(start->recorded && end->recorded, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(__atomic_load_n(&start->completed, __ATOMIC_ACQUIRE) >= start->recorded, CUDA_ERROR_NOT_READY);
    REQUIRE(__atomic_load_n(&end->completed, __ATOMIC_ACQUIRE) >= end->recorded, CUDA_ERROR_NOT_READY);
    *milliseconds = (float)((double)(int64_t)(end->time - start->time) / 1e6);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime(milliseconds, start, end);
}
