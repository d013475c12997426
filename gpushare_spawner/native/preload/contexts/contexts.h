/* Contexts and the lanes in them: where work was launched, and where the background thread looks whether it is done. */
#pragma once

#include <pthread.h>

#include "gate/gate.h"
#include "driver/resolve.h"

/* An event in a stream that was destroyed while it had work. */
struct orphan {
    CUevent event;
    struct orphan *next;
};

struct context {
    CUcontext handle;
    struct gpu *gpu;
    struct lane *lanes;
    struct orphan *orphans;
    CUstream moving; /* the pager's stream; made when it is first needed */
    struct context *next;
};

/* Held by the background thread for every driver call it makes, and by whoever destroys a context or a stream: neither
   is pulled from under the other's feet. Taken before the lock of allocations.c. */
extern pthread_mutex_t contexts_lock;
extern struct context *contexts;

/* The lane that a launch into `stream` by this thread goes to; NULL where there is none that is arbitrated. */
struct lane *lane_of(struct passage *passage, CUstream stream);

/* In a process with several contexts: the lane of a default stream, where the driver says that the thread's context is
   the same as at its last launch into that stream. NULL: ask lane_of. */
static inline struct lane *default_lane_again(const struct passage *passage, CUstream stream) {
    const struct default_lane *last = &passage->defaults[(uintptr_t)stream];
    CUcontext context;
    if (!last->lane || passage->epoch != atomic_load_explicit(&lanes_epoch, memory_order_relaxed)) return NULL;
    return real.cuCtxGetCurrent(&context) == CUDA_SUCCESS && context == last->context ? last->lane : NULL;
}

/* With contexts_lock held: the entry of a context, made current to the calling thread while it is being looked up. */
struct context *context_entry(CUcontext handle);

/* With contexts_lock held. Whether a thread of the program is in a call that may destroy the context: such a call waits
   for the context's work, without the lock. Meanwhile nothing of the context may be touched; its work may go on. */
bool context_leaves(CUcontext handle);

/* With contexts_lock held. Whether the lane has had work since the device was last seen quiet. */
bool lane_is_active(const struct lane *lane);

/* A stream is about to be destroyed: its work, if any, is remembered by an event. Takes the lock. */
void stream_forget(CUstream stream);

void contexts_forget(void); /* in a forked child */
