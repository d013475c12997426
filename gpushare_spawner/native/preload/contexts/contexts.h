/* The program's contexts, including those that are being destroyed, and the background thread's turns with the driver.
   Their streams are in lanes.h. */
#pragma once

#include <pthread.h>

#include "driver/gpus.h"

struct lane;

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
    CUstream moving; /* the pager's stream; created when first needed */
    struct context *next;
};

/* Held by the background thread during each of its driver calls, and by a thread that destroys a context or a stream,
   so that neither thread uses an object that the other destroys. Taken before the locks of account.h and pace.c. */
HIDDEN pthread_mutex_t contexts_lock;
HIDDEN struct context *contexts;
HIDDEN _Atomic int contexts_count;      /* while it is 1, the current context of any thread is that context */
HIDDEN _Atomic uint32_t contexts_epoch; /* changes when a context or a stream is destroyed */

/* With contexts_lock held: return the entry of a context. For a new context an entry is allocated, and the context is
   temporarily made current to the calling thread. NULL: its GPU is not in `gpus`, or there is no memory. */
struct context *context_entry(CUcontext handle);

/* A call that may destroy a context, and then waits for the context's work without the lock; on the calling thread's
   stack. During the call no object of the context may be used; its work may still run. All functions require
   contexts_lock. */
struct destruction {
    CUcontext handle;
    struct destruction *next;
};
void context_destruction_begins(struct destruction *entry, CUcontext handle);
void context_destruction_ends(struct destruction *entry);
bool context_in_destruction(CUcontext handle);

/* With contexts_lock held: remove a destroyed context, whose lanes have already been removed. */
void context_remove(CUcontext handle);

/* The background thread's turns with the driver. A turn holds contexts_lock. No turn begins while the process is
   suspended, or while it exits and the driver may be shutting down. No driver call within a turn may wait for the
   device. */

/* Wait for contexts_lock. False: the program is exiting or the process is suspended, and no turn has begun. */
bool contexts_turn_begin(void);
void contexts_turn_end(void); /* leaves no context current */

/* Prevent further turns; returns at the end of the last turn, or after half a second. */
void contexts_turns_stop(void);
void contexts_turns_allow(void);
