#include "lease/burst.h"

#include <string.h>

#include "memory/account.h"
#include "memory/block_cache.h"
#include "gate/launch.h"
#include "lease/marks.h"

/* Looking costs a context switch of this process: often while an end may be near, seldom while launches keep coming. */
#define OFTEN  (1 * MILLISECOND)
#define SELDOM (8 * MILLISECOND)
/* A gap between two launches that is no end of a burst. */
#define GAP (3 * MILLISECOND)

enum phase {
    LAUNCHING, /* launches were seen since the last look */
    DRAINING,  /* none were; the marks behind the last ones are awaited */
    QUIET,
};

static struct burst {
    enum phase phase;
    bool told; /* the end was reported */
    uint64_t launches;
    uint64_t phase_since;
    uint64_t work_since; /* begin of the burst */
    uint64_t quiet_since;
    uint64_t busy; /* of finished bursts under this lease */
} bursts[MAX_GPUS];

void bursts_forget(void) {
    memset(bursts, 0, sizeof bursts);
}

void burst_lease_begins(struct gpu *gpu) {
    struct burst *burst = &bursts[gpu->index];
    uint64_t now = clock_now();
    *burst = (struct burst){.phase = LAUNCHING, .launches = launches_on(gpu), .phase_since = now, .work_since = now};
}

void burst_watch_begins(struct gpu *gpu) {
    uint64_t now = clock_now();
    bursts[gpu->index] = (struct burst){
        .phase = QUIET, .told = true, .launches = launches_on(gpu), .phase_since = now, .quiet_since = now};
}

void burst_goes_on(struct gpu *gpu, uint64_t now) {
    struct burst *burst = &bursts[gpu->index];
    burst->phase = DRAINING; /* behind the marks by which it was found */
    burst->told = false;
    burst->phase_since = burst->work_since = now;
}

static enum burst_change began(struct burst *burst, uint64_t now, uint64_t launches) {
    bool news = burst->told;
    if (news) burst->work_since = now;
    burst->phase = LAUNCHING;
    burst->phase_since = now;
    burst->launches = launches;
    burst->told = false;
    return news ? BURST_BEGAN : BURST_SAME;
}

enum burst_change burst_step(struct gpu *gpu, uint64_t now, uint64_t *next) {
    struct burst *burst = &bursts[gpu->index];
    uint64_t launches = launches_on(gpu);
    bool active = launches != burst->launches || launch_inside(gpu);
    uint64_t since = now - burst->phase_since;

    if (active) {
        enum burst_change change = BURST_SAME;
        if (burst->phase != LAUNCHING)
            change = began(burst, now, launches);
        else
            burst->launches = launches;
        /* a busy program is looked at less and less often */
        since = now - burst->phase_since;
        *next = now + (since / 16 < OFTEN ? OFTEN : since / 16 > SELDOM / 2 ? SELDOM / 2 : since / 16);
        return change;
    }
    switch (burst->phase) {
    case LAUNCHING:
        *next = now + OFTEN;
        if (!marks_record(gpu)) return BURST_SAME; /* a capture: later */
        burst->phase = DRAINING;
        burst->phase_since = now;
        return BURST_SAME;
    case DRAINING:
        if (!marks_passed(gpu)) {
            *next = now + (since / 16 < OFTEN ? OFTEN : since / 16 > SELDOM ? SELDOM : since / 16);
            return BURST_SAME;
        }
        burst->phase = QUIET;
        burst->phase_since = burst->quiet_since = now;
        *next = now + OFTEN;
        return BURST_SAME;
    case QUIET: break;
    }
    if (!burst->told && now - burst->quiet_since >= GAP) {
        burst_over(gpu, burst->quiet_since);
        burst->told = true;
        *next = now + OFTEN;
        return BURST_ENDED;
    }
    *next = now + (burst->told ? SELDOM / 2 : OFTEN);
    return BURST_SAME;
}

void burst_over(struct gpu *gpu, uint64_t now) {
    struct burst *burst = &bursts[gpu->index];
    if (!burst->told) burst->busy += now - burst->work_since;
    if (burst->phase != QUIET) burst->quiet_since = now;
    burst->phase = QUIET;
    burst->told = true;
    atomic_fetch_add(&gpu->burst, 1);
    block_cache_quiet(gpu);
    /* pools give back what was freed in streams, of which no call tells */
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
