/* Moves the device memory of this process to the host and back. Only for its restore thread, while the process is
 * locked and at rest, so that nothing is allocated or freed. */
#ifndef SIMGPU_DEVICE_MEMORY_H
#define SIMGPU_DEVICE_MEMORY_H

#include "cuda/driver/driver.h"

/* Whether the process has managed memory, which a checkpoint cannot contain. */
int device_memory_has_managed(void);

/* Release the frames of all device memory and of all contexts, each part after it has been copied to the host.
 * Afterwards device memory cannot be read or written, and the process is on no GPU. */
void device_memory_leave(void);

/* Take frames for all of it again, copy it back, and make its addresses accessible. CUDA_ERROR_OUT_OF_MEMORY if a GPU
 * has too little memory; then nothing has changed. */
CUresult device_memory_return(void);

#endif
