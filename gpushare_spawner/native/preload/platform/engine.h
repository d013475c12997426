/* How the session shares its GPUs: the memory engine of its template, or another sharing layer. */
#pragma once

#include <stdatomic.h>

#include "platform/common.h"

enum engine {
    ENGINE_MANAGED = 1, /* device memory is made movable, and work needs a lease */
    ENGINE_SUSPEND,     /* memory stays plain; the agent suspends the whole process by the driver's own functions */
    ENGINE_OBSERVE,     /* another layer shares the GPU: this library converts, refuses and delays nothing */
};

HIDDEN _Atomic int engine_read; /* 0: not read yet */

/* What GPUSHARE_ENGINE says. Reads the environment once; any thread, no lock. */
enum engine engine_wanted(void);

/* The same without a call. False until the environment has been read, which cuInit does. */
static inline bool engine_suspends(void) {
    return atomic_load_explicit(&engine_read, memory_order_relaxed) == ENGINE_SUSPEND;
}
