#ifndef SIMGPU_COPY_RECTANGLE_H
#define SIMGPU_COPY_RECTANGLE_H

#include "cuda/streams/operation.h"

/* The operation of a copy between pitched boxes. CUDA_ERROR_NOT_SUPPORTED for arrays, which the simulator does not
 * have. */
CUresult copy_rectangle(const CUDA_MEMCPY3D *copy, struct operation *operation);

#endif
