/* Stream capture: a call that is recorded into a graph is not work, and must be neither delayed nor disturbed.
   gate/launch.c lets such a call pass (is_recorded); gate/gate.c closes the fast path while a capture is in progress.

   Unless stated otherwise, functions take a lock of this file briefly and may be called with any other lock held. */
#pragma once

#include "driver/driver.h"

struct gpu;

HIDDEN _Atomic int captures;              /* in progress in this process */
HIDDEN _Atomic uint32_t captures_version; /* changes whenever the capture of a stream may have begun */

static inline bool captures_in_progress(void) {
    return atomic_load_explicit(&captures, memory_order_relaxed) > 0;
}

/* Set the function to call for each GPU whenever a capture begins or ends. The thread that begins or ends the capture
   calls it, possibly with captures_lock held. Called once, by init.c, before the first capture. */
void captures_on_change(void (*call)(struct gpu *gpu));

/* While a thread holds this lock, no other thread begins a capture. Taken before contexts_lock and all other locks. */
void captures_lock(void);
void captures_unlock(void);

/* Called before and after a call that begins a capture. capture_begin takes captures_lock and counts the capture before
   the driver begins it, so that no launch into the captured stream takes the fast path; capture_begun releases the
   lock. */
CUcontext capture_begin(CUstream stream);
void capture_begun(CUstream stream, CUcontext context, bool begun);

/* Remove a capture that has ended. */
void capture_end(CUstream stream);

/* Make each lane query the driver again: a stream that waits for an event of a captured stream becomes captured. */
void captures_spread(void);

/* Remove the capture of a stream that is about to be destroyed. Returns true if it was being captured. The second
   function adds the capture again if the stream could not be destroyed. */
bool capture_remove(CUstream stream);
void capture_restore(CUstream stream);
/* Remove the captures of a destroyed context. */
void captures_remove_context(CUcontext context);

/* Whether work put into `stream` is now recorded instead of executed. Queries the driver. */
bool capture_records(CUstream stream);
