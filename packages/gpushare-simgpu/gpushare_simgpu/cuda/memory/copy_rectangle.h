#ifndef SIMGPU_COPY_RECTANGLE_H
#define SIMGPU_COPY_RECTANGLE_H

#include "cuda/streams/operation.h"

/* Make the operation for a copy between pitched boxes. CUDA_ERROR_NOT_SUPPORTED for arrays, which the simulator does
 * not support. */
CUresult copy_rectangle(const CUDA_MEMCPY3D *copy, struct operation *operation);

#endif
