/* Whether the device is quiet: an event in each stream that has had work, queried later. Only for the background
   thread, with no lock held. Each takes contexts_lock, and the first the turn of captures.h before it; the driver is
   asked without waiting for the device. */
#pragma once

#include "driver/gpus.h"

/* Put an event behind the work of each active stream. False: not now, a stream is being captured, or a context that has
 * work is being destroyed. */
bool marks_record(struct gpu *gpu);

/* Whether all of that work, and that of destroyed streams, is done. */
bool marks_passed(struct gpu *gpu);
