/* Wrappers of calls that create, switch or destroy a context, destroy a stream, or begin, end or propagate the capture
   of a stream. */
#include "contexts/captures.h"
#include "contexts/lanes.h"
#include "gate/pace.h"
#include "memory/allocations.h"
#include "memory/block_cache.h"
#include "memory/ties.h"
#include "platform/settings.h"

/* Add a created context. With engine `suspend`, contexts without work are also counted, for the agent. */
static CUresult add_created(CUresult result, const CUcontext *out) {
    if (result != CUDA_SUCCESS || !settings_engine_suspends()) return result;
    pthread_mutex_lock(&contexts_lock);
    context_entry(*out);
    pthread_mutex_unlock(&contexts_lock);
    return result;
}

CUresult wrapped_cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
    return add_created(real.cuDevicePrimaryCtxRetain(out, device), out);
}

#define CREATING(name, parameters, arguments)                                                                          \
    CUresult wrapped_##name parameters {                                                                               \
        CUresult result = add_created(real.name arguments, out);                                                       \
        lanes_context_changed();                                                                                       \
        return result;                                                                                                 \
    }

#define SWITCHING(name, parameters, arguments)                                                                         \
    CUresult wrapped_##name parameters {                                                                               \
        CUresult result = real.name arguments;                                                                         \
        lanes_context_changed();                                                                                       \
        return result;                                                                                                 \
    }

CREATING(cuCtxCreate_v2, (CUcontext * out, unsigned flags, CUdevice device), (out, flags, device))
CREATING(cuCtxCreate_v3, (CUcontext * out, void *affinity, int count, unsigned flags, CUdevice device),
         (out, affinity, count, flags, device))
CREATING(cuCtxCreate_v4, (CUcontext * out, void *params, unsigned flags, CUdevice device), (out, params, flags, device))
SWITCHING(cuCtxSetCurrent, (CUcontext context), (context))
SWITCHING(cuCtxPushCurrent, (CUcontext context), (context))
SWITCHING(cuCtxPushCurrent_v2, (CUcontext context), (context))
SWITCHING(cuCtxPopCurrent, (CUcontext * out), (out))
SWITCHING(cuCtxPopCurrent_v2, (CUcontext * out), (out))

/* Prepare for a call that may destroy a context. Returns the number of the newest allocation. */
static uint64_t begin_destruction(struct destruction *entry, CUcontext handle) {
    pthread_mutex_lock(&contexts_lock);
    uint64_t newest = allocations_newest();
    context_destruction_begins(entry, handle);
    pace_context_ends(handle);
    pthread_mutex_unlock(&contexts_lock);
    return newest;
}

/* Finish after that call. If the context was destroyed, so were its streams, its events, and its memory up to that
   number. */
static void end_destruction(struct destruction *entry, bool destroyed, uint64_t newest) {
    CUcontext handle = entry->handle;
    pthread_mutex_lock(&contexts_lock);
    context_destruction_ends(entry);
    if (destroyed && handle) {
        pace_context_destroyed(handle);
        lanes_remove_context(handle);
        block_cache_remove_context(handle);
        allocations_remove_context(handle, newest);
        captures_remove_context(handle);
        context_remove(handle);
        ties_remove_context(handle);
    }
    pthread_mutex_unlock(&contexts_lock);
    lanes_context_changed();
}

#define DESTROYING(name)                                                                                               \
    CUresult wrapped_##name(CUcontext context) {                                                                       \
        struct destruction entry;                                                                                      \
        uint64_t newest = begin_destruction(&entry, context);                                                          \
        CUresult result = real.name(context);                                                                          \
        end_destruction(&entry, result == CUDA_SUCCESS, newest);                                                       \
        return result;                                                                                                 \
    }

DESTROYING(cuCtxDestroy)
DESTROYING(cuCtxDestroy_v2)
DESTROYING(cuCtxDetach)

/* Whether the primary context of a device has been destroyed, by the last release or by a reset, which keeps its
   handle. */
static bool primary_context_destroyed(CUdevice device) {
    unsigned flags;
    int active = 0;
    real.cuDevicePrimaryCtxGetState(device, &flags, &active);
    return !active;
}

static CUcontext primary_context(CUdevice device) {
    CUcontext handle = NULL;
    unsigned flags;
    int active = 0;
    /* only a retain returns the handle; the context is retained while active, and released immediately */
    if (real.cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS || !active) return NULL;
    if (real.cuDevicePrimaryCtxRetain(&handle, device) != CUDA_SUCCESS) return NULL;
    real.cuDevicePrimaryCtxRelease_v2(device);
    return handle;
}

#define RELEASING(name)                                                                                                \
    CUresult wrapped_##name(CUdevice device) {                                                                         \
        struct destruction entry;                                                                                      \
        uint64_t newest = begin_destruction(&entry, primary_context(device));                                          \
        CUresult result = real.name(device);                                                                           \
        end_destruction(&entry, result == CUDA_SUCCESS && primary_context_destroyed(device), newest);                  \
        return result;                                                                                                 \
    }

RELEASING(cuDevicePrimaryCtxRelease)
RELEASING(cuDevicePrimaryCtxRelease_v2)
RELEASING(cuDevicePrimaryCtxReset)
RELEASING(cuDevicePrimaryCtxReset_v2)

/* A green context is a part of a GPU. Its memory belongs to the primary context, whose last release destroys it; blocks
   that were freed in its streams can be reused after their work. */
CUresult wrapped_cuGreenCtxDestroy(CUgreenCtx green) {
    CUcontext context = NULL, popped;
    CUdevice device;
    if (!driver_has(cuCtxFromGreenCtx) || real.cuCtxFromGreenCtx(&context, green) != CUDA_SUCCESS ||
        real.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS)
        return real.cuGreenCtxDestroy(green);
    bool has_device = real.cuCtxGetDevice(&device) == CUDA_SUCCESS;
    if (block_cache_has_context(context)) real.cuCtxSynchronize();
    real.cuCtxPopCurrent_v2(&popped);
    CUcontext primary = has_device ? primary_context(device) : NULL;
    struct destruction own, shared;
    uint64_t newest = begin_destruction(&own, context);
    begin_destruction(&shared, primary);
    CUresult result = real.cuGreenCtxDestroy(green);
    bool all = result == CUDA_SUCCESS && primary && primary_context_destroyed(device);
    if (result == CUDA_SUCCESS && primary && !all) {
        block_cache_move_context(context, primary);
        allocations_move_context(context, primary);
    }
    end_destruction(&shared, all, newest);
    end_destruction(&own, result == CUDA_SUCCESS, newest);
    return result;
}

static void remove_stream(CUstream stream) {
    if (IS_DEFAULT(stream)) return;
    block_cache_remove_stream(stream);
    pthread_mutex_lock(&contexts_lock);
    pace_stream_ends(stream);
    lanes_remove_stream(stream);
    pthread_mutex_unlock(&contexts_lock);
}

/* A stream's capture ends with the stream. */
#define STREAM_DESTROYING(name)                                                                                        \
    CUresult wrapped_##name(CUstream stream) {                                                                         \
        remove_stream(stream);                                                                                         \
        bool captured = capture_remove(stream);                                                                        \
        CUresult result = real.name(stream);                                                                           \
        if (captured && result != CUDA_SUCCESS) capture_restore(stream);                                               \
        return result;                                                                                                 \
    }

STREAM_DESTROYING(cuStreamDestroy)
STREAM_DESTROYING(cuStreamDestroy_v2)

/* ---- captures ---- */

#define BEGIN(stream, call)                                                                                            \
    CUcontext context = capture_begin(stream);                                                                         \
    CUresult result = call;                                                                                            \
    capture_begun(stream, context, result == CUDA_SUCCESS);                                                            \
    return result

CUresult wrapped_cuStreamBeginCapture(CUstream stream) {
    BEGIN(stream, real.cuStreamBeginCapture(stream));
}
CUresult wrapped_cuStreamBeginCapture_ptsz(CUstream stream) {
    BEGIN(driver_twin_stream(stream), real.cuStreamBeginCapture_ptsz(stream));
}
CUresult wrapped_cuStreamBeginCapture_v2(CUstream stream, int mode) {
    BEGIN(stream, real.cuStreamBeginCapture_v2(stream, mode));
}
CUresult wrapped_cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode) {
    BEGIN(driver_twin_stream(stream), real.cuStreamBeginCapture_v2_ptsz(stream, mode));
}
CUresult wrapped_cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *after,
                                             const void *edges, size_t count, int mode) {
    BEGIN(stream, real.cuStreamBeginCaptureToGraph(stream, graph, after, edges, count, mode));
}
CUresult wrapped_cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *after,
                                                  const void *edges, size_t count, int mode) {
    BEGIN(driver_twin_stream(stream), real.cuStreamBeginCaptureToGraph_ptsz(stream, graph, after, edges, count, mode));
}

CUresult wrapped_cuStreamBeginRecaptureToGraph(CUstream stream, int mode, CUgraph graph, void *callback, void *data) {
    BEGIN(stream, real.cuStreamBeginRecaptureToGraph(stream, mode, graph, callback, data));
}
CUresult wrapped_cuStreamBeginRecaptureToGraph_ptsz(CUstream stream, int mode, CUgraph graph, void *callback,
                                                    void *data) {
    BEGIN(driver_twin_stream(stream), real.cuStreamBeginRecaptureToGraph_ptsz(stream, mode, graph, callback, data));
}

/* CUDA in graphics: the stream's work goes into a graphics API's command list, which runs it later. */
CUresult wrapped_cuStreamBeginCaptureToCig(CUstream stream, void *parameters) {
    BEGIN(stream, real.cuStreamBeginCaptureToCig(stream, parameters));
}
CUresult wrapped_cuStreamBeginCaptureToCig_ptsz(CUstream stream, void *parameters) {
    BEGIN(driver_twin_stream(stream), real.cuStreamBeginCaptureToCig_ptsz(stream, parameters));
}
CUresult wrapped_cuStreamEndCaptureToCig(CUstream stream) {
    CUresult result = real.cuStreamEndCaptureToCig(stream);
    if (result == CUDA_SUCCESS) capture_remove(stream);
    return result;
}
CUresult wrapped_cuStreamEndCaptureToCig_ptsz(CUstream stream) {
    CUresult result = real.cuStreamEndCaptureToCig_ptsz(stream);
    if (result == CUDA_SUCCESS) capture_remove(driver_twin_stream(stream));
    return result;
}

/* A capture ends if EndCapture succeeds or reports that the capture was invalid. */
#define END(stream, call)                                                                                              \
    bool capturing = capture_records(stream);                                                                          \
    CUresult result = call;                                                                                            \
    if (capturing && !capture_records(stream)) {                                                                       \
        capture_end(stream);                                                                                           \
    }                                                                                                                  \
    return result

CUresult wrapped_cuStreamEndCapture(CUstream stream, CUgraph *out) {
    END(stream, real.cuStreamEndCapture(stream, out));
}

CUresult wrapped_cuStreamEndCapture_ptsz(CUstream stream, CUgraph *out) {
    END(driver_twin_stream(stream), real.cuStreamEndCapture_ptsz(stream, out));
}

CUresult wrapped_cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    captures_spread();
    CUresult result = real.cuStreamWaitEvent(stream, event, flags);
    captures_spread(); /* another thread may have queried the driver for the stream in between */
    return result;
}

CUresult wrapped_cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned flags) {
    captures_spread();
    CUresult result = real.cuStreamWaitEvent_ptsz(stream, event, flags);
    captures_spread();
    return result;
}
