/* What the program is told about memory. */
#pragma once

#include "driver/gpus.h"

/* Bytes reported as free, as total, and as used by the session's processes, at most the total; false where the real
   figures are to be reported. Any thread, no lock. */
bool reported_memory(struct gpu *gpu, uint64_t really_free, uint64_t *available, uint64_t *total, uint64_t *used);
