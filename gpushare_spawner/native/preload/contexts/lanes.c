#include "contexts/lanes.h"

#include <errno.h>
#include <stdlib.h>

#include "contexts/captures.h"

__thread struct passage *lanes_passage __attribute__((tls_model("initial-exec")));

static struct lane *free_lanes;

bool lane_is_active(const struct lane *lane) {
    /* the previous burst counts too: a thread may have read its number just before its end */
    return atomic_load(&lane->burst) + 1 >= atomic_load(&lane->gpu->burst);
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

static struct lane *lane_create(struct passage *passage, CUstream stream, CUcontext context) {
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

static void remember_lane(struct passage *passage, CUstream stream, struct lane *lane) {
    struct near_lane *set = near_set(passage, stream);
    set[1] = set[0];
    set[0] = (struct near_lane){stream, lane};
}

/* The lane of a default stream, which belongs to the current context. In a process with a single context the handle
   determines the lane; with several contexts the driver is queried at each launch. */
static struct lane *default_lane(struct passage *passage, CUstream stream) {
    bool single = atomic_load_explicit(&contexts_count, memory_order_relaxed) <= 1;
    struct near_lane *place = &passage->near[(uintptr_t)stream];
    if (single && place->stream == stream) return place->lane;
    CUstream meant = stream == CU_STREAM_LEGACY ? NULL : stream;
    if ((!single || !passage->context) && real.cuCtxGetCurrent(&passage->context) != CUDA_SUCCESS)
        passage->context = NULL;
    CUcontext context = passage->context;
    if (!context) return NULL;
    if (single) {
        struct lane *lane = lane_create(passage, meant, context);
        /* lane_create may have added the second context */
        if (lane && atomic_load(&contexts_count) <= 1) *place = (struct near_lane){stream, lane};
        return lane;
    }
    /* stored under an odd number, which is not the handle of a stream */
    CUstream name = (CUstream)(((uintptr_t)context | 1) + (uintptr_t)meant);
    struct lane *lane = near_lane(passage, name);
    if (!lane && (lane = lane_create(passage, meant, context))) remember_lane(passage, name, lane);
    passage->defaults[(uintptr_t)stream] = (struct default_lane){lane ? context : NO_CONTEXT, lane};
    return lane;
}

struct lane *lane_of(struct passage *passage, CUstream stream) {
    if (stream == NO_STREAM) return NULL;
    uint32_t epoch = atomic_load_explicit(&contexts_epoch, memory_order_acquire);
    if (unlikely(passage->epoch != epoch)) {
        for (int i = 0; i < NEAR_PLACES; i++) passage->near[i] = (struct near_lane){NO_STREAM, NULL};
        for (int i = 0; i < DEFAULTS; i++) passage->defaults[i] = (struct default_lane){NO_CONTEXT, NULL};
        passage->context = NULL;
        passage->epoch = epoch;
    }
    if (IS_DEFAULT(stream)) return default_lane(passage, stream);
    struct lane *lane = near_lane(passage, stream);
    if (!lane && (lane = lane_create(passage, stream, NULL))) remember_lane(passage, stream, lane);
    return lane;
}

void lanes_remove_stream(CUstream stream) {
    for (struct context *context = contexts; context; context = context->next) {
        for (struct lane **link = &context->lanes; *link; link = &(*link)->next) {
            struct lane *lane = *link;
            if (lane->stream != stream) continue;
            struct orphan *orphan = lane_is_active(lane) && !capture_records(stream) ? malloc(sizeof *orphan) : NULL;
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
            lane->mark = NULL;
            *link = lane->next;
            lane->next = free_lanes;
            free_lanes = lane;
            atomic_fetch_add(&contexts_epoch, 1);
            break;
        }
    }
}

void lanes_remove_context(CUcontext handle) {
    for (struct context *context = contexts; context; context = context->next) {
        if (context->handle != handle) continue;
        while (context->lanes) {
            struct lane *lane = context->lanes;
            context->lanes = lane->next;
            lane->next = free_lanes;
            free_lanes = lane;
        }
    }
}

RESET_IN_CHILD(lanes_reset);
void lanes_reset(void) {
    free_lanes = NULL;
    lanes_passage = NULL; /* belongs to the forking thread, the only thread of the child */
}
