/* Stream capture: calls that are recorded into a graph are no work, and must be neither held up nor disturbed.

   Functions without a word about locks take one of this file's own, for moments, and may be called with any other held.
 */
#pragma once

#include <stdatomic.h>

#include "driver/cuda_abi.h"
#include "platform/common.h"

struct gpu;

HIDDEN _Atomic int captures;           /* under way in this process */
HIDDEN _Atomic uint32_t captures_news; /* changes whenever a stream may have begun to be captured */

static inline bool captures_in_progress(void) {
    return atomic_load_explicit(&captures, memory_order_relaxed) > 0;
}

/* Who is told of each GPU whenever a capture begins or ends. Set once by init.c, before the first capture. It is called
   by the thread that begins or ends it, also with the turn held. */
void captures_on_change(void (*call)(struct gpu *gpu));

/* The turn: while a thread holds it, no other thread begins a capture. Taken before contexts_lock and all other locks.
 */
void captures_hold_off(void);
void captures_let_on(void);

/* Around a call that begins a capture. capture_begin takes the turn, and counts the capture before the driver knows of
   it, so that no launch of the captured stream takes the fast path; capture_begun lets the turn go. */
CUcontext capture_begin(CUstream stream);
void capture_begun(CUstream stream, CUcontext context, bool begun);

/* The capture in this stream is over. */
void capture_end(CUstream stream);

/* A stream that waits for an event of a captured one is captured from then on. */
void captures_spread(void);

/* A stream is about to be destroyed: true if it was being captured. And if it could not be destroyed. */
bool capture_forget(CUstream stream);
void capture_remember(CUstream stream);
void captures_of_context_gone(CUcontext context);

/* Whether work put into `stream` is recorded now instead of being done. */
bool capture_records(CUstream stream);

void captures_forget(void); /* in a forked child */
