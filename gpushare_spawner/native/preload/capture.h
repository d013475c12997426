/* Stream capture: calls that are recorded into a graph are no work, and must be neither held up nor disturbed. */
#pragma once

#include "common.h"

bool captures_in_progress(void);

/* For the background thread: while it holds the turn, no thread begins a capture. */
void captures_hold_off(void);
void captures_let_on(void);

/* Whether work put into `stream` is recorded now instead of being done. */
bool is_capturing(CUstream stream);

void captures_forget(void); /* in a forked child */
