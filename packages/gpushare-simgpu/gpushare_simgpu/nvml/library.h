/* The state of NVML in this process. NVML sees every GPU of the machine: CUDA_VISIBLE_DEVICES does not count here. */
#ifndef SIMGPU_NVML_LIBRARY_H
#define SIMGPU_NVML_LIBRARY_H

#include "common/state.h"
#include "nvml/nvml_api.h"

#define CUDA_VERSION 13000
#define DRIVER_TEXT  "580.65.06"

/* NULL before nvmlInit. */
struct state *nvml_state(void);

/* The number of a GPU; -1 for a handle that is none. */
int nvml_gpu(nvmlDevice_t device);
nvmlDevice_t nvml_handle(int gpu);

/* Share of the last second for which the GPU computed, in percent. */
unsigned nvml_busy_percent(int gpu);

#define REQUIRE(condition, error)                                                                                      \
    do {                                                                                                               \
        if (!(condition)) return error;                                                                                \
    } while (0)

/* At the head of every call about a device: initialised, a real handle, somewhere to put the answer. */
#define REQUIRE_DEVICE(device, out)                                                                                    \
    do {                                                                                                               \
        REQUIRE(nvml_state(), NVML_ERROR_UNINITIALIZED);                                                               \
        REQUIRE(nvml_gpu(device) >= 0 && (out), NVML_ERROR_INVALID_ARGUMENT);                                          \
    } while (0)

#endif
