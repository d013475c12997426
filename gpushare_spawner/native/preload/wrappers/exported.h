/* What wrappers have in common: how one takes a driver function's name, and what 0 means as a stream. */
#pragma once

#include "driver/cuda_abi.h"

/* The wrapper of a driver function is `wrapped_NAME`; a program that is linked against libcuda finds it as NAME. */
#define EXPORTED(name)                                                                                                 \
    extern __typeof__(wrapped_##name) name __attribute__((alias("wrapped_" #name), visibility("default")))

/* In a _ptsz or _ptds twin the default stream is the thread's own. */
static inline CUstream own(CUstream stream) {
    return stream ? stream : CU_STREAM_PER_THREAD;
}
