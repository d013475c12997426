#include "lease/bursts.h"

#include <stdlib.h>
#include <string.h>

#include "contexts/captures.h"
#include "contexts/lanes.h"
#include "gate/gate.h"
#include "gate/launch.h"
#include "memory/account.h"
#include "memory/block_cache.h"

/* ---- marks ---- */

/* The longest wait for the end of a capture. */
#define CAPTURE_PATIENCE (2 * SECOND)

/* Whether a context with work is being destroyed: the call that destroys it waits for that work. Within a turn. */
static bool destroys_work(const struct gpu *gpu) {
    for (const struct context *context = contexts; context; context = context->next) {
        if (context->gpu != gpu || !context_in_destruction(context->handle)) continue;
        if (context->orphans) return true;
        for (const struct lane *lane = context->lanes; lane; lane = lane->next)
            if (lane_is_active(lane)) return true;
    }
    return false;
}

static uint64_t capturing_since; /* 0: no capture is in progress */

static bool record_marks(struct gpu *gpu) {
    bool capturing = captures_in_progress();
    if (!capturing) {
        capturing_since = 0;
    } else {
        /* an event in a captured stream would become part of the graph, and an event in the legacy stream would break
           the capture */
        if (!capturing_since) capturing_since = clock_now();
        if (clock_now() - capturing_since < CAPTURE_PATIENCE) return false;
    }
    if (!contexts_turn_begin()) return true;
    if (destroys_work(gpu)) {
        contexts_turn_end();
        return false;
    }
    for (struct context *context = contexts; context; context = context->next) {
        if (context->gpu != gpu || context_in_destruction(context->handle)) continue;
        if (real.cuCtxSetCurrent(context->handle) != CUDA_SUCCESS) continue;
        for (struct lane *lane = context->lanes; lane; lane = lane->next) {
            lane->pending = false;
            if (!lane_is_active(lane)) continue;
            /* this thread has no handle for another thread's default stream; the legacy stream waits for that stream */
            CUstream stream = lane->stream == CU_STREAM_PER_THREAD ? CU_STREAM_LEGACY : lane->stream;
            if (capturing && (stream == NULL || stream == CU_STREAM_LEGACY || capture_records(stream))) continue;
            if (!lane->mark && real.cuEventCreate(&lane->mark, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
                lane->mark = NULL;
            lane->pending = lane->mark && real.cuEventRecord(lane->mark, stream) == CUDA_SUCCESS;
        }
    }
    contexts_turn_end();
    return true;
}

bool bursts_record_marks(struct gpu *gpu) {
    if (driver_background_suspended()) return true; /* a thread that the driver blocks may hold captures_lock */
    captures_lock();
    bool recorded = record_marks(gpu);
    captures_unlock();
    return recorded;
}

bool bursts_marks_passed(struct gpu *gpu) {
    if (!contexts_turn_begin()) return true;
    bool passed = !destroys_work(gpu);
    for (struct context *context = contexts; context && passed; context = context->next) {
        if (context->gpu != gpu || context_in_destruction(context->handle)) continue;
        for (struct lane *lane = context->lanes; lane && passed; lane = lane->next) {
            if (!lane->pending) continue;
            /* an error counts as passed: a failed context does no work */
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
    contexts_turn_end();
    return passed;
}

/* ---- bursts ---- */

/* A poll costs this process a context switch, so it polls often while an end may be near and seldom while launches
   continue. */
#define OFTEN  (1 * MILLISECOND)
#define SELDOM (8 * MILLISECOND)
/* The longest gap between two launches of a burst. */
#define GAP (3 * MILLISECOND)

enum phase {
    LAUNCHING, /* there have been launches since the last poll */
    DRAINING,  /* there have been none; the marks behind the last launches have not passed */
    QUIET,
};

enum change { BURST_SAME, BURST_BEGAN, BURST_ENDED };

static struct burst {
    enum phase phase;
    bool reported; /* the end was reported or there was no burst */
    uint64_t launches;
    uint64_t phase_since;
    uint64_t work_since; /* start of the burst */
    uint64_t quiet_since;
    uint64_t busy; /* time of finished bursts under this lease */
} bursts[MAX_GPUS];

void burst_lease_begins(struct gpu *gpu) {
    struct burst *burst = &bursts[gpu->index];
    uint64_t now = clock_now();
    *burst = (struct burst){.phase = LAUNCHING, .launches = launches_on(gpu), .phase_since = now, .work_since = now};
}

static enum change begin(struct burst *burst, uint64_t now, uint64_t launches) {
    bool new = burst->reported;
    if (new) burst->work_since = now;
    burst->phase = LAUNCHING;
    burst->phase_since = now;
    burst->launches = launches;
    burst->reported = false;
    return new ? BURST_BEGAN : BURST_SAME;
}

/* Poll the launches and marks. `next`: the instant of the next poll. */
static enum change poll_burst(struct gpu *gpu, uint64_t now, uint64_t *next) {
    struct burst *burst = &bursts[gpu->index];
    uint64_t launches = launches_on(gpu);
    bool active = launches != burst->launches || launch_inside(gpu);
    uint64_t since = now - burst->phase_since;

    if (active) {
        enum change change = BURST_SAME;
        if (burst->phase != LAUNCHING)
            change = begin(burst, now, launches);
        else
            burst->launches = launches;
        /* the longer a program is busy, the less often it is polled */
        since = now - burst->phase_since;
        *next = now + (since / 16 < OFTEN ? OFTEN : since / 16 > SELDOM / 2 ? SELDOM / 2 : since / 16);
        return change;
    }
    switch (burst->phase) {
    case LAUNCHING:
        *next = now + OFTEN;
        if (!bursts_record_marks(gpu)) return BURST_SAME; /* a capture is in progress: try later */
        burst->phase = DRAINING;
        burst->phase_since = now;
        return BURST_SAME;
    case DRAINING:
        if (!bursts_marks_passed(gpu)) {
            *next = now + (since / 16 < OFTEN ? OFTEN : since / 16 > SELDOM ? SELDOM : since / 16);
            return BURST_SAME;
        }
        burst->phase = QUIET;
        burst->phase_since = burst->quiet_since = now;
        *next = now + OFTEN;
        return BURST_SAME;
    case QUIET: break;
    }
    if (!burst->reported && now - burst->quiet_since >= GAP) {
        burst_over(gpu, burst->quiet_since);
        burst->reported = true;
        *next = now + OFTEN;
        return BURST_ENDED;
    }
    *next = now + (burst->reported ? SELDOM / 2 : OFTEN);
    return BURST_SAME;
}

void burst_step(struct gpu *gpu, uint64_t lease, uint64_t now, uint64_t *next) {
    switch (poll_burst(gpu, now, next)) {
    case BURST_BEGAN: gpu_send(gpu, (struct frame){.type = FRAME_BUSY, .f = {lease}}); break;
    case BURST_ENDED:
        gpu_send(gpu,
                 (struct frame){.type = FRAME_IDLE, .f = {lease, burst_busy_time(gpu), burst_quiet_time(gpu, now)}});
        break;
    case BURST_SAME: break;
    }
}

void burst_over(struct gpu *gpu, uint64_t now) {
    struct burst *burst = &bursts[gpu->index];
    if (!burst->reported) burst->busy += now - burst->work_since;
    if (burst->phase != QUIET) burst->quiet_since = now;
    burst->phase = QUIET;
    burst->reported = true;
    atomic_fetch_add(&gpu->burst, 1);
    block_cache_quiet(gpu);
    /* pools release memory that was freed in streams without a call */
    if (atomic_load(&gpu->driver_memory)) account_changed(gpu);
}

uint64_t burst_busy_time(const struct gpu *gpu) {
    const struct burst *burst = &bursts[gpu->index];
    return burst->busy;
}

uint64_t burst_quiet_time(const struct gpu *gpu, uint64_t now) {
    const struct burst *burst = &bursts[gpu->index];
    return burst->phase == QUIET ? now - burst->quiet_since : 0;
}

/* ---- work from before the connection ---- */

#define STEP MILLISECOND
/* A mark without work before it has passed after this time, even if other processes use the GPU and all cores. */
#define MARK_PASSES (50 * MILLISECOND)

static struct earlier_work {
    bool possible;
    bool marked;
    uint64_t marked_at;
} earlier_works[MAX_GPUS];

void bursts_check_earlier_work(struct gpu *gpu) {
    earlier_works[gpu->index] = (struct earlier_work){.possible = true};
}

bool bursts_earlier_work_runs(struct gpu *gpu, uint64_t now, uint64_t *next) {
    struct earlier_work *work = &earlier_works[gpu->index];
    if (!work->possible) return false;
    *next = now + STEP;
    if (!work->marked) {
        if (launch_inside(gpu) || !bursts_record_marks(gpu)) return false;
        work->marked = true;
        work->marked_at = now;
    }
    bool over = bursts_marks_passed(gpu);
    if (!over && now - work->marked_at < MARK_PASSES) return false;
    work->possible = false;
    *next = UINT64_MAX;
    return !over;
}

/* ---- engine `observe` ---- */

/* A GPU that has been quiet for this time is no longer polled: the next launch wakes the background thread. */
#define QUIET_REST (1 * SECOND)
#define NO_LEASE   0

static bool observed[MAX_GPUS];

void bursts_observe(struct gpu *gpu) {
    uint64_t now = clock_now();
    observed[gpu->index] = true;
    bursts[gpu->index] = (struct burst){
        .phase = QUIET, .reported = true, .launches = launches_on(gpu), .phase_since = now, .quiet_since = now};
    bursts_check_earlier_work(gpu);
    gate_open(gpu);
}

void bursts_observe_end(struct gpu *gpu) {
    observed[gpu->index] = false;
    gate_open(gpu);
}

/* Report a burst that began before the connection. */
static void continue_earlier_work(struct gpu *gpu, uint64_t now) {
    struct burst *burst = &bursts[gpu->index];
    burst->phase = DRAINING; /* its marks have been recorded */
    burst->reported = false;
    burst->phase_since = burst->work_since = now;
    gpu_send(gpu, (struct frame){.type = FRAME_BUSY, .f = {NO_LEASE}});
}

uint64_t bursts_observe_step(struct gpu *gpu, uint64_t now) {
    uint64_t check_next = UINT64_MAX, next = UINT64_MAX;
    if (!observed[gpu->index] || atomic_load(&gpu->gate_state) == GATE_RESTING) return UINT64_MAX;
    if (bursts_earlier_work_runs(gpu, now, &check_next)) continue_earlier_work(gpu, now);
    if (check_next != UINT64_MAX) return check_next;
    burst_step(gpu, NO_LEASE, now, &next);
    if (burst_quiet_time(gpu, now) < QUIET_REST) return next;
    gate_rest(gpu);
    burst_step(gpu, NO_LEASE, now, &next); /* a launch may have occurred before the gate was resting */
    if (burst_quiet_time(gpu, now) >= QUIET_REST) return UINT64_MAX;
    gate_open(gpu);
    return next;
}

RESET_IN_CHILD(bursts_reset);
void bursts_reset(void) {
    capturing_since = 0;
    memset(bursts, 0, sizeof bursts);
    memset(earlier_works, 0, sizeof earlier_works);
    memset(observed, 0, sizeof observed);
}
