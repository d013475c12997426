/* The pace of a lease: an upper bound of the GPU work that is queued and not done, so that the queue drains soon after
   a REVOKE, however far ahead the program launches. The agent gives it in nanoseconds; here it becomes a window, a
   number of launches, which follows from the time that launches are seen to take. All streams and threads of a GPU
   share one window. An event behind every few launches (a mark) says how far each stream has come.

   While a pace is set no launch takes the fast path. Locks: the turn of captures.h, then contexts_lock, then the pace's
   own, under which events are recorded and queried; nothing waits for the device but pace_wait, which holds no lock
   meanwhile. */
#pragma once

#include "contexts/lanes.h"

/* A lease begins: what was launched before has been done. Background thread, before it opens the gate. */
void pace_begin(struct gpu *gpu, uint64_t nanoseconds);

/* The lease that is held has another pace, 0: none. Background thread. */
void pace_set(struct gpu *gpu, uint64_t nanoseconds);

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

/* With contexts_lock held; they take the pace's lock, and make driver calls. */
void pace_stream_ends(CUstream stream);    /* it is about to be destroyed; work in it goes on */
void pace_context_ends(CUcontext context); /* it may be destroyed, and is still there */
void pace_context_gone(CUcontext context); /* and its events with it */

void pace_prepare(void); /* once per process, before the first launch */
