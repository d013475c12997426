/* The pace of a lease is an upper bound of the GPU work that is queued and not done, so that the queue drains soon
   after a REVOKE, however far ahead the program launches. The agent sets it in nanoseconds. This file converts it into
   a window, a number of launches, by the measured time of launches. All streams and threads of a GPU share one window.
   An event behind every few launches (a mark) shows the progress of each stream.

   While a pace is set, no launch takes the fast path. Locks: captures_lock, then contexts_lock, then the pace's own
   lock, under which events are recorded and queried. Only pace_wait waits for the device; it holds no lock while it
   waits. */
#pragma once

#include "contexts/lanes.h"

/* Begin a lease after all earlier launches are done. Background thread, before it opens the gate. */
void pace_begin(struct gpu *gpu, uint64_t nanoseconds);

/* Change the pace of the current lease; 0: no pace. Background thread. */
void pace_set(struct gpu *gpu, uint64_t nanoseconds);

/* Nanoseconds without progress of queued work, while threads wait to launch, after which a deadlock is assumed. */
uint64_t pace_patience(const struct gpu *gpu);

/* Let a few additional launches through, because the queued work may wait for them. */
void pace_relax(struct gpu *gpu);

/* Whether a launch into the lane may pass; it is then counted until pace_left. `through`: it passes even if the window
   is full. Takes a lock only at a lane's first launch. */
bool pace_admits(struct passage *passage, struct lane *lane, bool through);

/* Wait until the window has room, the gate is shut, the pace has ended, or a signal interrupts the wait (returns true).
   Records and queries events. */
bool pace_wait(struct gpu *gpu, struct lane *lane);

/* Record that an admitted launch has been made. May record and query events. */
void pace_left(struct passage *passage);

/* Called with contexts_lock held. They take the pace's lock and make driver calls. */
void pace_stream_ends(CUstream stream);         /* before the stream is destroyed; its work continues */
void pace_context_ends(CUcontext context);      /* before a call that may destroy it */
void pace_context_destroyed(CUcontext context); /* with its events */
