/* How a wrapper takes a driver function's name. */
#pragma once

/* The wrapper of a driver function is `wrapped_NAME`; a program that is linked against libcuda finds it as NAME. */
#define EXPORTED(name)                                                                                                 \
    extern __typeof__(wrapped_##name) name __attribute__((alias("wrapped_" #name), visibility("default")))
