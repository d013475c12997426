/* Device memory served by managed memory, so that it can leave the GPU. */
#pragma once

#include "driver/driver.h"
#include "driver/gpus.h"

extern _Atomic bool conversion_on; /* the agent says so, and the user has not switched it off */

/* Whether allocations on this GPU are to be converted: the GPU can, and it is one of the session's. */
static inline bool conversion_wanted(const struct gpu *gpu) {
    return atomic_load_explicit(&conversion_on, memory_order_relaxed) && gpu->can_manage &&
           atomic_load_explicit(&gpu->shared, memory_order_relaxed);
}

/* Read GPUSHARE_MANAGED, at cuInit. */
void conversion_prepare(void);

/* Managed memory that prefers the GPU. */
CUresult conversion_allocate(const struct gpu *gpu, CUdeviceptr *out, size_t bytes);

/* What the agent's WELCOME said. */
void conversion_set(bool oversubscribed);
