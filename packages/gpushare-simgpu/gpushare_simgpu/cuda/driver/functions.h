/* The driver's functions by name and version. */
#ifndef SIMGPU_FUNCTIONS_H
#define SIMGPU_FUNCTIONS_H

#include <stddef.h>

struct named_function {
    const char *name;
    int version; /* the first CUDA version whose headers map the name to this function */
    void (*function)(void);
    void (*per_thread)(void); /* the form for per-thread default streams; NULL if there is none */
};

extern const struct named_function FUNCTIONS[];
extern const size_t FUNCTION_COUNT;

#endif
