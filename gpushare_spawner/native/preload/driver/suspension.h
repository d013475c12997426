/* The suspension of this process by the agent: from SUSPEND to RESUMED. Meanwhile the process may be checkpointed, and
   then the driver blocks each call that launches work or manages resources; so no call is made. lease/suspending.c
   changes what is here. */
#pragma once

#include <stdatomic.h>

#include "platform/common.h"

enum { SUSPENSION_OVER, SUSPENSION_WAITS };
HIDDEN _Atomic uint32_t suspension_of_threads; /* the program's threads wait in front of driver calls; a futex */
HIDDEN _Atomic bool suspension_of_background;  /* the background thread makes no driver call, and takes no lock that is
                                                  held over one */

static inline bool suspension_waits(void) {
    return unlikely(atomic_load_explicit(&suspension_of_threads, memory_order_relaxed) == SUSPENSION_WAITS);
}

static inline bool suspension_stops_background(void) {
    return unlikely(atomic_load_explicit(&suspension_of_background, memory_order_relaxed));
}
