#include "fork.h"

#include <pthread.h>

#include "memory/allocations.h"
#include "memory/block_cache.h"
#include "lease/burst.h"
#include "contexts/capture.h"
#include "contexts/contexts.h"
#include "gate/gate.h"
#include "lease/lease.h"
#include "lease/pager.h"
#include "wrappers/plain_memory.h"
#include "driver/resolve.h"
#include "wrappers/stream_ordered.h"
#include "lease/worker.h"

/* Forget everything: the parent's contexts and memory are not the child's, and locks may have been held by threads that
   are not here. The parent's records are left where they are; a fork copies them on write, and most children exec at
   once. */
static void in_child(void) {
    worker_forget();
    gate_forget_threads();
    contexts_forget();
    allocations_forget();
    block_cache_forget();
    stream_ordered_forget();
    plain_memory_forget();
    captures_forget();
    leases_forget();
    bursts_forget();
    pager_forget();
    session_forget();
    driver_forget();
}

void fork_watch(void) {
    /* what pthread_atfork is in glibc, whose own name for it is not in the shared library everywhere */
    extern void *__dso_handle __attribute__((visibility("hidden")));
    static int watched;
    if (!watched) watched = late.at_fork(NULL, NULL, in_child, &__dso_handle) == 0;
}
