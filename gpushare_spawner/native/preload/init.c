/* cuInit begins everything: until then this library has no thread, no socket and no file. Here the layers are wired,
   and a forked child begins anew. */
#include <pthread.h>

#include "contexts/captures.h"
#include "contexts/contexts.h"
#include "contexts/lanes.h"
#include "driver/driver.h"
#include "driver/gpus.h"
#include "gate/gate.h"
#include "gate/launch.h"
#include "gate/waiting.h"
#include "lease/burst.h"
#include "lease/lease.h"
#include "lease/observing.h"
#include "lease/pager.h"
#include "lease/suspending.h"
#include "lease/unseen.h"
#include "lease/worker.h"
#include "memory/account.h"
#include "memory/allocations.h"
#include "memory/block_cache.h"
#include "memory/pool_memory.h"
#include "memory/ties.h"
#include "platform/engine.h"
#include "platform/sharing.h"
#include "wrappers/exported.h"
#include "wrappers/plain_memory.h"
#include "wrappers/stream_ordered.h"

static pthread_mutex_t beginning = PTHREAD_MUTEX_INITIALIZER;
static bool begun;

/* A forked child is a new process to the agent, and has none of this library's threads. Forget everything: the parent's
   contexts and memory are not the child's, and locks may have been held by threads that are not here. The parent's
   records are left where they are; a fork copies them on write, and most children exec at once. */
static void in_child(void) {
    worker_forget();
    launch_forget();
    waiting_forget();
    gate_forget();
    lanes_forget();
    contexts_forget();
    allocations_forget();
    account_forget();
    block_cache_forget();
    pool_memory_forget();
    stream_ordered_forget();
    plain_memory_forget();
    captures_forget();
    leases_forget();
    bursts_forget();
    unseen_forget();
    suspending_forget();
    observing_forget();
    ties_forget();
    pager_forget();
    driver_forget();
    begun = false;
    gpu_count = 0;
    pthread_mutex_init(&beginning, NULL);
}

static void fork_watch(void) {
    static bool watched;
    if (!watched) watched = late_libc_at_fork(in_child);
}

CUresult wrapped_cuInit(unsigned flags);
CUresult wrapped_cuInit(unsigned flags) {
    driver_load();
    struct passage *passage = engine_suspends() ? launch_enter_call() : NULL;
    CUresult result = real.cuInit(flags);
    launch_leave(passage);
    if (result != CUDA_SUCCESS || !sharing_wanted()) return result;
    pthread_mutex_lock(&beginning);
    if (!begun) {
        begun = true;
        log_prepare();
        engine_wanted();
        fork_watch();
        gpus_find();
        captures_on_change(gate_refresh);
        gate_prepare();
        launch_prepare();
        if (gpu_count) worker_start();
    }
    pthread_mutex_unlock(&beginning);
    return result;
}
EXPORTED(cuInit);
