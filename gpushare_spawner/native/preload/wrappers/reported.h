/* What is shown as a GPU's memory. */
#pragma once

#include "driver/gpus.h"

/* Bytes shown as free and as total; false where the real figures are to be shown. */
bool reported_memory(struct gpu *gpu, uint64_t really_free, uint64_t *available, uint64_t *total);
