/* The compute engine: carries out kernels and whatever else runs on the device itself. */
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
    uint64_t passed;                       /* bytes that it reads and writes in VRAM, which take their time */
    uint64_t device_ns;                    /* besides them, and besides its launch */
    uint64_t queued_ns;                    /* of its device time; see struct kernel_launch */
    int kernel;                            /* counts as one */
    void (*compute)(const void *argument); /* the real thing, on host memory; NULL for none */
    const void *argument;
};

/* Device time of work that faults no page. */
uint64_t compute_device_ns(int gpu, const struct work *work);

/* Runs it on the stream's GPU; gives the instant of its end. Pages are touched spread evenly over the device time, as a
 * kernel that streams through its data does it. From the stream's worker. */
uint64_t compute_run(struct stream *stream, const struct work *work, uint64_t ready);

#endif
