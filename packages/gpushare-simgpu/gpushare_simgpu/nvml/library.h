/* The state of NVML in this process. NVML sees every GPU of the machine: CUDA_VISIBLE_DEVICES does not count here. */
#ifndef SIMGPU_NVML_LIBRARY_H
#define SIMGPU_NVML_LIBRARY_H

#include "common/mig.h"
#include "nvml/nvml_api.h"

#define CUDA_VERSION 13000
#define DRIVER_TEXT  "580.65.06"

/* NULL before nvmlInit. */
struct state *nvml_state(void);

/* The number of a GPU or of a MIG instance; -1 for a handle that is neither. */
int nvml_number(nvmlDevice_t device);
nvmlDevice_t nvml_handle(int number);

/* True for a GPU in MIG mode: then much can only be asked of its instances, or not at all. */
int nvml_divided(int number);

/* The place in mig_profiles of the profile with that id. As for every call about a whole GPU; NVML_ERROR_NOT_SUPPORTED
 * where it can do no MIG, NVML_ERROR_INVALID_ARGUMENT for another id. */
nvmlReturn_t nvml_profile_by_id(nvmlDevice_t device, const void *out, unsigned id, int *profile);

/* Calls `visit` for each number on which processes of a device can be: of a GPU in MIG mode those of its instances. */
void nvml_visit(int number, void (*visit)(int number, void *data), void *data);

/* Share of the last second for which the GPU computed, in percent. In MIG mode: of its compute slices. */
unsigned nvml_busy_percent(int gpu);

#define REQUIRE(condition, error)                                                                                      \
    do {                                                                                                               \
        if (!(condition)) return error;                                                                                \
    } while (0)

/* At the head of every call about a GPU or a MIG instance: initialised, a real handle, somewhere to put the answer. */
#define REQUIRE_DEVICE(device, out)                                                                                    \
    do {                                                                                                               \
        REQUIRE(nvml_state(), NVML_ERROR_UNINITIALIZED);                                                               \
        REQUIRE(nvml_number(device) >= 0 && (out), NVML_ERROR_INVALID_ARGUMENT);                                       \
    } while (0)

/* At the head of every call that answers for whole GPUs only. */
#define REQUIRE_GPU(device, out)                                                                                       \
    do {                                                                                                               \
        REQUIRE_DEVICE(device, out);                                                                                   \
        REQUIRE(!mig_is_instance(nvml_state(), nvml_number(device)), NVML_ERROR_NOT_SUPPORTED);                        \
    } while (0)

/* At the head of every call that answers neither for instances nor for a GPU that has some. */
#define REQUIRE_UNDIVIDED(device, out)                                                                                 \
    do {                                                                                                               \
        REQUIRE_GPU(device, out);                                                                                      \
        REQUIRE(!nvml_divided(nvml_number(device)), NVML_ERROR_NOT_SUPPORTED);                                         \
    } while (0)

#endif
