#include "lease/observing.h"

#include <string.h>

#include "gate/gate.h"
#include "lease/burst.h"
#include "lease/unseen.h"
#include "platform/frames.h"
#include "platform/session_socket.h"

/* A GPU that is quiet for so long is not looked at any more: the next launch wakes the background thread. */
#define QUIET_REST (1 * SECOND)

static bool observed[MAX_GPUS];

static void tell(const struct gpu *gpu, enum frame_type type, uint64_t busy, uint64_t quiet) {
    struct frame frame = {.type = (uint16_t)type, .f = {0, busy, quiet}}; /* of no lease */
    memcpy(frame.gpu, gpu->uuid.bytes, 16);
    session_socket_send(&frame);
}

void observing_begin(struct gpu *gpu) {
    observed[gpu->index] = true;
    burst_watch_begins(gpu);
    unseen_begin(gpu);
    gate_open(gpu);
}

void observing_end(struct gpu *gpu) {
    observed[gpu->index] = false;
    gate_open(gpu);
}

static uint64_t look(struct gpu *gpu, uint64_t now) {
    uint64_t next = UINT64_MAX;
    switch (burst_step(gpu, now, &next)) {
    case BURST_BEGAN: tell(gpu, FRAME_BUSY, 0, 0); break;
    case BURST_ENDED: tell(gpu, FRAME_IDLE, burst_busy_time(gpu), burst_quiet_time(gpu, now)); break;
    case BURST_SAME: break;
    }
    return next;
}

uint64_t observing_step(struct gpu *gpu, uint64_t now) {
    uint64_t unseen_next = UINT64_MAX, next;
    if (!observed[gpu->index] || atomic_load(&gpu->open) == GATE_RESTING) return UINT64_MAX;
    if (unseen_found(gpu, now, &unseen_next)) {
        burst_goes_on(gpu, now);
        tell(gpu, FRAME_BUSY, 0, 0);
    }
    if (unseen_next != UINT64_MAX) return unseen_next;
    next = look(gpu, now);
    if (burst_quiet_time(gpu, now) < QUIET_REST) return next;
    gate_rest(gpu);
    next = look(gpu, now); /* a launch came before the gate rested */
    if (burst_quiet_time(gpu, now) >= QUIET_REST) return UINT64_MAX;
    gate_open(gpu);
    return next;
}

void observing_forget(void) {
    memset(observed, 0, sizeof observed);
}
