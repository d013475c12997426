#include "lease/suspension.h"

#include <string.h>

#include "contexts/captures.h"
#include "contexts/contexts.h"
#include "driver/gpus.h"
#include "gate/gate.h"
#include "gate/launch.h"
#include "lease/bursts.h"
#include "lease/lease.h"
#include "memory/account.h"
#include "memory/ties.h"
#include "platform/wake.h"

/* The agent waits 1 s for the answer. Without other work on the machine calls end within milliseconds; after three
   answers that it is not ready a process that waits for its memory has waited 14 s. */
#define READY_PATIENCE (500 * MILLISECOND)
#define STEP           (MILLISECOND / 2)
/* The interval of polls for threads that the driver blocks. */
#define BLOCKED_INTERVAL (20 * MILLISECOND)

enum phase {
    RUNNING,
    EMPTYING,  /* waiting until no thread is inside a driver call */
    DRAINING,  /* waiting for the marks behind the work of all streams */
    SUSPENDED, /* SUSPEND_READY was sent */
    UNCERTAIN, /* suspended when the connection ended: the process may run, or be blocked by the driver */
};

static struct {
    enum phase phase;
    uint64_t number;
    uint64_t deadline;
    struct gpu *blocked; /* the GPU with an additional waiter for a thread blocked by the driver; NULL: none */
} suspension;

static struct gpu *first_shared_gpu(void) {
    for (int i = 0; i < gpu_count; i++)
        if (atomic_load(&gpus[i].shared)) return &gpus[i];
    return &gpus[0];
}

static void release_threads(void) {
    atomic_store(&driver_suspension, SUSPENSION_NONE);
    futex_wake(&driver_suspension);
}

static void hold_threads(void) {
    atomic_store(&driver_suspension, SUSPENSION_ACTIVE);
    /* afterwards every thread also sees the suspension or is seen inside */
    for (int i = 0; i < gpu_count; i++) gate_shut(&gpus[i]);
}

static void end(void) {
    bool uncertain = suspension.phase == UNCERTAIN || suspension.blocked;
    if (suspension.blocked) atomic_fetch_sub(&suspension.blocked->waiters, 1);
    suspension.blocked = NULL;
    suspension.phase = RUNNING;
    atomic_store(&driver_suspension_of_background, false);
    release_threads();
    for (int i = 0; i < gpu_count; i++) lease_resume(&gpus[i], uncertain);
}

static uint64_t managed_bytes(void) {
    uint64_t bytes = ties_count(TIE_MANAGED).bytes;
    for (int i = 0; i < gpu_count; i++) bytes += atomic_load(&gpus[i].managed);
    return bytes;
}

static void send_ready(uint64_t number, bool ready) {
    uint64_t managed = managed_bytes(), opened = ties_count(TIE_OPENED).number;
    uint64_t exported = ties_count(TIE_EXPORTED).number, all = 0;
    for (int i = 0; i < gpu_count; i++) all += account_used(&gpus[i]);
    ready = ready && !managed && !opened && !exported;
    struct frame frame = {.type = FRAME_SUSPEND_READY,
                          .f = {number, managed, opened, exported, (uint64_t)atomic_load(&contexts_count), ready,
                                all > managed ? all - managed : 0}};
    frame_socket_send(&frame_socket_agent, &frame);
    log_line(LOG_DEBUG, "suspension %llu: %s", (unsigned long long)number, ready ? "ready" : "not now");
    if (ready)
        suspension.phase = SUSPENDED;
    else
        end();
}

/* Count as a waiter, like the threads at the gate, a thread that entered the driver before the threads were held. */
static void check_for_blocked(void) {
    if (suspension.blocked || !launch_inside(NULL)) return;
    suspension.blocked = first_shared_gpu();
    atomic_fetch_add(&suspension.blocked->waiters, 1);
}

void suspension_requested(const struct frame *frame) {
    bool was_suspended = suspension.phase >= SUSPENDED;
    suspension.number = frame->f[SUSPEND_NUMBER];
    hold_threads();
    if (was_suspended) { /* no driver call is possible */
        send_ready(suspension.number, true);
        check_for_blocked();
        return;
    }
    for (int i = 0; i < gpu_count; i++) {
        if (lease_is_none(&gpus[i])) continue;
        send_ready(suspension.number, false);
        return;
    }
    suspension.phase = EMPTYING;
    suspension.deadline = clock_now() + READY_PATIENCE;
}

void suspension_resumed(const struct frame *frame) {
    if (suspension.phase == UNCERTAIN || (suspension.phase != RUNNING && frame->f[RESUMED_NUMBER] == suspension.number))
        end();
}

void suspension_lease_granted(void) {
    if (suspension.phase != RUNNING) end();
}

void suspension_connected(bool capable) {
    if (suspension.phase != UNCERTAIN) return;
    if (!capable) {
        end();
        return;
    }
    suspension.number = 0;
    send_ready(0, true);
    suspension.phase = UNCERTAIN;
}

void suspension_disconnected(void) {
    if (suspension.phase < SUSPENDED) {
        if (suspension.phase != RUNNING) end();
        return;
    }
    suspension.phase = UNCERTAIN;
    release_threads(); /* the driver blocks them if the process is checkpointed */
}

/* Whether no thread is inside a driver call or records a graph. */
static bool empty(void) {
    return !launch_inside(NULL) && !captures_in_progress();
}

/* Record marks behind all work. False: not possible now. */
static bool all_marked(void) {
    bool all = true;
    for (int i = 0; i < gpu_count && all; i++) all = bursts_record_marks(&gpus[i]);
    return all;
}

static bool all_passed(void) {
    bool all = true;
    for (int i = 0; i < gpu_count && all; i++) all = bursts_marks_passed(&gpus[i]);
    return all;
}

uint64_t suspension_step(uint64_t now) {
    switch (suspension.phase) {
    case RUNNING:
    case SUSPENDED: return UINT64_MAX;
    case UNCERTAIN: check_for_blocked(); return suspension.blocked ? UINT64_MAX : now + BLOCKED_INTERVAL;
    case EMPTYING:
        if (!empty() || !all_marked()) break;
        suspension.phase = DRAINING;
        /* fall through */
    case DRAINING:
        if (!all_passed()) break;
        for (int i = 0; i < gpu_count; i++) account_used(&gpus[i]); /* the last query of the driver's figures */
        atomic_store(&driver_suspension_of_background, true);
        send_ready(suspension.number, true);
        return now;
    }
    if (now < suspension.deadline) return now + STEP;
    send_ready(suspension.number, false);
    return now;
}

void suspension_exit(void) {
    if (!atomic_load(&driver_suspension_of_background)) return;
    atomic_fetch_add(&first_shared_gpu()->waiters, 1);
    release_threads();
    wake_up();
}

RESET_IN_CHILD(suspension_reset);
void suspension_reset(void) {
    memset(&suspension, 0, sizeof suspension);
}
