/* Streams: a ring of operations and, after the first operation, the thread that executes them in order. */
#ifndef SIMGPU_STREAM_H
#define SIMGPU_STREAM_H

#include "cuda/streams/context.h"
#include "cuda/streams/operation.h"

#define STREAM_MAGIC 0x5354524du
#define RING         1024u

struct cell {
    uint64_t turn; /* the cell's turn: position: to be written, position + 1: to be read */
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
    uint32_t finished;                          /* futex word: counts finished operations for waiting threads */
    uint32_t watchers;                          /* number of waiting threads */
    int marking;       /* an event is being signaled, before the stream is marked as done with it */
    uint64_t last_end; /* instant at which the last operation ended */
    int rested;        /* the queue has been empty since, so time has passed */
    const struct operation *graph_next, *graph_end; /* the rest of the graph that runs */
};

enum stream_kind { STREAM_CREATED, STREAM_IS_LEGACY, STREAM_IS_PER_THREAD };

/* Return the stream with a handle (NULL: the legacy stream) in the current context. */
CUresult stream_resolve(CUstream handle, struct stream **stream);

/* Enqueue an operation. Returns its position; it is done when stream_done() has passed the position. Waits while the
 * ring is full. Handles legacy synchronization and stream capture. */
CUresult stream_put(struct stream *stream, const struct operation *operation, uint64_t *position);

/* The same for a call that returns only when the work is done. */
CUresult stream_put_and_wait(struct stream *stream, const struct operation *operation);

int stream_done(struct stream *stream, uint64_t position);
void stream_wait(struct stream *stream, uint64_t position);
/* Whether no work is left. */
int stream_idle(struct stream *stream);

void stream_drain(struct stream *stream);

struct stream *stream_make(struct context *context, unsigned flags, int priority, enum stream_kind kind);
void stream_unlink(struct stream *stream);
void stream_retain(struct stream *stream);
void stream_release(struct stream *stream);

/* Whether work for the compute engine follows, events and written values aside; the engine is kept for it. Called only
 * by the worker. */
int stream_wants_engine(struct stream *stream);

#endif
