/* The real driver behind the wrappers: `real.cuMemAlloc_v2(...)` calls it. */
#pragma once

#include "driver/cuda_abi.h"
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
#include "driver/held_calls.h"
#include "driver/driver_calls.h"
#include "driver/gated_calls.h"
};

HIDDEN struct real_driver real;

/* What a slot holds where the driver has no such function; returns CUDA_ERROR_NOT_FOUND. */
CUresult driver_lacks(void);
/* Once the driver has been loaded. */
#define driver_has(name) ((void *)real.name != (void *)driver_lacks)

/* Fill `real` from the libcuda.so.1 that the program has loaded. False while there is none. Any thread; takes a lock of
   its own the first time, and looks up names under it. */
bool driver_load(void);

void driver_forget(void); /* in a forked child: the functions stay, the lock is let go */

/* The place in struct real_driver of the wrapped function that a pointer of the real driver points to; -1: it points to
   none. Takes no lock. */
int driver_number_of(const void *pointer);

/* cuGetProcAddress has answered with a function that the driver's library does not export: remember it as the one of
   this name at this version. False: nothing is wrapped under that name, or the library exports another function. Takes
   a lock of its own. */
bool driver_learn_answer(void *pointer, const char *asked, int version, uint64_t flags);
