#include "lease/marks.h"

#include <stdlib.h>

#include "contexts/captures.h"
#include "contexts/contexts.h"
#include "contexts/lanes.h"
#include "contexts/driver_turn.h"
#include "driver/driver.h"
#include "driver/suspension.h"

/* A capture that is not ended in this time is not waited for. */
#define CAPTURE_PATIENCE (2 * SECOND)

/* With the driver's turn. A context that leaves with work: the call that destroys it waits for that work. */
static bool work_leaves(const struct gpu *gpu) {
    for (const struct context *context = contexts; context; context = context->next) {
        if (context->gpu != gpu || !context_leaves(context->handle)) continue;
        if (context->orphans) return true;
        for (const struct lane *lane = context->lanes; lane; lane = lane->next)
            if (lane_is_active(lane)) return true;
    }
    return false;
}

static bool record(struct gpu *gpu) {
    static uint64_t capturing_since;
    bool capturing = captures_in_progress();
    if (!capturing) {
        capturing_since = 0;
    } else {
        /* An event in a captured stream would become part of the graph, one in the legacy stream would break the
         * capture. */
        if (!capturing_since) capturing_since = clock_now();
        if (clock_now() - capturing_since < CAPTURE_PATIENCE) return false;
    }
    if (!driver_turn_begin()) return true;
    if (work_leaves(gpu)) {
        driver_turn_end();
        return false;
    }
    for (struct context *context = contexts; context; context = context->next) {
        if (context->gpu != gpu || context_leaves(context->handle)) continue;
        if (real.cuCtxSetCurrent(context->handle) != CUDA_SUCCESS) continue;
        for (struct lane *lane = context->lanes; lane; lane = lane->next) {
            lane->pending = false;
            if (!lane_is_active(lane)) continue;
            /* The thread's own default stream has no handle that means it here; the legacy stream waits for it. */
            CUstream stream = lane->stream == CU_STREAM_PER_THREAD ? CU_STREAM_LEGACY : lane->stream;
            if (capturing && (stream == NULL || stream == CU_STREAM_LEGACY || capture_records(stream))) continue;
            if (!lane->mark && real.cuEventCreate(&lane->mark, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
                lane->mark = NULL;
            lane->pending = lane->mark && real.cuEventRecord(lane->mark, stream) == CUDA_SUCCESS;
        }
    }
    driver_turn_end();
    return true;
}

bool marks_record(struct gpu *gpu) {
    if (suspension_stops_background()) return true; /* a thread in the driver may have the turn of captures.h */
    captures_hold_off();
    bool recorded = record(gpu);
    captures_let_on();
    return recorded;
}

bool marks_passed(struct gpu *gpu) {
    if (!driver_turn_begin()) return true;
    bool passed = !work_leaves(gpu);
    for (struct context *context = contexts; context && passed; context = context->next) {
        if (context->gpu != gpu || context_leaves(context->handle)) continue;
        for (struct lane *lane = context->lanes; lane && passed; lane = lane->next) {
            if (!lane->pending) continue;
            /* an error is no reason to wait: a context that has failed does no work */
            if (real.cuEventQuery(lane->mark) == CUDA_ERROR_NOT_READY)
                passed = false;
            else
                lane->pending = false;
        }
        while (context->orphans && passed) {
            struct orphan *orphan = context->orphans;
            if (real.cuEventQuery(orphan->event) == CUDA_ERROR_NOT_READY) {
                passed = false;
                break;
            }
            real.cuEventDestroy_v2(orphan->event);
            context->orphans = orphan->next;
            free(orphan);
        }
    }
    driver_turn_end();
    return passed;
}
