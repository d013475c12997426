#include "lease/suspending.h"

#include <string.h>

#include "contexts/captures.h"
#include "contexts/contexts.h"
#include "driver/gpus.h"
#include "driver/suspension.h"
#include "gate/gate.h"
#include "gate/launch.h"
#include "lease/lease.h"
#include "lease/marks.h"
#include "memory/account.h"
#include "memory/ties.h"
#include "platform/futex.h"
#include "platform/session_socket.h"
#include "platform/wake.h"

/* The agent takes the process for not ready after 100 ms. */
#define READY_PATIENCE (60 * MILLISECOND)
#define STEP           (MILLISECOND / 2)
/* How often to look for threads that the driver blocks. */
#define BLOCKED_INTERVAL (20 * MILLISECOND)

enum phase {
    RUNNING,
    EMPTYING,  /* threads inside driver calls are waited for */
    DRAINING,  /* marks are recorded behind the work of all streams */
    SUSPENDED, /* SUSPEND_READY was sent */
    UNCERTAIN, /* suspended when the connection ended: the process may run, or be blocked by the driver */
};

static struct {
    enum phase phase;
    uint64_t number;
    uint64_t deadline;
    struct gpu *blocked; /* counts as one for which a thread waits: the driver blocks it; NULL: none is known */
} suspending;

static struct gpu *first_shared_gpu(void) {
    for (int i = 0; i < gpu_count; i++)
        if (atomic_load(&gpus[i].shared)) return &gpus[i];
    return &gpus[0];
}

static void let_threads_go(void) {
    atomic_store(&suspension_of_threads, SUSPENSION_OVER);
    futex_wake(&suspension_of_threads);
}

static void hold_threads(void) {
    atomic_store(&suspension_of_threads, SUSPENSION_WAITS);
    /* this also makes every thread see the line above, or be seen inside */
    for (int i = 0; i < gpu_count; i++) gate_shut(&gpus[i]);
}

static void over(void) {
    bool uncertain = suspending.phase == UNCERTAIN || suspending.blocked;
    if (suspending.blocked) atomic_fetch_sub(&suspending.blocked->waiters, 1);
    suspending.blocked = NULL;
    suspending.phase = RUNNING;
    atomic_store(&suspension_of_background, false);
    let_threads_go();
    for (int i = 0; i < gpu_count; i++) lease_resume(&gpus[i], uncertain);
}

static uint64_t managed_bytes(void) {
    uint64_t bytes = ties_count(TIE_MANAGED).bytes;
    for (int i = 0; i < gpu_count; i++) bytes += atomic_load(&gpus[i].managed);
    return bytes;
}

static void answer(uint64_t number, bool ready) {
    uint64_t managed = managed_bytes(), opened = ties_count(TIE_OPENED).number;
    uint64_t exported = ties_count(TIE_EXPORTED).number, all = 0;
    for (int i = 0; i < gpu_count; i++) all += account_used(&gpus[i]);
    ready = ready && !managed && !opened && !exported;
    struct frame frame = {.type = FRAME_SUSPEND_READY,
                          .f = {number, managed, opened, exported, (uint64_t)atomic_load(&contexts_known), ready,
                                all > managed ? all - managed : 0}};
    session_socket_send(&frame);
    log_line(LOG_DEBUG, "suspension %llu: %s", (unsigned long long)number, ready ? "ready" : "not now");
    if (ready)
        suspending.phase = SUSPENDED;
    else
        over();
}

/* A thread that was in the driver before the threads were held waits for the agent as those at the gate do. */
static void look_for_blocked(void) {
    if (suspending.blocked || !launch_inside(NULL)) return;
    suspending.blocked = first_shared_gpu();
    atomic_fetch_add(&suspending.blocked->waiters, 1);
}

void suspending_asked(const struct frame *frame) {
    bool was_suspended = suspending.phase >= SUSPENDED;
    suspending.number = frame->f[0];
    hold_threads();
    if (was_suspended) { /* it stays so: no driver call */
        answer(suspending.number, true);
        look_for_blocked();
        return;
    }
    for (int i = 0; i < gpu_count; i++) {
        if (lease_is_none(&gpus[i])) continue;
        answer(suspending.number, false);
        return;
    }
    suspending.phase = EMPTYING;
    suspending.deadline = clock_now() + READY_PATIENCE;
}

void suspending_resumed(const struct frame *frame) {
    if (suspending.phase == UNCERTAIN || (suspending.phase != RUNNING && frame->f[0] == suspending.number)) over();
}

void suspending_granted(void) {
    if (suspending.phase != RUNNING) over();
}

void suspending_greeted(bool capable) {
    if (suspending.phase != UNCERTAIN) return;
    if (!capable) {
        over();
        return;
    }
    suspending.number = 0;
    answer(0, true);
    suspending.phase = UNCERTAIN;
}

void suspending_without_agent(void) {
    if (suspending.phase < SUSPENDED) {
        if (suspending.phase != RUNNING) over();
        return;
    }
    suspending.phase = UNCERTAIN;
    let_threads_go(); /* into the driver, which blocks them if the process is checkpointed */
}

/* Whether no thread is inside a driver call and none records a graph. */
static bool empty(void) {
    return !launch_inside(NULL) && !captures_in_progress();
}

/* True: marks are behind all work; all work is done. */
static bool all_marked(void) {
    bool all = true;
    for (int i = 0; i < gpu_count && all; i++) all = marks_record(&gpus[i]);
    return all;
}

static bool all_passed(void) {
    bool all = true;
    for (int i = 0; i < gpu_count && all; i++) all = marks_passed(&gpus[i]);
    return all;
}

uint64_t suspending_step(uint64_t now) {
    switch (suspending.phase) {
    case RUNNING:
    case SUSPENDED: return UINT64_MAX;
    case UNCERTAIN: look_for_blocked(); return suspending.blocked ? UINT64_MAX : now + BLOCKED_INTERVAL;
    case EMPTYING:
        if (!empty() || !all_marked()) break;
        suspending.phase = DRAINING;
        /* fall through */
    case DRAINING:
        if (!all_passed()) break;
        for (int i = 0; i < gpu_count; i++) account_used(&gpus[i]); /* the driver's figures are kept from now on */
        atomic_store(&suspension_of_background, true);
        answer(suspending.number, true);
        return now;
    }
    if (now < suspending.deadline) return now + STEP;
    answer(suspending.number, false);
    return now;
}

void suspending_exit(void) {
    if (!atomic_load(&suspension_of_background)) return;
    atomic_fetch_add(&first_shared_gpu()->waiters, 1);
    let_threads_go();
    wake_up();
}

void suspending_forget(void) {
    memset(&suspending, 0, sizeof suspending);
    atomic_store(&suspension_of_threads, SUSPENSION_OVER);
    atomic_store(&suspension_of_background, false);
}
