/* Stream capture: calls that are recorded into a graph are no work, and must be neither held up nor disturbed. */
#pragma once

#include <stdatomic.h>

#include "platform/common.h"

extern _Atomic int captures;           /* under way in this process */
extern _Atomic uint32_t captures_news; /* changes whenever a stream may have begun to be captured */

static inline bool captures_in_progress(void) {
    return atomic_load_explicit(&captures, memory_order_relaxed) > 0;
}

/* For the background thread: while it holds the turn, no thread begins a capture. */
void captures_hold_off(void);
void captures_let_on(void);

/* A stream is about to be destroyed: true if it was being captured. And if it could not be destroyed. */
bool capture_forget(CUstream stream);
void capture_remember(CUstream stream);
void captures_of_context_gone(CUcontext context);

/* Whether work put into `stream` is recorded now instead of being done. */
bool is_capturing(CUstream stream);

void captures_forget(void); /* in a forked child */
