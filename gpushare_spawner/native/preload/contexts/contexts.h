/* The program's contexts, and which of them are being destroyed. Their streams: lanes.h. */
#pragma once

#include <pthread.h>

#include "driver/driver.h"
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
    CUstream moving; /* the pager's stream; made when it is first needed */
    struct context *next;
};

/* Held by the background thread for every driver call it makes, and by whoever destroys a context or a stream: neither
   is pulled from under the other's feet. Taken before the locks of account.h and pace.c. */
HIDDEN pthread_mutex_t contexts_lock;
HIDDEN struct context *contexts;
HIDDEN _Atomic int contexts_known;      /* while it is one, a thread with a context has that one */
HIDDEN _Atomic uint32_t contexts_epoch; /* changes when a context or a stream goes */

/* With contexts_lock held: the entry of a context, made current to the calling thread while it is being looked up.
   Allocates the first time; NULL: no GPU of ours, or no memory. */
struct context *context_entry(CUcontext handle);

/* A call that may destroy a context, and that waits for its work if it does, without the lock; on the stack of the
   thread that makes it. Meanwhile nothing of the context may be touched; its work may go on. All with contexts_lock
   held. */
struct leaving {
    CUcontext handle;
    struct leaving *next;
};
void context_leaving_begins(struct leaving *entry, CUcontext handle);
void context_leaving_ends(struct leaving *entry);
bool context_leaves(CUcontext handle);

/* With contexts_lock held: the context is gone; its lanes are forgotten already. */
void context_gone(CUcontext handle);

void contexts_forget(void); /* in a forked child */
