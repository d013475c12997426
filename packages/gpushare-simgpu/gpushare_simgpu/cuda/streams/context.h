/* Contexts: where streams, memory and errors belong. */
#ifndef SIMGPU_CONTEXT_H
#define SIMGPU_CONTEXT_H

#include <pthread.h>

#include "cuda/driver/driver.h"

#define CONTEXT_MAGIC 0x43545843u
#define MAX_CONTEXTS  1024 /* of one process */

struct context {
    uint32_t magic;
    int device; /* ordinal in this process */
    int gpu;    /* number on the machine */
    int primary;
    unsigned flags;
    unsigned retained; /* primary: how often */
    uint64_t id;
    CUresult error;       /* sticky: an illegal address ends the context's usefulness */
    pthread_mutex_t lock; /* the list of streams, and which is legacy */
    struct stream *streams;
    struct stream *legacy;
    unsigned blocking;   /* streams that synchronise with the legacy one */
    unsigned capturing;  /* captures in progress that forbid unsafe calls of any thread */
    uint64_t generation; /* a reset primary context is a new one: per-thread streams of the old are gone */
    uint32_t peers;      /* devices whose memory was opened to this context */
    uint32_t *frames;    /* of the memory that the context itself takes; NULL: it takes none */
};

/* The calling thread's current context; NULL if none. */
struct context *context_current(void);

/* Current, alive, and without a sticky error. */
CUresult context_require(struct context **context);

CUresult context_check(struct context *context);

/* The primary context of a device, made when it is needed and not counted; NULL while nobody retained it. */
struct context *context_primary(int device);

/* Waits for all work of the context. */
CUresult context_synchronize(struct context *context);

/* True when no stream of the context has work. */
int context_idle(struct context *context);

/* Waits for all work of all contexts on a device: what cuMemFree promises. */
void device_synchronize(int device);

/* Calls `visit` for each live context. */
void contexts_visit(void (*visit)(struct context *, void *), void *data);

/* Waits for all work on the machine that this process has. */
void synchronize_everything(void);

#endif
