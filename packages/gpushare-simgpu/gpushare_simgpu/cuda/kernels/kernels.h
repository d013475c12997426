/* The built-in kernels. A module names them by its .entry directives; their computations are implemented here in C. */
#ifndef SIMGPU_KERNELS_H
#define SIMGPU_KERNELS_H

#include "cuda/kernels/compute.h"

#define MAX_PARAMETERS 4

struct kernel {
    const char *name;
    int parameter_count;
    struct {
        uint16_t offset, size;
    } parameters[MAX_PARAMETERS];
    /* fills in ranges, device time and computation */
    void (*plan)(const unsigned char *arguments, struct work *work);
};

const struct kernel *kernel_find(const char *name);

/* Return the device time of a launch without page faults. */
uint64_t kernel_device_ns(int gpu, const struct kernel_launch *launch);

uint64_t kernel_run(struct stream *stream, const struct kernel_launch *launch, uint64_t ready);

#endif
