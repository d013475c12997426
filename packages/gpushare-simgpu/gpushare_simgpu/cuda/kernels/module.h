/* Modules and libraries: the built-in kernels that a PTX text names. */
#ifndef SIMGPU_MODULE_H
#define SIMGPU_MODULE_H

#include "cuda/driver/driver.h"

#define FUNCTION_MAGIC 0x46554e43u
#define MODULE_MAGIC   0x4d4f4455u

struct function {
    uint32_t magic;
    const struct kernel *kernel;
    struct module *module;
};

struct module {
    uint32_t magic;
    struct context *context; /* NULL: a library */
    unsigned count;
    struct function functions[];
};

#endif
