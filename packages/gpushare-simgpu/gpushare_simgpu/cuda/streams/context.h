/* Contexts, to which streams, memory and errors belong. */
#ifndef SIMGPU_CONTEXT_H
#define SIMGPU_CONTEXT_H

#include <pthread.h>

#include "cuda/driver/driver.h"

#define CONTEXT_MAGIC 0x43545843u
#define MAX_CONTEXTS  1024 /* maximum in one process */

struct context {
    uint32_t magic;
    int device; /* ordinal in this process */
    int gpu;    /* number on the machine */
    int primary;
    unsigned flags;
    unsigned retained; /* primary context: how often it is retained */
    uint64_t id;
    CUresult error;       /* sticky: after an illegal address the context is unusable */
    pthread_mutex_t lock; /* protects the list of streams and the legacy stream */
    struct stream *streams;
    struct stream *legacy;
    unsigned blocking;   /* number of streams that synchronize with the legacy stream */
    unsigned capturing;  /* number of captures in progress that forbid unsafe calls in any thread */
    uint64_t generation; /* a reset primary context is a new context, without the old one's per-thread streams */
    uint32_t peers;      /* devices whose memory is accessible to this context */
    uint32_t *frames;    /* frames of the memory that the context itself takes; NULL: none */
};

/* Return the calling thread's current context; NULL if none. */
struct context *context_current(void);

/* Check that a context is current, alive, and without a sticky error. */
CUresult context_require(struct context **context);

CUresult context_check(struct context *context);

/* Return the primary context of a device without retaining it; NULL while it is not retained. */
struct context *context_primary(int device);

/* Wait for all work of the context. */
CUresult context_synchronize(struct context *context);

/* Whether no stream of the context has work. */
int context_idle(struct context *context);

/* Wait for all work of all contexts on a device, as cuMemFree guarantees. */
void device_synchronize(int device);

/* Call `visit` for each live context. */
void contexts_visit(void (*visit)(struct context *, void *), void *data);

/* Wait for all work of this process on all GPUs. */
void synchronize_everything(void);

#endif
