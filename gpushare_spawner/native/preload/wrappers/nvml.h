/* NVML's memory figures for the session's GPUs, the same lie as cuMemGetInfo's. */
#pragma once

/* The wrapper for a pointer of the real libnvidia-ml, or the pointer itself. */
void *nvml_wrapper_of(void *pointer);
