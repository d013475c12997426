#ifndef SIMGPU_LAUNCH_H
#define SIMGPU_LAUNCH_H

#include "cuda/streams/operation.h"

/* Check a launch as the driver would, and copy its arguments. */
CUresult launch_prepare(struct kernel_launch *launch, CUfunction function, const unsigned grid[3],
                        const unsigned block[3], unsigned shared, void **params, void **extra);

#endif
