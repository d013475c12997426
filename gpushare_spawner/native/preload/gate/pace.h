/* The pace of a lease: an upper bound of the GPU work that is queued and not done, so that the queue drains soon after
   a REVOKE, however far ahead the program launches. The agent gives it in nanoseconds; here it becomes a window, a
   number of launches, which follows from the measured time of launches. All streams and threads of a GPU share one
   window. An event behind every few launches (a mark) shows how far each stream has come.

   While a pace is set no launch takes the fast path. Locks: captures_lock, then contexts_lock, then the pace's own,
   under which events are recorded and queried. Only pace_wait waits for the device, and holds no lock meanwhile. */
#pragma once

#include "contexts/lanes.h"

/* Begin a lease: all earlier launches are done. Background thread, before it opens the gate. */
void pace_begin(struct gpu *gpu, uint64_t nanoseconds);

/* Change the pace of the present lease, 0: none. Background thread. */
void pace_set(struct gpu *gpu, uint64_t nanoseconds);

/* Nanoseconds without progress of queued work, while threads wait to launch, after which a deadlock is assumed. */
uint64_t pace_patience(const struct gpu *gpu);

/* Let a few more launches through: the queued work may wait for them. */
void pace_relax(struct gpu *gpu);

/* Whether a launch into the lane may pass; it is then counted until pace_left. `through`: it passes without room in the
   window. Takes a lock only at a lane's first launch. */
bool pace_admits(struct passage *passage, struct lane *lane, bool through);

/* Wait until the window has room, the gate is shut, the pace has ended, or a signal interrupts: then true. Records and
   queries events. */
bool pace_wait(struct gpu *gpu, struct lane *lane);

/* Record that an admitted launch has been made. May record and query events. */
void pace_left(struct passage *passage);

/* With contexts_lock held; they take the pace's lock, and make driver calls. */
void pace_stream_ends(CUstream stream);         /* before it is destroyed; its work continues */
void pace_context_ends(CUcontext context);      /* before a call that may destroy it */
void pace_context_destroyed(CUcontext context); /* with its events */
