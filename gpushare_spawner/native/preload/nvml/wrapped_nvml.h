/* What the wrappers of NVML's functions have in common. */
#pragma once

#include "nvml/figures.h"
#include "nvml/real_nvml.h"
#include "wrappers/exported.h"

#define WRAPPED(name, parameters) nvmlReturn wrapped_##name parameters;
#define CALLED(name, parameters)
#include "nvml/nvml_calls.h"

/* Whether NVML has the function. Where it has not, the wrapper answers NVML_ERROR_FUNCTION_NOT_FOUND: it is called all
   the same by a program that is linked against another version. */
#define NVML_HAS(name) (real_nvml_load() && real_nvml()->name)

/* What to show of a GPU. False: what the driver says, errors among it. */
static inline bool nvml_figures_of(nvmlDevice device, struct gpu_figures *figures) {
    unsigned char uuid[16];
    return figures_wanted() && real_nvml_uuid(device, uuid) && figures_of(uuid, figures);
}

/* The same for lists of processes. Those of a GPU that is not the session's, and of all GPUs while the agent does not
   answer, are empty: none of them has a neighbour's process. */
static inline bool nvml_processes_of(nvmlDevice device, struct gpu_figures *figures) {
    if (!figures_wanted() || !real_nvml_knows(device)) return false;
    if (!nvml_figures_of(device, figures)) *figures = (struct gpu_figures){0};
    return true;
}
