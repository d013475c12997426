/* Streams: a ring of operations and, once there is one, the thread that carries them out in order. */
#ifndef SIMGPU_STREAM_H
#define SIMGPU_STREAM_H

#include "cuda/streams/context.h"
#include "cuda/streams/operation.h"

#define STREAM_MAGIC 0x5354524du
#define RING         1024u

struct cell {
    uint64_t turn; /* whose turn: position to be written, position + 1 to be read */
    struct operation operation;
};

struct stream {
    uint32_t magic;
    uint32_t references;
    struct context *context;
    unsigned flags;
    int priority;
    int kind; /* enum stream_kind */
    uint64_t id;
    struct stream *next; /* in the context */
    struct capture *capture;
    pthread_mutex_t starting;
    int started;
    struct cell *ring;
    /* producers */
    uint64_t tail __attribute__((aligned(64)));
    /* the worker */
    uint64_t head __attribute__((aligned(64))); /* operations taken */
    uint64_t done;                              /* operations finished */
    uint32_t asleep;                            /* futex word: 1 while the worker waits for work */
    uint32_t finished;                          /* futex word: counts finishing for those who wait */
    uint32_t watchers;                          /* how many wait */
    int marking;       /* an event is told now, and in a moment that the stream is done with it */
    uint64_t last_end; /* instant at which the last operation ended */
    int rested;        /* the queue was empty since: time has passed */
};

enum stream_kind { STREAM_CREATED, STREAM_IS_LEGACY, STREAM_IS_PER_THREAD };

/* The stream of a handle (NULL is legacy), in the current context. */
CUresult stream_resolve(CUstream handle, struct stream **stream);

/* Puts an operation in; gives its position, which is done when stream_done() has passed it. Waits while the ring is
 * full. Legacy synchronisation and stream capture are dealt with here. */
CUresult stream_put(struct stream *stream, const struct operation *operation, uint64_t *position);

/* The same for a call that returns only when the work is done. */
CUresult stream_put_and_wait(struct stream *stream, const struct operation *operation);

int stream_done(struct stream *stream, uint64_t position);
void stream_wait(struct stream *stream, uint64_t position);
/* True when nothing is left to do. */
int stream_idle(struct stream *stream);

void stream_drain(struct stream *stream);

struct stream *stream_make(struct context *context, unsigned flags, int priority, enum stream_kind kind);
void stream_unlink(struct stream *stream);
void stream_retain(struct stream *stream);
void stream_release(struct stream *stream);

/* True when the next operation in line is a kernel: the compute engine is kept for it. Only from the worker. */
int stream_next_is_kernel(struct stream *stream);

#endif
