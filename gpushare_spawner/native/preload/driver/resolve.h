/* The real driver behind the wrappers: `real.cuMemAlloc_v2(...)` calls it.

   A pointer that the real driver gave out is turned into the wrapper of the very function it points to; what is not
   known stays what it is. Nothing is ever derived from a name's suffix. */
#pragma once

#include "platform/common.h"

#define SINGLE(name, asked, version, parameters, arguments, stream) CUresult(*name) parameters;
#define STREAMED(name, asked, version, twin, parameters, arguments, stream)                                            \
    CUresult(*name) parameters;                                                                                        \
    CUresult(*name##_ptsz) parameters;
#define IMPLICIT(name, asked, version, twin, parameters, arguments)                                                    \
    CUresult(*name) parameters;                                                                                        \
    CUresult(*name##_ptds) parameters;
#define WRAPPED(name, asked, version, per_thread, parameters) CUresult(*name) parameters;
#define CALLED(name, parameters)                              CUresult(*name) parameters;
struct real_driver {
#include "driver/driver_calls.h"
#include "driver/gated_calls.h"
};

extern struct real_driver real;

/* What a slot holds where the driver has no such function; returns CUDA_ERROR_NOT_FOUND. */
CUresult driver_lacks(void);
/* Once the driver has been loaded. */
#define driver_has(name) ((void *)real.name != (void *)driver_lacks)

/* Whether this process is to be shared at all: GPUSHARE_SOCKET is set, GPUSHARE_DISABLE is not. */
bool sharing_wanted(void);

/* Fill `real` from the libcuda.so.1 that the program has loaded. False while there is none. */
bool driver_load(void);

void driver_forget(void); /* in a forked child: the functions stay, the lock is let go */

/* The wrapper for a pointer of the real driver, or the pointer itself. */
void *wrapper_of(void *pointer);

/* The same for an answer of cuGetProcAddress: a name at a version, with flags. */
void *wrapper_of_answer(void *pointer, const char *asked, int version, uint64_t flags);
