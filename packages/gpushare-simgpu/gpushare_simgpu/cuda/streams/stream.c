#include "cuda/streams/stream.h"

#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/clock.h"
#include "common/futex.h"
#include "cuda/streams/call_lock.h"
#include "cuda/streams/capture.h"
#include "cuda/streams/execute.h"
#include "cuda/streams/graph.h"

static uint64_t last_id;

struct stream *stream_make(struct context *context, unsigned flags, int priority, enum stream_kind kind) {
    void *memory;
    if (posix_memalign(&memory, 64, sizeof(struct stream))) return NULL;
    struct stream *stream = memset(memory, 0, sizeof(struct stream));
    /* not accessed, and so not committed, until there is work */
    stream->ring = mmap(NULL, RING * sizeof(struct cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stream->ring == MAP_FAILED) {
        free(stream);
        return NULL;
    }
    stream->magic = STREAM_MAGIC;
    stream->references = 1;
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    stream->kind = (int)kind;
    stream->id = __atomic_add_fetch(&last_id, 1, __ATOMIC_RELAXED);
    stream->rested = 1;
    pthread_mutex_init(&stream->starting, NULL);
    pthread_mutex_lock(&context->lock);
    stream->next = context->streams;
    context->streams = stream;
    if (kind != STREAM_IS_LEGACY && !(flags & CU_STREAM_NON_BLOCKING)) context->blocking++;
    pthread_mutex_unlock(&context->lock);
    return stream;
}

void stream_retain(struct stream *stream) {
    __atomic_add_fetch(&stream->references, 1, __ATOMIC_RELAXED);
}

void stream_release(struct stream *stream) {
    if (__atomic_sub_fetch(&stream->references, 1, __ATOMIC_ACQ_REL)) return;
    munmap(stream->ring, RING * sizeof(struct cell));
    free(stream);
}

static uint64_t put(struct stream *stream, const struct operation *operation);

/* Remove the stream from its context; its worker ends after the queued work. */
void stream_unlink(struct stream *stream) {
    struct context *context = stream->context;
    pthread_mutex_lock(&context->lock);
    for (struct stream **at = &context->streams; *at; at = &(*at)->next) {
        if (*at == stream) {
            *at = stream->next;
            if (stream->kind != STREAM_IS_LEGACY && !(stream->flags & CU_STREAM_NON_BLOCKING)) context->blocking--;
            break;
        }
    }
    pthread_mutex_unlock(&context->lock);
    stream->magic = 0;
    capture_abandon(stream);
    if (stream->started) put(stream, &(struct operation){.kind = OPERATION_QUIT});
}

static void take_rest(struct stream *stream) {
    for (;;) {
        __atomic_store_n(&stream->asleep, 1, __ATOMIC_SEQ_CST);
        struct cell *cell = &stream->ring[stream->head % RING];
        if (__atomic_load_n(&cell->turn, __ATOMIC_SEQ_CST) == stream->head + 1) break;
        stream->rested = 1;
        futex_wait(&stream->asleep, 1, 0, 0);
        if (__atomic_load_n(&cell->turn, __ATOMIC_ACQUIRE) == stream->head + 1) break;
    }
    __atomic_store_n(&stream->asleep, 0, __ATOMIC_RELAXED);
}

static void tell_finished(struct stream *stream) {
    __atomic_store_n(&stream->done, stream->head, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&stream->watchers, __ATOMIC_SEQ_CST)) {
        __atomic_add_fetch(&stream->finished, 1, __ATOMIC_SEQ_CST);
        futex_wake_all(&stream->finished, 0);
    }
}

static void *work(void *argument) {
    struct stream *stream = argument;
    clock_exact_sleeps();
    call_lock_exempt();
    for (int quit = 0; !quit;) {
        struct cell *cell = &stream->ring[stream->head % RING];
        if (__atomic_load_n(&cell->turn, __ATOMIC_ACQUIRE) != stream->head + 1) take_rest(stream);
        struct operation operation = cell->operation;
        uint64_t position = stream->head++;
        __atomic_store_n(&cell->turn, position + RING, __ATOMIC_RELEASE);
        quit = operation.kind == OPERATION_QUIT;
        uint64_t now = clock_now(), ready = stream->rested ? now : stream->last_end;
        stream->rested = 0;
        __atomic_store_n(&stream->marking, operation.kind == OPERATION_RECORD, __ATOMIC_SEQ_CST);
        stream->last_end = execute(stream, &operation, ready);
        tell_finished(stream);
        __atomic_store_n(&stream->marking, 0, __ATOMIC_RELEASE);
    }
    stream_release(stream);
    return NULL;
}

static void start(struct stream *stream) {
    pthread_mutex_lock(&stream->starting);
    if (!stream->started) {
        sigset_t all, before;
        pthread_attr_t attributes;
        pthread_t thread;
        for (uint64_t i = 0; i < RING; i++) stream->ring[i].turn = i;
        sigfillset(&all);
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&attributes, 256 * 1024);
        stream_retain(stream);
        /* the program's signal handlers run on its own threads */
        pthread_sigmask(SIG_SETMASK, &all, &before);
        int failed = pthread_create(&thread, &attributes, work, stream);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
        if (failed)
            stream_release(stream);
        else
            __atomic_store_n(&stream->started, 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&stream->starting);
}

/* Any number of producers take positions from the tail and fill their cells; the worker reads them in order. */
static uint64_t put(struct stream *stream, const struct operation *operation) {
    uint64_t position = __atomic_fetch_add(&stream->tail, 1, __ATOMIC_RELAXED);
    struct cell *cell = &stream->ring[position % RING];
    while (__builtin_expect(__atomic_load_n(&cell->turn, __ATOMIC_ACQUIRE) != position, 0))
        stream_wait(stream, position - RING); /* the ring is full, as a GPU's queue can be */
    cell->operation = *operation;
    __atomic_store_n(&cell->turn, position + 1, __ATOMIC_SEQ_CST);
    if (__builtin_expect(__atomic_load_n(&stream->asleep, __ATOMIC_SEQ_CST), 0) &&
        __atomic_exchange_n(&stream->asleep, 0, __ATOMIC_SEQ_CST))
        futex_wake_all(&stream->asleep, 0);
    return position;
}

int stream_done(struct stream *stream, uint64_t position) {
    return __atomic_load_n(&stream->done, __ATOMIC_ACQUIRE) > position;
}

void stream_wait(struct stream *stream, uint64_t position) {
    while (!stream_done(stream, position)) {
        __atomic_add_fetch(&stream->watchers, 1, __ATOMIC_SEQ_CST);
        uint32_t seen = __atomic_load_n(&stream->finished, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&stream->done, __ATOMIC_SEQ_CST) <= position) futex_wait(&stream->finished, seen, 0, 0);
        __atomic_sub_fetch(&stream->watchers, 1, __ATOMIC_SEQ_CST);
    }
}

int stream_idle(struct stream *stream) {
    uint64_t tail = __atomic_load_n(&stream->tail, __ATOMIC_ACQUIRE);
    /* a thread that has seen an event must not find the stream still busy with signaling it */
    while (tail && !stream_done(stream, tail - 1) && __atomic_load_n(&stream->marking, __ATOMIC_SEQ_CST)) sched_yield();
    return tail == 0 || stream_done(stream, tail - 1);
}

void stream_drain(struct stream *stream) {
    uint64_t tail = __atomic_load_n(&stream->tail, __ATOMIC_ACQUIRE);
    if (tail) stream_wait(stream, tail - 1);
}

static void put_wait_for(struct stream *stream, struct stream *other) {
    uint64_t tail = __atomic_load_n(&other->tail, __ATOMIC_ACQUIRE);
    if (tail == 0 || stream_done(other, tail - 1)) return;
    stream_retain(other);
    put(stream, &(struct operation){.kind = OPERATION_WAIT_STREAM, .stream = {other, tail - 1}});
}

/* The legacy stream and the blocking streams wait for each other; non-blocking streams do not take part. */
static void synchronize_with_legacy(struct stream *stream) {
    struct context *context = stream->context;
    if (stream->kind != STREAM_IS_LEGACY) {
        if (!(stream->flags & CU_STREAM_NON_BLOCKING)) put_wait_for(stream, context->legacy);
        return;
    }
    if (__atomic_load_n(&context->blocking, __ATOMIC_RELAXED) == 0) return;
    pthread_mutex_lock(&context->lock);
    for (struct stream *other = context->streams; other; other = other->next)
        if (other != stream && !(other->flags & CU_STREAM_NON_BLOCKING)) put_wait_for(stream, other);
    pthread_mutex_unlock(&context->lock);
}

CUresult stream_put(struct stream *stream, const struct operation *operation, uint64_t *position) {
    if (__builtin_expect(stream_is_captured(stream), 0)) {
        CUresult error;
        if (position) *position = 0;
        if (capture_put(stream, operation, &error)) return error;
    }
    if (__builtin_expect(
            stream->kind == STREAM_IS_LEGACY && __atomic_load_n(&stream->context->capturing, __ATOMIC_RELAXED), 0)) {
        CUresult error = capture_forbids(stream->context);
        if (error) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (__builtin_expect(!__atomic_load_n(&stream->started, __ATOMIC_ACQUIRE), 0)) {
        start(stream);
        REQUIRE(stream->started, CUDA_ERROR_OPERATING_SYSTEM);
    }
    synchronize_with_legacy(stream);
    uint64_t at = put(stream, operation);
    if (position) *position = at;
    return CUDA_SUCCESS;
}

CUresult stream_put_and_wait(struct stream *stream, const struct operation *operation) {
    uint64_t position;
    if (stream_is_captured(stream)) return capture_break(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CUresult error = stream_put(stream, operation, &position);
    if (error) return error;
    stream_wait(stream, position);
    return __atomic_load_n(&stream->context->error, __ATOMIC_ACQUIRE);
}

/* Whether the first of these operations that takes device time needs the compute engine; -1: none takes device time. */
static int first_computes(const struct operation *operation, const struct operation *end) {
    for (int found; operation < end; operation++) {
        switch (operation->kind) {
        case OPERATION_NOTHING:
        case OPERATION_RECORD:
        case OPERATION_WRITE_VALUE: break;
        case OPERATION_KERNEL: return 1;
        case OPERATION_SET:
            if (operation->set.width && operation->set.height) return 1;
            break;
        case OPERATION_GRAPH:
            found = first_computes(operation->graph.exec->operations,
                                   operation->graph.exec->operations + operation->graph.exec->count);
            if (found >= 0) return found;
            break;
        default: return 0;
        }
    }
    return -1;
}

int stream_wants_engine(struct stream *stream) {
    int found = first_computes(stream->graph_next, stream->graph_end);
    for (uint64_t position = stream->head; found < 0 && position < stream->head + RING; position++) {
        struct cell *cell = &stream->ring[position % RING];
        if (__atomic_load_n(&cell->turn, __ATOMIC_ACQUIRE) != position + 1) return 0;
        found = first_computes(&cell->operation, &cell->operation + 1);
    }
    return found > 0;
}
