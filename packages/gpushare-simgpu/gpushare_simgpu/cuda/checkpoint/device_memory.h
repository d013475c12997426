/* The device memory of this process on its way to the host and back. Only for its restore thread, while the process is
 * locked and at rest: nothing is allocated or freed meanwhile. */
#ifndef SIMGPU_DEVICE_MEMORY_H
#define SIMGPU_DEVICE_MEMORY_H

#include "cuda/driver/driver.h"

/* True when the process has managed memory, which no checkpoint can hold. */
int device_memory_has_managed(void);

/* Gives the frames of all device memory and of all contexts back, each part when it has been copied to the host. From
 * then on no address of device memory can be read or written, and the process is on no GPU. */
void device_memory_leave(void);

/* Takes frames for all of it again, copies it back, and opens its addresses. CUDA_ERROR_OUT_OF_MEMORY where a GPU has
 * too little memory: nothing has changed then. */
CUresult device_memory_return(void);

#endif
