/* The pace of a lease: an upper bound of the GPU work that is queued and not done, so that the queue drains soon after
   a REVOKE, however far ahead the program launches. The agent gives it in nanoseconds; here it becomes a window, a
   number of launches, which follows from the time that launches are seen to take. All streams and threads of a GPU
   share one window. An event behind every few launches (a mark) says how far each stream has come.

   While a pace is set no launch takes the fast path. */
#pragma once

#include <stdatomic.h>

#include "platform/common.h"

struct gpu;
struct lane;
struct passage;
struct pace;

#define PACE_MARKS 8

/* What the pace knows of a lane. */
struct lane_pace {
    _Atomic uint32_t generation; /* of the pace; another one's figures do not count */
    _Atomic uint32_t pending;    /* marks that have not passed */
    _Atomic uint64_t submitted;  /* launches that the driver has taken */
    _Atomic uint64_t marked;     /* of them, those with a mark behind them */
    uint64_t done;               /* of them, those behind which a mark has passed */
    uint32_t first;              /* the oldest mark */
    struct {
        CUevent event;
        uint64_t upto;
    } marks[PACE_MARKS];
    struct lane *next;
};

/* A lease begins: what was launched before has been done. Background thread, before it opens the gate. */
void pace_begin(struct gpu *gpu, uint64_t nanoseconds);

/* The lease that is held has another pace, 0: none. Background thread. */
void pace_set(struct gpu *gpu, uint64_t nanoseconds);

/* Whether launches must ask. */
bool pace_is_set(const struct gpu *gpu);

/* Nanoseconds that queued work may go without an end while threads wait to launch: more could be a deadlock. */
uint64_t pace_patience(const struct gpu *gpu);

/* Let a few more launches through, which may be what the queued work waits for. */
void pace_relax(struct gpu *gpu);

/* A launch into the lane: true if it may go, and is counted until pace_left. `through`: it goes, whatever the window
 * is. No lock but at a lane's first launch. */
bool pace_admits(struct passage *passage, struct lane *lane, bool through);

/* Wait until the window has room, the gate is shut, the pace is gone, or a signal has interrupted: then true. Not
 * inside the gate. Records and queries events. */
bool pace_wait(struct gpu *gpu, struct lane *lane);

/* The launch that was admitted has been made. May record and query events. */
void pace_left(struct passage *passage);

/* With contexts_lock held: the lane goes. */
enum lane_end {
    LANE_STREAM_ENDS,  /* its stream is about to be destroyed; work in it goes on */
    LANE_CONTEXT_ENDS, /* its context may be destroyed, and is still there */
    LANE_CONTEXT_GONE, /* and its events with it */
};
void pace_lane_gone(struct lane *lane, enum lane_end end);

/* With contexts_lock held: the context may be destroyed, and is still there. */
void pace_context_ends(CUcontext context);

void pace_prepare(void); /* once per process, before the first launch */
