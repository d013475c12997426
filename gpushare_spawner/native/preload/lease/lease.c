#include "lease/lease.h"

#include <string.h>

#include "gate/gate.h"
#include "gate/launch.h"
#include "gate/shortage.h"
#include "lease/bursts.h"
#include "lease/pager.h"
#include "memory/account.h"
#include "memory/block_cache.h"

/* docs/reference/protocol.md: after this time without an answer, work runs without a lease. */
#define ANSWER_PATIENCE (30 * SECOND)
/* A lease is returned if unused for this time. */
#define QUIET_RELEASE (1 * SECOND)
/* Work that does not end while the program's own threads wait at the gate may depend on them: after pace_patience the
   gate is opened for this time and shut again. */
#define DEADLOCK_MOMENT (50 * MILLISECOND)
#define STEP            MILLISECOND

enum lease_state {
    WITHOUT_AGENT, /* open */
    NONE,          /* shut, no thread waits */
    REQUESTED,     /* REQUEST sent */
    PAGING_IN,     /* granted; the gate opens when the memory is on the GPU */
    HELD,          /* open */
    SHUTTING,      /* shut; waiting until the device is quiet */
};

static struct lease {
    enum lease_state state;
    uint64_t id, last_id;
    uint64_t requested_at;
    uint64_t bursts;
    uint64_t page_in;
    uint64_t pace; /* bound on queued work in nanoseconds; 0: no bound */
    uint64_t shut_at, reopened_until;
    uint64_t page_out; /* bytes to page out after the release in progress */
    uint32_t reason;
    bool marked; /* SHUTTING has recorded its marks */
    bool paging_out;
    uint64_t paging_out_for; /* the lease id for PAGED_OUT */
    uint64_t page_out_next;  /* bytes requested while another page-out is in progress */
    bool paging_in_early;    /* without a lease */
    uint64_t page_in_next;   /* bytes of a page-in without a lease that begins after the page-out in progress */
    uint32_t shortages;      /* struct gpu's `shortages` at the last REQUEST */
} leases[MAX_GPUS];

static const struct pager_result NOTHING_MOVED = {0, 0};

static struct lease *lease_of(const struct gpu *gpu) {
    return &leases[gpu->index];
}

static void send_paged_out(const struct gpu *gpu, struct pager_result moved, uint64_t for_lease) {
    gpu_send(gpu, (struct frame){.type = FRAME_PAGED_OUT, .f = {moved.bytes, moved.nanoseconds, for_lease}});
}

static void send_paged_in(const struct gpu *gpu, struct pager_result moved) {
    gpu_send(gpu, (struct frame){.type = FRAME_PAGED_IN, .f = {moved.bytes, moved.nanoseconds}});
}

void lease_without_agent(struct gpu *gpu) {
    struct lease *lease = lease_of(gpu);
    pager_cut(gpu);
    *lease = (struct lease){.state = WITHOUT_AGENT, .bursts = lease->bursts};
    pace_begin(gpu, 0);
    gate_open(gpu);
    shortage_over(gpu);
}

void lease_begin(struct gpu *gpu) {
    struct lease *lease = lease_of(gpu);
    *lease = (struct lease){.state = NONE, .bursts = lease->bursts};
    gate_shut(gpu);
    bursts_check_earlier_work(gpu);
}

/* Request a lease, because threads wait at the gate or earlier work still runs. */
static void request(struct gpu *gpu) {
    struct lease *lease = lease_of(gpu);
    lease->state = REQUESTED;
    lease->requested_at = clock_now();
    struct account_figures memory = account_reported(gpu);
    lease->shortages = atomic_load(&gpu->shortages);
    lease->bursts++;
    gpu_send(gpu, (struct frame){.type = FRAME_REQUEST,
                                 .f = {memory.managed, memory.plain, lease->bursts, memory.short_of}});
}

static void begin_page_out(struct gpu *gpu, uint64_t bytes, uint64_t for_lease) {
    struct lease *lease = lease_of(gpu);
    if (lease->paging_in_early) { /* the agent needs the memory for another process */
        pager_cut(gpu);
        lease->page_out_next += bytes;
        return;
    }
    if (lease->page_in_next) send_paged_in(gpu, NOTHING_MOVED);
    lease->page_in_next = 0;
    if (lease->paging_out) { /* each PAGE_OUT gets its own answer */
        if (bytes > lease->page_out_next) lease->page_out_next = bytes;
        return;
    }
    lease->paging_out = true;
    lease->paging_out_for = for_lease;
    block_cache_give_back(gpu);
    pager_start(gpu, false, bytes);
}

/* Continue a page-out. False: it is not finished. */
static bool page_out_done(struct gpu *gpu) {
    struct lease *lease = lease_of(gpu);
    struct pager_result moved;
    if (!lease->paging_out) return true;
    if (!pager_step(gpu, &moved)) return false;
    lease->paging_out = false;
    send_paged_out(gpu, moved, lease->paging_out_for);
    if (!lease->page_out_next) return true;
    uint64_t bytes = lease->page_out_next;
    lease->page_out_next = 0;
    if (lease->state != NONE && lease->state != REQUESTED) { /* the process now holds a lease */
        send_paged_out(gpu, NOTHING_MOVED, 0);
        return true;
    }
    begin_page_out(gpu, bytes, 0);
    return false;
}

/* Perform the step of a page-in without a lease. False: it is not finished. */
static bool page_in_done(struct gpu *gpu) {
    struct lease *lease = lease_of(gpu);
    struct pager_result moved;
    if (lease->page_in_next && !lease->paging_out) {
        pager_start(gpu, true, lease->page_in_next);
        lease->page_in_next = 0;
        lease->paging_in_early = true;
    }
    if (!lease->paging_in_early) return true;
    if (!pager_step(gpu, &moved)) return false;
    lease->paging_in_early = false;
    send_paged_in(gpu, moved);
    if (!lease->page_out_next) return true;
    uint64_t bytes = lease->page_out_next;
    lease->page_out_next = 0;
    begin_page_out(gpu, bytes, 0);
    return false;
}

static void hold(struct gpu *gpu) {
    struct lease *lease = lease_of(gpu);
    lease->state = HELD;
    burst_lease_begins(gpu);
    atomic_fetch_add(&gpu->progress, 1);
    pace_begin(gpu, lease->pace);
    gate_open(gpu);
    shortage_over(gpu);
}

void lease_granted(struct gpu *gpu, const struct frame *frame) {
    struct lease *lease = lease_of(gpu);
    atomic_fetch_add(&gpu->progress, 1);
    if (frame->f[GRANT_LEASE] == 0) { /* the request is queued */
        lease->requested_at = clock_now();
        if (frame->f[GRANT_REFUSED]) shortage_refused(gpu);
        return;
    }
    if (lease->state == WITHOUT_AGENT) return;
    if (frame->f[GRANT_LEASE] == lease->last_id) return; /* a new pace for the lease that was just released */
    lease->id = frame->f[GRANT_LEASE];
    lease->pace = frame->f[GRANT_PACE];
    if (lease->state == HELD) {
        pace_set(gpu, lease->pace);
        return;
    }
    if (lease->state == SHUTTING) {
        /* this frame crossed with the release: the work in progress ends under the new lease */
        return;
    }
    log_line(LOG_DEBUG, "GPU %d: lease %llu, %llu bytes to page in", gpu->index, (unsigned long long)lease->id,
             (unsigned long long)frame->f[GRANT_PAGE_IN]);
    lease->page_in = frame->f[GRANT_PAGE_IN] + lease->page_in_next;
    lease->page_in_next = 0;
    if (lease->paging_in_early) { /* the page-in continues, and the gate opens at its end */
        lease->paging_in_early = false;
        lease->state = PAGING_IN;
        pager_extend(gpu, lease->page_in);
        lease->page_in = 0;
        if (lease->page_out_next) send_paged_out(gpu, NOTHING_MOVED, 0);
        lease->page_out_next = 0;
    } else if (lease->page_in) {
        lease->state = PAGING_IN;
        pager_cut(gpu); /* a page-out in progress ends first; then lease_step begins the page-in */
    } else {
        if (lease->paging_out) pager_cut(gpu);
        hold(gpu);
    }
}

static void shut(struct gpu *gpu, uint32_t reason, uint64_t page_out) {
    struct lease *lease = lease_of(gpu);
    gate_shut(gpu);
    lease->state = SHUTTING;
    lease->shut_at = clock_now();
    lease->reason = reason;
    lease->page_out = page_out;
    lease->marked = false;
    lease->reopened_until = 0;
}

void lease_revoked(struct gpu *gpu, const struct frame *frame) {
    struct lease *lease = lease_of(gpu);
    if (frame->f[REVOKE_LEASE] != lease->id || lease->state == WITHOUT_AGENT || lease->state == NONE ||
        lease->state == REQUESTED) {
        /* this frame crossed with the release; the agent still needs the memory */
        if (frame->f[REVOKE_PAGE_OUT] && frame->f[REVOKE_LEASE] == lease->last_id &&
            (lease->state == NONE || lease->state == REQUESTED))
            begin_page_out(gpu, frame->f[REVOKE_PAGE_OUT], frame->f[REVOKE_LEASE]);
        return;
    }
    log_line(LOG_DEBUG, "GPU %d: lease %llu revoked, %llu bytes to page out", gpu->index,
             (unsigned long long)frame->f[REVOKE_LEASE], (unsigned long long)frame->f[REVOKE_PAGE_OUT]);
    if (lease->state == SHUTTING) {
        lease->reason = RELEASE_REVOKED;
        lease->page_out = frame->f[REVOKE_PAGE_OUT];
        return;
    }
    pager_cut(gpu); /* PAGING_IN */
    shut(gpu, RELEASE_REVOKED, frame->f[REVOKE_PAGE_OUT]);
}

void lease_page_out(struct gpu *gpu, const struct frame *frame) {
    struct lease *lease = lease_of(gpu);
    if (lease->state == NONE || lease->state == REQUESTED)
        begin_page_out(gpu, frame->f[PAGE_OUT_BYTES], 0);
    else
        send_paged_out(gpu, NOTHING_MOVED, 0); /* the process now holds a lease */
}

void lease_page_in(struct gpu *gpu, const struct frame *frame) {
    struct lease *lease = lease_of(gpu);
    if (lease->state != NONE && lease->state != REQUESTED) {
        send_paged_in(gpu, NOTHING_MOVED); /* the process now holds a lease */
    } else if (lease->paging_in_early && !lease->page_out_next) {
        pager_extend(gpu, frame->f[PAGE_IN_BYTES]);
    } else {
        lease->page_in_next += frame->f[PAGE_IN_BYTES];
        if (lease->paging_out) pager_cut(gpu);
    }
}

static void release(struct gpu *gpu) {
    struct lease *lease = lease_of(gpu);
    gpu_send(gpu, (struct frame){.type = FRAME_RELEASE, .f = {lease->id, burst_busy_time(gpu), lease->reason}});
    lease->last_id = lease->id;
    lease->id = 0;
    lease->state = NONE;
    if (lease->reason == RELEASE_IDLE) block_cache_give_back(gpu);
    if (lease->page_out) begin_page_out(gpu, lease->page_out, lease->last_id);
}

static uint64_t shutting_step(struct gpu *gpu, uint64_t now) {
    struct lease *lease = lease_of(gpu);
    struct pager_result moved;
    if (!pager_step(gpu, &moved)) return now + STEP; /* a page-in that is being cut short */
    if (lease->reopened_until) {
        if (now < lease->reopened_until) return lease->reopened_until;
        shut(gpu, lease->reason, lease->page_out);
    }
    if (!lease->marked) {
        if (launch_inside(gpu) || !bursts_record_marks(gpu)) goto later;
        lease->marked = true;
    }
    if (bursts_marks_passed(gpu)) {
        burst_over(gpu, now);
        release(gpu);
        return now;
    }
later:
    if (atomic_load(&gpu->waiters) && now - lease->shut_at > pace_patience(gpu)) {
        log_line(LOG_INFO, "GPU %d: work does not end while threads wait to launch more; the gate opens for a moment",
                 gpu->index);
        lease->reopened_until = now + DEADLOCK_MOMENT;
        pace_relax(gpu);
        gate_open(gpu);
    }
    uint64_t waited = now - lease->shut_at;
    return now + (waited < 200 * MILLISECOND ? STEP / 2 : 4 * STEP);
}

static uint64_t held_step(struct gpu *gpu, uint64_t now) {
    struct lease *lease = lease_of(gpu);
    uint64_t next = UINT64_MAX;
    burst_step(gpu, lease->id, now, &next);
    /* missing memory requires another lease, because the agent may have to suspend other processes first */
    bool short_of_memory = atomic_load(&gpu->short_of) && atomic_load(&gpu->shortages) != lease->shortages;
    if (short_of_memory || burst_quiet_time(gpu, now) >= QUIET_RELEASE) {
        shut(gpu, RELEASE_IDLE, 0);
        return now;
    }
    return next;
}

bool lease_device_quiet(const struct gpu *gpu, uint64_t now) {
    const struct lease *lease = &leases[gpu->index];
    if (lease->state == HELD) return burst_quiet_time(gpu, now) > 0;
    return lease->state != SHUTTING && atomic_load(&gpu->gate_state) == GATE_SHUT;
}

bool lease_is_none(const struct gpu *gpu) {
    enum lease_state state = leases[gpu->index].state;
    return state == WITHOUT_AGENT || state == NONE || state == REQUESTED;
}

void lease_resume(struct gpu *gpu, bool work_possible) {
    if (lease_of(gpu)->state == WITHOUT_AGENT)
        gate_open(gpu);
    else if (work_possible)
        bursts_check_earlier_work(gpu);
}

static uint64_t requested_step(struct gpu *gpu, uint64_t now) {
    uint64_t until = lease_of(gpu)->requested_at + ANSWER_PATIENCE;
    if (atomic_load(&gpu->gate_state) != GATE_SHUT) return UINT64_MAX; /* it was opened when the patience ended */
    if (now < until) return until;
    log_line(LOG_ERROR, "the agent has not answered for %d s; work on GPU %d continues without a lease",
             (int)(ANSWER_PATIENCE / SECOND), gpu->index);
    pace_begin(gpu, 0);
    gate_open(gpu);
    return UINT64_MAX;
}

static uint64_t paging_in_step(struct gpu *gpu, uint64_t now) {
    struct lease *lease = lease_of(gpu);
    struct pager_result moved;
    if (lease->page_in) { /* the page-in has not begun */
        pager_start(gpu, true, lease->page_in);
        lease->page_in = 0;
    }
    if (!pager_step(gpu, &moved)) {
        atomic_fetch_add(&gpu->progress, 1);
        return now + STEP;
    }
    send_paged_in(gpu, moved);
    hold(gpu);
    return now;
}

uint64_t lease_step(struct gpu *gpu) {
    struct lease *lease = lease_of(gpu);
    uint64_t now = clock_now();
    bool moving = lease->paging_out && !page_out_done(gpu);
    if (lease->state == NONE || lease->state == REQUESTED) moving = !page_in_done(gpu) || moving;
    uint64_t moving_next = moving ? now + STEP : UINT64_MAX, next = UINT64_MAX;

    switch (lease->state) {
    case WITHOUT_AGENT: break;
    case NONE:
        if (atomic_load(&gpu->waiters) || bursts_earlier_work_runs(gpu, now, &next)) {
            request(gpu);
            next = now + ANSWER_PATIENCE;
        }
        break;
    case REQUESTED: next = requested_step(gpu, now); break;
    case PAGING_IN:
        if (!moving) next = paging_in_step(gpu, now);
        break;
    case HELD: next = held_step(gpu, now); break;
    case SHUTTING: next = shutting_step(gpu, now); break;
    }
    if (moving_next < next) next = moving_next;
    uint64_t freeing_next = block_cache_step(gpu, now, !lease_device_quiet(gpu, now));
    return next < freeing_next ? next : freeing_next;
}

RESET_IN_CHILD(lease_reset);
void lease_reset(void) {
    memset(leases, 0, sizeof leases);
}
