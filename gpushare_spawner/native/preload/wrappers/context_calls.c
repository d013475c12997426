/* The wrappers of calls that make, switch or destroy a context, or destroy a stream. */
#include "contexts/captures.h"
#include "contexts/contexts.h"
#include "contexts/lanes.h"
#include "driver/driver.h"
#include "gate/pace.h"
#include "memory/allocations.h"
#include "memory/block_cache.h"
#include "memory/ties.h"
#include "platform/engine.h"

/* With engine `suspend` every context is known, not only those that work was launched in: the agent is told how many
   there are. */
static CUresult made(CUresult result, const CUcontext *out) {
    if (result != CUDA_SUCCESS || !engine_suspends()) return result;
    pthread_mutex_lock(&contexts_lock);
    context_entry(*out);
    pthread_mutex_unlock(&contexts_lock);
    return result;
}

CUresult wrapped_cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
    return made(real.cuDevicePrimaryCtxRetain(out, device), out);
}

#define CREATING(name, parameters, arguments)                                                                          \
    CUresult wrapped_##name parameters {                                                                               \
        CUresult result = made(real.name arguments, out);                                                              \
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

/* Before a call that may destroy a context, and that waits for its work if it does. Returns the number of the newest
 * allocation. */
static uint64_t leave(struct leaving *entry, CUcontext handle) {
    pthread_mutex_lock(&contexts_lock);
    uint64_t newest = allocations_newest();
    context_leaving_begins(entry, handle);
    pace_context_ends(handle);
    pthread_mutex_unlock(&contexts_lock);
    return newest;
}

/* After it. The context's streams, events and memory up to that number are gone with it. */
static void left(struct leaving *entry, bool gone, uint64_t newest) {
    CUcontext handle = entry->handle;
    pthread_mutex_lock(&contexts_lock);
    context_leaving_ends(entry);
    if (gone && handle) {
        pace_context_gone(handle);
        lanes_of_context_gone(handle);
        block_cache_context_gone(handle);
        allocations_of_context_gone(handle, newest);
        captures_of_context_gone(handle);
        context_gone(handle);
        ties_of_context_gone(handle);
    }
    pthread_mutex_unlock(&contexts_lock);
    lanes_context_changed();
}

#define DESTROYING(name)                                                                                               \
    CUresult wrapped_##name(CUcontext context) {                                                                       \
        struct leaving entry;                                                                                          \
        uint64_t newest = leave(&entry, context);                                                                      \
        CUresult result = real.name(context);                                                                          \
        left(&entry, result == CUDA_SUCCESS, newest);                                                                  \
        return result;                                                                                                 \
    }

DESTROYING(cuCtxDestroy)
DESTROYING(cuCtxDestroy_v2)
DESTROYING(cuCtxDetach)

/* The primary context of a device: counted by the driver, gone with the last release or a reset. A reset context keeps
 * its handle. */
static bool primary_context_is_gone(CUdevice device) {
    unsigned flags;
    int active = 0;
    real.cuDevicePrimaryCtxGetState(device, &flags, &active);
    return !active;
}

static CUcontext primary_context(CUdevice device) {
    CUcontext handle = NULL;
    unsigned flags;
    int active = 0;
    /* retaining is how to learn the handle; done only while there is one, and given back at once */
    if (real.cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS || !active) return NULL;
    if (real.cuDevicePrimaryCtxRetain(&handle, device) != CUDA_SUCCESS) return NULL;
    real.cuDevicePrimaryCtxRelease_v2(device);
    return handle;
}

#define LEAVING(name)                                                                                                  \
    CUresult wrapped_##name(CUdevice device) {                                                                         \
        struct leaving entry;                                                                                          \
        uint64_t newest = leave(&entry, primary_context(device));                                                      \
        CUresult result = real.name(device);                                                                           \
        left(&entry, result == CUDA_SUCCESS && primary_context_is_gone(device), newest);                               \
        return result;                                                                                                 \
    }

LEAVING(cuDevicePrimaryCtxRelease)
LEAVING(cuDevicePrimaryCtxRelease_v2)
LEAVING(cuDevicePrimaryCtxReset)
LEAVING(cuDevicePrimaryCtxReset_v2)

/* A green context is a part of a GPU. Its memory is the primary context's, which goes with the last that holds it; what
 * was freed in its streams can be used again, once their work is over. */
CUresult wrapped_cuGreenCtxDestroy(CUgreenCtx green) {
    CUcontext context = NULL, popped;
    CUdevice device;
    if (!driver_has(cuCtxFromGreenCtx) || real.cuCtxFromGreenCtx(&context, green) != CUDA_SUCCESS ||
        real.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS)
        return real.cuGreenCtxDestroy(green);
    bool known = real.cuCtxGetDevice(&device) == CUDA_SUCCESS;
    if (block_cache_of_context(context)) real.cuCtxSynchronize();
    real.cuCtxPopCurrent_v2(&popped);
    CUcontext primary = known ? primary_context(device) : NULL;
    struct leaving own, shared;
    uint64_t newest = leave(&own, context);
    leave(&shared, primary);
    CUresult result = real.cuGreenCtxDestroy(green);
    bool all = result == CUDA_SUCCESS && primary && primary_context_is_gone(device);
    if (result == CUDA_SUCCESS && primary && !all) {
        block_cache_context_moved(context, primary);
        allocations_context_moved(context, primary);
    }
    left(&shared, all, newest);
    left(&own, result == CUDA_SUCCESS, newest);
    return result;
}

static void stream_ends(CUstream stream) {
    if (IS_DEFAULT(stream)) return;
    block_cache_stream_gone(stream);
    pthread_mutex_lock(&contexts_lock);
    pace_stream_ends(stream);
    lanes_of_stream_end(stream);
    pthread_mutex_unlock(&contexts_lock);
}

/* A capture ends with its stream. */
#define STREAM_DESTROYING(name)                                                                                        \
    CUresult wrapped_##name(CUstream stream) {                                                                         \
        stream_ends(stream);                                                                                           \
        bool captured = capture_forget(stream);                                                                        \
        CUresult result = real.name(stream);                                                                           \
        if (captured && result != CUDA_SUCCESS) capture_remember(stream);                                              \
        return result;                                                                                                 \
    }

STREAM_DESTROYING(cuStreamDestroy)
STREAM_DESTROYING(cuStreamDestroy_v2)
