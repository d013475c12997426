/* The state of NVML in this process. NVML shows every GPU of the machine and ignores CUDA_VISIBLE_DEVICES. */
#ifndef SIMGPU_NVML_LIBRARY_H
#define SIMGPU_NVML_LIBRARY_H

#include "common/mig.h"
#include "nvml/nvml_api.h"

#define CUDA_VERSION 13000
#define DRIVER_TEXT  "580.65.06"

/* NULL before nvmlInit. */
struct state *nvml_state(void);

/* Return the number of a GPU or a MIG instance; -1 for any other handle. */
int nvml_number(nvmlDevice_t device);
nvmlDevice_t nvml_handle(int number);

/* Whether this is a GPU in MIG mode, for which many queries are possible only on its instances, or not at all. */
int nvml_divided(int number);

/* Find the place in mig_profiles of the profile with this id, with the checks of every call for a whole GPU.
 * NVML_ERROR_NOT_SUPPORTED if the GPU does not support MIG, NVML_ERROR_INVALID_ARGUMENT for any other id. */
nvmlReturn_t nvml_profile_by_id(nvmlDevice_t device, const void *out, unsigned id, int *profile);

/* Call `visit` for each number on which processes of a device can run: for a GPU in MIG mode, its instances. */
void nvml_visit(int number, void (*visit)(int number, void *data), void *data);

/* Return the percentage of the last second for which the GPU computed; in MIG mode, its compute slices. */
unsigned nvml_busy_percent(int gpu);

#define REQUIRE(condition, error)                                                                                      \
    do {                                                                                                               \
        if (!(condition)) return error;                                                                                \
    } while (0)

/* At the start of every call for a GPU or a MIG instance: check initialization, the handle, and the output pointer. */
#define REQUIRE_DEVICE(device, out)                                                                                    \
    do {                                                                                                               \
        REQUIRE(nvml_state(), NVML_ERROR_UNINITIALIZED);                                                               \
        REQUIRE(nvml_number(device) >= 0 && (out), NVML_ERROR_INVALID_ARGUMENT);                                       \
    } while (0)

/* At the start of every call that supports only whole GPUs. */
#define REQUIRE_GPU(device, out)                                                                                       \
    do {                                                                                                               \
        REQUIRE_DEVICE(device, out);                                                                                   \
        REQUIRE(!mig_is_instance(nvml_state(), nvml_number(device)), NVML_ERROR_NOT_SUPPORTED);                        \
    } while (0)

/* At the start of every call that supports neither instances nor a GPU in MIG mode. */
#define REQUIRE_UNDIVIDED(device, out)                                                                                 \
    do {                                                                                                               \
        REQUIRE_GPU(device, out);                                                                                      \
        REQUIRE(!nvml_divided(nvml_number(device)), NVML_ERROR_NOT_SUPPORTED);                                         \
    } while (0)

#endif
