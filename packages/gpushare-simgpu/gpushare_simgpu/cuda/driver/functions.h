/* The driver's functions by name and version. */
#ifndef SIMGPU_FUNCTIONS_H
#define SIMGPU_FUNCTIONS_H

#include <stddef.h>

struct named_function {
    const char *name;
    int version; /* the first CUDA version whose headers mean this function by the name */
    void (*function)(void);
    void (*per_thread)(void); /* the form for per-thread default streams; NULL where there is none */
};

extern const struct named_function FUNCTIONS[];
extern const size_t FUNCTION_COUNT;

#endif
