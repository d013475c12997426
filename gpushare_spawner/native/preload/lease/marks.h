/* Whether the device is quiet: an event in each stream that has had work, queried later. Only for the background
 * thread. */
#pragma once

#include "driver/gpus.h"

/* Put an event behind the work of each active stream. False: not now, a stream is being captured, or a context that has
 * work is being destroyed. */
bool marks_record(struct gpu *gpu);

/* Whether all of that work, and that of destroyed streams, is done. */
bool marks_passed(struct gpu *gpu);
