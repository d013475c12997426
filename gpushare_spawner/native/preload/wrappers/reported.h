/* Memory figures for the program: a share looks like a whole GPU, and converted memory like device memory. */
#pragma once

#include "driver/gpus.h"

/* Compute the bytes to report as free, total, and used by the session's processes (at most the total). False: report
   the real figures. Any thread, no lock. */
bool reported_memory(struct gpu *gpu, uint64_t really_free, uint64_t *available, uint64_t *total, uint64_t *used);
