/* NVML's memory figures for the session's GPUs: what cuMemGetInfo reports. */
#pragma once

/* The wrapper for a pointer of the real libnvidia-ml, or the pointer itself. Looks up NVML's functions the first time.
 */
void *nvml_wrapper_of(void *pointer);
