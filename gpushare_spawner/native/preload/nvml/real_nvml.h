/* The real libnvidia-ml behind the wrappers: `real_nvml()->nvmlDeviceGetCount(...)` calls it. */
#pragma once

#include "nvml/nvml_abi.h"
#include "platform/common.h"

#define WRAPPED(name, parameters) nvmlReturn(*name) parameters;
#define CALLED(name, parameters)  nvmlReturn(*name) parameters;
struct real_nvml {
#include "nvml/nvml_calls.h"
};

/* Its functions; NULL where NVML has no such function, and all of them before `real_nvml_load`. */
const struct real_nvml *real_nvml(void);

/* Find them in the libnvidia-ml.so.1 that the program has loaded. False while there is none. Any thread; takes no lock
   of this library, but the dynamic linker's. */
bool real_nvml_load(void);

/* Whether this is the handle of a GPU, or of a part of one, in an NVML that is initialised. */
bool real_nvml_knows(nvmlDevice device);

/* The UUID of a GPU by NVML's handle. False: NVML is not initialised, or this is no handle of a whole GPU. */
bool real_nvml_uuid(nvmlDevice device, unsigned char uuid[16]);

/* The handle of a GPU by its UUID: NVML's answer. */
nvmlReturn real_nvml_handle(const unsigned char uuid[16], nvmlDevice *device);
