/* Device memory served by managed memory, so that it can leave the GPU. */
#pragma once

#include "contexts/captures.h"
#include "driver/driver.h"
#include "driver/gpus.h"

HIDDEN _Atomic bool conversion_on; /* the agent says so, and the user has not switched it off */

/* Whether allocations on this GPU are to be converted: the GPU can, and it is one of the session's. */
static inline bool conversion_wanted(const struct gpu *gpu) {
    return atomic_load_explicit(&conversion_on, memory_order_relaxed) && gpu->can_manage &&
           atomic_load_explicit(&gpu->shared, memory_order_relaxed);
}

/* Read GPUSHARE_MANAGED and the engine, at cuInit. No lock; the same for conversion_set, which the background thread
 * calls. */
void conversion_prepare(void);

/* Managed memory that prefers the GPU. Calls the driver. Inline: each allocation would pay for the call. */
static inline CUresult conversion_allocate(const struct gpu *gpu, CUdeviceptr *out, size_t bytes) {
    CUresult result = real.cuMemAllocManaged(out, bytes, CU_MEM_ATTACH_GLOBAL);
    if (result != CUDA_SUCCESS || captures_in_progress()) return result;
    /* Pages that were moved to the host come back when they are used, and stay. A driver that takes no advice takes
     * none. */
    if (driver_has(cuMemAdvise))
        real.cuMemAdvise(*out, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, gpu->device);
    else if (driver_has(cuMemAdvise_v2))
        real.cuMemAdvise_v2(*out, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                            (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, gpu->device});
    return result;
}

/* What the agent's WELCOME said. */
void conversion_set(bool oversubscribed);
