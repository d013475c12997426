/* The compute engine: executes kernels and all other work that runs on the device itself. */
#ifndef SIMGPU_COMPUTE_H
#define SIMGPU_COMPUTE_H

#include "cuda/streams/stream.h"

struct range {
    uint64_t address, size;
    int written;
};

struct work {
    struct range ranges[2];
    int range_count;
    uint64_t passed;                       /* bytes that it reads and writes in VRAM, which take time */
    uint64_t device_ns;                    /* additional device time, without its launch */
    uint64_t queued_ns;                    /* its queued device time; see struct kernel_launch */
    int kernel;                            /* whether it counts as a kernel */
    void (*compute)(const void *argument); /* the actual computation, on host memory; NULL: none */
    const void *argument;
};

/* Return the device time of work without page faults. */
uint64_t compute_device_ns(int gpu, const struct work *work);

/* Run the work on the stream's GPU. Returns the instant of its end. Page accesses are spread evenly over the device
 * time, as for a kernel that streams through its data. Called by the stream's worker. */
uint64_t compute_run(struct stream *stream, const struct work *work, uint64_t ready);

#endif
