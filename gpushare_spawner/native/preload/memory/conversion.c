#include "memory/conversion.h"

#include <stdlib.h>
#include <string.h>

#include "contexts/captures.h"

_Atomic bool conversion_on;

static bool switched_off;

void conversion_prepare(void) {
    const char *setting = getenv("GPUSHARE_MANAGED");
    switched_off = setting && strcmp(setting, "0") == 0;
}

void conversion_set(bool wanted) {
    atomic_store(&conversion_on, wanted && !switched_off);
}

CUresult conversion_allocate(const struct gpu *gpu, CUdeviceptr *out, size_t bytes) {
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
