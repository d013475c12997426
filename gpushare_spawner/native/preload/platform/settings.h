/* How this process shares its GPUs, according to its environment. Read once, at the first call; any thread, no lock. */
#pragma once

#include <stdatomic.h>

#include "platform/common.h"

/* Whether this process is shared at all: GPUSHARE_SOCKET is set, GPUSHARE_DISABLE is not set, and the program has no
   more privileges than its caller. */
bool settings_share(void);

/* GPUSHARE_ENGINE: the memory engine of the session's template, or another sharing layer. */
enum engine {
    ENGINE_MANAGED = 1, /* device memory is made movable, and work needs a lease */
    ENGINE_SUSPEND,     /* memory stays plain; the agent suspends the whole process with the driver's own functions */
    ENGINE_OBSERVE,     /* another layer shares the GPU: this library converts, refuses and delays nothing */
};
enum engine settings_engine(void);

HIDDEN _Atomic int settings_engine_read; /* enum engine; 0: not read yet */

/* Whether the engine is `suspend`, without a function call. False until cuInit has read the environment. */
static inline bool settings_engine_suspends(void) {
    return atomic_load_explicit(&settings_engine_read, memory_order_relaxed) == ENGINE_SUSPEND;
}
