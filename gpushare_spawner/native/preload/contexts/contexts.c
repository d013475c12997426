#include "contexts/contexts.h"

#include <errno.h>
#include <stdlib.h>

#include "memory/allocations.h"
#include "memory/block_cache.h"
#include "contexts/capture.h"
#include "driver/resolve.h"

pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
struct context *contexts;

static struct lane *free_lanes;
static _Atomic int contexts_known; /* while it is one, a thread with a context has that one */

/* Contexts that a thread is about to destroy; the entries are on the stacks of those threads. */
struct leaving {
    CUcontext handle;
    struct leaving *next;
};

static struct leaving *leaving;

bool context_leaves(CUcontext handle) {
    for (const struct leaving *entry = leaving; entry; entry = entry->next)
        if (entry->handle == handle) return true;
    return false;
}

bool lane_is_active(const struct lane *lane) {
    /* the burst before counts too: a thread may have read its number just before it was over */
    return atomic_load(&lane->burst) + 1 >= atomic_load(&lane->gpu->burst);
}

struct context *context_entry(CUcontext handle) {
    for (struct context *context = contexts; context; context = context->next)
        if (context->handle == handle) return context;

    CUcontext current = NULL;
    CUdevice device;
    real.cuCtxGetCurrent(&current);
    bool switched = current != handle;
    if (switched && real.cuCtxPushCurrent_v2(handle) != CUDA_SUCCESS) return NULL;
    bool found = real.cuCtxGetDevice(&device) == CUDA_SUCCESS;
    if (switched) real.cuCtxPopCurrent_v2(&current);
    struct gpu *gpu = found ? gpu_of_device(device) : NULL;
    struct context *context = gpu ? calloc(1, sizeof *context) : NULL;
    if (!context) return NULL;
    context->handle = handle;
    context->gpu = gpu;
    context->next = contexts;
    contexts = context;
    atomic_fetch_add(&contexts_known, 1);
    atomic_fetch_add(&lanes_epoch, 1); /* default streams are no longer certain */
    return context;
}

static struct lane *lane_entry(struct context *context, CUstream stream, const struct passage *passage) {
    const struct passage *thread = stream == CU_STREAM_PER_THREAD ? passage : NULL;
    for (struct lane *lane = context->lanes; lane; lane = lane->next)
        if (lane->stream == stream && lane->thread == thread) return lane;
    struct lane *lane = free_lanes;
    if (lane)
        free_lanes = lane->next;
    else if (!(lane = calloc(1, sizeof *lane)))
        return NULL;
    lane->gpu = context->gpu;
    lane->context = context;
    lane->stream = stream;
    lane->thread = thread;
    lane->mark = NULL;
    lane->pending = false;
    atomic_store(&lane->burst, 0);
    atomic_store(&lane->uncaptured, 0);
    lane->next = context->lanes;
    context->lanes = lane;
    return lane;
}

static struct lane *lane_found(struct passage *passage, CUstream stream, CUcontext context) {
    int kept = errno;
    CUcontext owner = context;
    if (!owner && real.cuStreamGetCtx(stream, &owner) != CUDA_SUCCESS) owner = NULL;
    if (!owner && real.cuCtxGetCurrent(&owner) != CUDA_SUCCESS) owner = NULL;
    pthread_mutex_lock(&contexts_lock);
    struct context *entry = owner ? context_entry(owner) : NULL;
    struct lane *lane = entry ? lane_entry(entry, stream, passage) : NULL;
    pthread_mutex_unlock(&contexts_lock);
    errno = kept;
    return lane;
}

static void remember(struct passage *passage, CUstream stream, struct lane *lane) {
    struct near_lane *set = near_set(passage, stream);
    set[1] = set[0];
    set[0] = (struct near_lane){stream, lane};
}

/* A default stream belongs to the current context. While there is one context that is known, the handle says which lane
 * it is; with more the driver is asked at each launch. */
static struct lane *default_lane(struct passage *passage, CUstream stream) {
    bool one = atomic_load_explicit(&contexts_known, memory_order_relaxed) <= 1;
    struct near_lane *place = &passage->near[(uintptr_t)stream];
    if (one && place->stream == stream) return place->lane;
    CUstream meant = stream == CU_STREAM_LEGACY ? NULL : stream;
    if ((!one || !passage->context) && real.cuCtxGetCurrent(&passage->context) != CUDA_SUCCESS) passage->context = NULL;
    CUcontext context = passage->context;
    if (!context) return NULL;
    if (one) {
        struct lane *lane = lane_found(passage, meant, context);
        /* it may have been the second context that was just found */
        if (lane && atomic_load(&contexts_known) <= 1) *place = (struct near_lane){stream, lane};
        return lane;
    }
    /* remembered under a number that is odd, as no handle of a stream is */
    CUstream name = (CUstream)(((uintptr_t)context | 1) + (uintptr_t)meant);
    struct lane *lane = near_lane(passage, name);
    if (!lane && (lane = lane_found(passage, meant, context))) remember(passage, name, lane);
    passage->defaults[(uintptr_t)stream] = (struct default_lane){context, lane};
    return lane;
}

struct lane *lane_of(struct passage *passage, CUstream stream) {
    if (stream == NO_STREAM) return NULL;
    uint32_t epoch = atomic_load_explicit(&lanes_epoch, memory_order_acquire);
    if (unlikely(passage->epoch != epoch)) {
        for (int i = 0; i < NEAR_PLACES; i++) passage->near[i] = (struct near_lane){NO_STREAM, NULL};
        for (int i = 0; i < DEFAULTS; i++) passage->defaults[i] = (struct default_lane){NULL, NULL};
        passage->context = NULL;
        passage->epoch = epoch;
    }
    if (IS_DEFAULT(stream)) return default_lane(passage, stream);
    struct lane *lane = near_lane(passage, stream);
    if (!lane && (lane = lane_found(passage, stream, NULL))) remember(passage, stream, lane);
    return lane;
}

void stream_forget(CUstream stream) {
    if (IS_DEFAULT(stream)) return;
    block_cache_stream_gone(stream);
    pthread_mutex_lock(&contexts_lock);
    for (struct context *context = contexts; context; context = context->next) {
        for (struct lane **link = &context->lanes; *link; link = &(*link)->next) {
            struct lane *lane = *link;
            if (lane->stream != stream) continue;
            struct orphan *orphan = lane_is_active(lane) && !is_capturing(stream) ? malloc(sizeof *orphan) : NULL;
            if (orphan && real.cuCtxPushCurrent_v2(context->handle) == CUDA_SUCCESS) {
                if (real.cuEventCreate(&orphan->event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS) {
                    real.cuEventRecord(orphan->event, stream);
                    orphan->next = context->orphans;
                    context->orphans = orphan;
                    orphan = NULL;
                }
                if (lane->mark) real.cuEventDestroy_v2(lane->mark);
                CUcontext popped;
                real.cuCtxPopCurrent_v2(&popped);
            } else if (lane->mark) {
                real.cuEventDestroy_v2(lane->mark);
            }
            free(orphan);
            pace_lane_gone(lane, LANE_STREAM_ENDS);
            lane->mark = NULL;
            *link = lane->next;
            lane->next = free_lanes;
            free_lanes = lane;
            atomic_fetch_add(&lanes_epoch, 1);
            break;
        }
    }
    pthread_mutex_unlock(&contexts_lock);
}

/* With the lock held: the context is gone, and with it its streams, events and memory up to that number. */
static void context_forget(CUcontext handle, uint64_t until) {
    for (struct context **link = &contexts; *link; link = &(*link)->next) {
        struct context *context = *link;
        if (context->handle != handle) continue;
        while (context->lanes) {
            struct lane *lane = context->lanes;
            pace_lane_gone(lane, LANE_CONTEXT_GONE);
            context->lanes = lane->next;
            lane->next = free_lanes;
            free_lanes = lane;
        }
        while (context->orphans) {
            struct orphan *orphan = context->orphans;
            context->orphans = orphan->next;
            free(orphan);
        }
        *link = context->next;
        free(context);
        atomic_fetch_sub(&contexts_known, 1);
        break;
    }
    allocations_of_context_gone(handle, until);
    captures_of_context_gone(handle);
    atomic_fetch_add(&lanes_epoch, 1);
}

void contexts_forget(void) {
    /* the driver's objects are the parent's; the few records are left behind */
    contexts = NULL;
    leaving = NULL;
    free_lanes = NULL;
    atomic_store(&contexts_known, 0);
    atomic_fetch_add(&lanes_epoch, 1);
    pthread_mutex_init(&contexts_lock, NULL);
}

#define SWITCHING(name, parameters, arguments)                                                                         \
    CUresult wrapped_##name parameters {                                                                               \
        CUresult result = real.name arguments;                                                                         \
        gate_context_changed();                                                                                        \
        return result;                                                                                                 \
    }                                                                                                                  \
    EXPORTED(name);

SWITCHING(cuCtxCreate_v2, (CUcontext * out, unsigned flags, CUdevice device), (out, flags, device))
SWITCHING(cuCtxCreate_v3, (CUcontext * out, void *affinity, int count, unsigned flags, CUdevice device),
          (out, affinity, count, flags, device))
SWITCHING(cuCtxCreate_v4, (CUcontext * out, void *params, unsigned flags, CUdevice device),
          (out, params, flags, device))
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
    entry->handle = handle;
    entry->next = leaving;
    leaving = entry;
    for (struct context *context = contexts; context; context = context->next) {
        if (context->handle != handle) continue;
        for (struct lane *lane = context->lanes; lane; lane = lane->next) pace_lane_gone(lane, LANE_CONTEXT_ENDS);
    }
    pace_context_ends(handle);
    pthread_mutex_unlock(&contexts_lock);
    return newest;
}

/* After it. */
static void left(struct leaving *entry, bool gone, uint64_t newest) {
    pthread_mutex_lock(&contexts_lock);
    struct leaving **link = &leaving;
    while (*link && *link != entry) link = &(*link)->next;
    if (*link) *link = entry->next; /* else: a child that was forked meanwhile */
    if (gone && entry->handle) context_forget(entry->handle, newest);
    pthread_mutex_unlock(&contexts_lock);
    gate_context_changed();
}

#define DESTROYING(name)                                                                                               \
    CUresult wrapped_##name(CUcontext context) {                                                                       \
        struct leaving entry;                                                                                          \
        uint64_t newest = leave(&entry, context);                                                                      \
        CUresult result = real.name(context);                                                                          \
        left(&entry, result == CUDA_SUCCESS, newest);                                                                  \
        return result;                                                                                                 \
    }                                                                                                                  \
    EXPORTED(name);

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
    }                                                                                                                  \
    EXPORTED(name);

LEAVING(cuDevicePrimaryCtxRelease)
LEAVING(cuDevicePrimaryCtxRelease_v2)
LEAVING(cuDevicePrimaryCtxReset)
LEAVING(cuDevicePrimaryCtxReset_v2)

/* A capture ends with its stream. */
#define STREAM_DESTROYING(name)                                                                                        \
    CUresult wrapped_##name(CUstream stream) {                                                                         \
        stream_forget(stream);                                                                                         \
        bool captured = capture_forget(stream);                                                                        \
        CUresult result = real.name(stream);                                                                           \
        if (captured && result != CUDA_SUCCESS) capture_remember(stream);                                              \
        return result;                                                                                                 \
    }                                                                                                                  \
    EXPORTED(name);

STREAM_DESTROYING(cuStreamDestroy)
STREAM_DESTROYING(cuStreamDestroy_v2)
