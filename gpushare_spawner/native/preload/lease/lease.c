#include "lease/lease.h"

#include <string.h>

#include "memory/block_cache.h"
#include "lease/burst.h"
#include "lease/marks.h"
#include "lease/pager.h"
#include "lease/unseen.h"
#include "memory/account.h"
#include "platform/session_socket.h"
#include "gate/gate.h"
#include "gate/launch.h"
#include "gate/shortage.h"

/* docs/reference/protocol.md: after so long without an answer the work runs anyway. */
#define ANSWER_PATIENCE (30 * SECOND)
/* A lease that is not used for this long is returned. */
#define QUIET_RELEASE (1 * SECOND)
/* Work that does not end while the program's own threads wait at the gate may be waiting for them: the gate is opened
   for a moment, and shut again. How long that takes: pace_patience. */
#define DEADLOCK_MOMENT (50 * MILLISECOND)
#define STEP            MILLISECOND

enum lease_state {
    WITHOUT_AGENT, /* open */
    NONE,          /* shut, nobody waits */
    ASKED,         /* REQUEST sent */
    PAGING_IN,     /* granted; the gate opens when the memory is there */
    HELD,          /* open */
    SHUTTING,      /* shut; waiting until the device is quiet */
};

static struct lease {
    enum lease_state state;
    uint64_t id, last_id;
    uint64_t asked_at;
    uint64_t bursts;
    uint64_t page_in;
    uint64_t pace; /* nanoseconds of queued work, 0: no bound */
    uint64_t shut_at, reopened_until;
    uint64_t page_out; /* after the release that is under way */
    uint32_t reason;
    bool marked; /* the marks are recorded that SHUTTING waits for */
    bool paging_out;
    uint64_t paging_out_for; /* the lease id to name in PAGED_OUT */
    uint64_t page_out_next;  /* asked for while another page-out is in progress */
    uint32_t shortages;      /* calls that lacked memory, up to the last REQUEST */
} leases[MAX_GPUS];

static struct lease *lease_of(const struct gpu *gpu) {
    return &leases[gpu->index];
}

static void tell(const struct gpu *gpu, enum frame_type type, uint64_t f0, uint64_t f1, uint64_t f2) {
    struct frame frame = {.type = (uint16_t)type, .f = {f0, f1, f2}};
    memcpy(frame.gpu, gpu->uuid.bytes, 16);
    session_socket_send(&frame);
}

void leases_forget(void) {
    memset(leases, 0, sizeof leases);
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
    unseen_begin(gpu);
}

static void ask(struct gpu *gpu) {
    struct lease *lease = lease_of(gpu);
    lease->state = ASKED;
    lease->asked_at = clock_now();
    struct account_figures memory = account_told(gpu);
    lease->shortages = atomic_load(&gpu->shortages);
    struct frame frame = {.type = FRAME_REQUEST, .f = {memory.managed, memory.plain, ++lease->bursts, memory.short_of}};
    memcpy(frame.gpu, gpu->uuid.bytes, 16);
    session_socket_send(&frame);
}

static void begin_page_out(struct gpu *gpu, uint64_t bytes, uint64_t for_lease) {
    struct lease *lease = lease_of(gpu);
    if (lease->paging_out) { /* each request has an answer of its own */
        if (bytes > lease->page_out_next) lease->page_out_next = bytes;
        return;
    }
    lease->paging_out = true;
    lease->paging_out_for = for_lease;
    block_cache_give_back(gpu);
    pager_start(gpu, false, bytes);
}

/* Step a page-out. False: it goes on. */
static bool page_out_done(struct gpu *gpu) {
    struct lease *lease = lease_of(gpu);
    struct pager_result moved;
    if (!lease->paging_out) return true;
    if (!pager_step(gpu, &moved)) return false;
    lease->paging_out = false;
    tell(gpu, FRAME_PAGED_OUT, moved.bytes, moved.nanoseconds, lease->paging_out_for);
    if (!lease->page_out_next) return true;
    uint64_t bytes = lease->page_out_next;
    lease->page_out_next = 0;
    if (lease->state != NONE && lease->state != ASKED) { /* it holds a lease by now */
        tell(gpu, FRAME_PAGED_OUT, 0, 0, 0);
        return true;
    }
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
    if (frame->f[0] == 0) { /* still waiting, and not forgotten */
        lease->asked_at = clock_now();
        if (frame->f[4]) shortage_refused(gpu);
        return;
    }
    if (lease->state == WITHOUT_AGENT) return;
    if (frame->f[0] == lease->last_id) return; /* its pace: crossed with our giving it back */
    lease->id = frame->f[0];
    lease->pace = frame->f[3];
    if (lease->state == HELD) {
        pace_set(gpu, lease->pace);
        return;
    }
    if (lease->state == SHUTTING) {
        /* crossed with our giving back: what is under way is finished, for the new lease */
        return;
    }
    log_line(LOG_DEBUG, "GPU %d: lease %llu, %llu bytes to page in", gpu->index, (unsigned long long)lease->id,
             (unsigned long long)frame->f[2]);
    lease->page_in = frame->f[2];
    if (lease->page_in) {
        lease->state = PAGING_IN;
        pager_cut(gpu); /* a page-out in progress ends first; then lease_step begins */
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
    if (frame->f[0] != lease->id || lease->state == WITHOUT_AGENT || lease->state == NONE || lease->state == ASKED) {
        /* crossed with our giving the lease back; the memory is wanted all the same */
        if (frame->f[1] && frame->f[0] == lease->last_id && (lease->state == NONE || lease->state == ASKED))
            begin_page_out(gpu, frame->f[1], frame->f[0]);
        return;
    }
    log_line(LOG_DEBUG, "GPU %d: lease %llu revoked, %llu bytes to page out", gpu->index,
             (unsigned long long)frame->f[0], (unsigned long long)frame->f[1]);
    if (lease->state == SHUTTING) {
        lease->reason = RELEASE_REVOKED;
        lease->page_out = frame->f[1];
        return;
    }
    pager_cut(gpu); /* PAGING_IN */
    shut(gpu, RELEASE_REVOKED, frame->f[1]);
}

void lease_page_out(struct gpu *gpu, const struct frame *frame) {
    struct lease *lease = lease_of(gpu);
    if (lease->state == NONE || lease->state == ASKED)
        begin_page_out(gpu, frame->f[0], 0);
    else
        tell(gpu, FRAME_PAGED_OUT, 0, 0, 0); /* it holds a lease by now */
}

static void release(struct gpu *gpu) {
    struct lease *lease = lease_of(gpu);
    tell(gpu, FRAME_RELEASE, lease->id, burst_busy_time(gpu), lease->reason);
    lease->last_id = lease->id;
    lease->id = 0;
    lease->state = NONE;
    if (lease->reason == RELEASE_IDLE) block_cache_give_back(gpu);
    if (lease->page_out) begin_page_out(gpu, lease->page_out, lease->last_id);
}

static uint64_t shutting_step(struct gpu *gpu, uint64_t now) {
    struct lease *lease = lease_of(gpu);
    struct pager_result moved;
    if (!pager_step(gpu, &moved)) return now + STEP; /* a page-in that was cut short */
    if (lease->reopened_until) {
        if (now < lease->reopened_until) return lease->reopened_until;
        shut(gpu, lease->reason, lease->page_out);
    }
    if (!lease->marked) {
        if (launch_inside(gpu) || !marks_record(gpu)) goto later;
        lease->marked = true;
    }
    if (marks_passed(gpu)) {
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
    switch (burst_step(gpu, now, &next)) {
    case BURST_BEGAN: tell(gpu, FRAME_BUSY, lease->id, 0, 0); break;
    case BURST_ENDED: tell(gpu, FRAME_IDLE, lease->id, burst_busy_time(gpu), burst_quiet_time(gpu, now)); break;
    case BURST_SAME: break;
    }
    /* memory that is missing comes with another lease: the agent may have to suspend others first */
    bool short_of_memory = atomic_load(&gpu->short_of) && atomic_load(&gpu->shortages) != leases[gpu->index].shortages;
    if (short_of_memory || burst_quiet_time(gpu, now) >= QUIET_RELEASE) {
        shut(gpu, RELEASE_IDLE, 0);
        return now;
    }
    return next;
}

bool lease_device_quiet(const struct gpu *gpu, uint64_t now) {
    const struct lease *lease = &leases[gpu->index];
    if (lease->state == HELD) return burst_quiet_time(gpu, now) > 0;
    return lease->state != SHUTTING && !atomic_load(&gpu->open);
}

bool lease_is_none(const struct gpu *gpu) {
    enum lease_state state = leases[gpu->index].state;
    return state == WITHOUT_AGENT || state == NONE || state == ASKED;
}

void lease_resume(struct gpu *gpu, bool unseen) {
    if (lease_of(gpu)->state == WITHOUT_AGENT)
        gate_open(gpu);
    else if (unseen)
        unseen_begin(gpu);
}

uint64_t lease_step(struct gpu *gpu) {
    struct lease *lease = lease_of(gpu);
    struct pager_result moved;
    uint64_t now = clock_now();
    bool moving = lease->paging_out && !page_out_done(gpu);
    uint64_t moving_next = moving ? now + STEP : UINT64_MAX, next = UINT64_MAX;

    switch (lease->state) {
    case WITHOUT_AGENT: break;
    case NONE:
        if (atomic_load(&gpu->waiters) || unseen_found(gpu, now, &next)) {
            ask(gpu);
            next = now + ANSWER_PATIENCE;
        }
        break;
    case ASKED:
        if (atomic_load(&gpu->open)) break; /* patience is over already */
        next = lease->asked_at + ANSWER_PATIENCE;
        if (now >= next) {
            log_line(LOG_ERROR, "the agent has not answered for %d s; work on GPU %d continues without a lease",
                     (int)(ANSWER_PATIENCE / SECOND), gpu->index);
            pace_begin(gpu, 0);
            gate_open(gpu);
            next = UINT64_MAX;
        }
        break;
    case PAGING_IN:
        if (moving) break;
        next = now + STEP;
        if (lease->page_in) { /* not begun yet */
            uint64_t bytes = lease->page_in;
            lease->page_in = 0;
            pager_start(gpu, true, bytes);
        }
        if (pager_step(gpu, &moved)) {
            tell(gpu, FRAME_PAGED_IN, moved.bytes, moved.nanoseconds, 0);
            hold(gpu);
            next = now;
        } else {
            atomic_fetch_add(&gpu->progress, 1);
        }
        break;
    case HELD: next = held_step(gpu, now); break;
    case SHUTTING: next = shutting_step(gpu, now); break;
    }
    if (moving_next < next) next = moving_next;
    uint64_t freeing_next = block_cache_step(gpu, now, !lease_device_quiet(gpu, now));
    return next < freeing_next ? next : freeing_next;
}
