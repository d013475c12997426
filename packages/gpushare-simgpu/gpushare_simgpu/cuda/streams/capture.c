#define _GNU_SOURCE /* for the initializer of a recursive mutex */
#include "cuda/streams/capture.h"

#include <stdlib.h>
#include <string.h>

#include "cuda/streams/call_lock.h"
#include "cuda/streams/event.h"
#include "cuda/streams/graph.h"
#include "cuda/driver/ptsz.h"

/* One capture: from cuStreamBeginCapture to cuStreamEndCapture, over all the streams that joined. */
struct capture_run {
    uint32_t references; /* number of streams in it and of events that refer to it */
    struct graph *graph;
    int own_graph; /* created for this capture, not passed by the program */
    struct stream *origin;
    struct context *context;
    CUstreamCaptureMode mode;
    pthread_t thread;
    int broken;
    uint64_t id;
};

/* Number of captures begun by this thread in a mode that forbids it unsafe calls. */
static __thread unsigned own_captures;
static __thread CUstreamCaptureMode thread_mode = CAPTURE_MODE_GLOBAL;
static uint64_t last_id;

/* Protects the captures that streams and events refer to, because any thread may use a stream that another thread
 * captures. Recursive, because a graph that is dropped here may hold the last reference to an event. Taken before a
 * context's lock. */
static pthread_mutex_t captures_lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

/* Make the call with the lock held and return its result. */
#define LOCKED(call)                                                                                                   \
    pthread_mutex_lock(&captures_lock);                                                                                \
    CUresult locked_result = (call);                                                                                   \
    pthread_mutex_unlock(&captures_lock);                                                                              \
    return locked_result

static void release_run(struct capture_run *run) {
    if (__atomic_sub_fetch(&run->references, 1, __ATOMIC_ACQ_REL)) return;
    free(run);
}

static void leave(struct stream *stream) {
    struct capture *capture = stream->capture;
    __atomic_store_n(&stream->capture, NULL, __ATOMIC_RELEASE);
    release_run(capture->run);
    free(capture->last);
    free(capture);
}

/* An empty list may be NULL, which must not be passed to memcpy even for 0 bytes. */
static void copy_nodes(struct node **to, struct node *const *from, size_t count) {
    if (count) memcpy(to, from, count * sizeof *to);
}

static CUresult set_last(struct capture *capture, struct node *const *nodes, size_t count) {
    struct node **copy = malloc((count ? count : 1) * sizeof *copy);
    REQUIRE(copy, CUDA_ERROR_OUT_OF_MEMORY);
    copy_nodes(copy, nodes, count);
    free(capture->last);
    capture->last = copy;
    capture->count = count;
    return CUDA_SUCCESS;
}

static CUresult join(struct stream *stream, struct capture_run *run, struct node *const *nodes, size_t count,
                     int origin) {
    struct capture *capture = calloc(1, sizeof *capture);
    REQUIRE(capture, CUDA_ERROR_OUT_OF_MEMORY);
    capture->run = run;
    capture->origin = origin;
    if (set_last(capture, nodes, count)) {
        free(capture);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    __atomic_add_fetch(&run->references, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&stream->capture, capture, __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
}

/* End the run: the calls that it forbade are allowed again. */
static void finish(struct capture_run *run) {
    if (run->mode != CAPTURE_MODE_RELAXED && pthread_equal(run->thread, pthread_self())) own_captures--;
    if (run->mode == CAPTURE_MODE_GLOBAL) __atomic_sub_fetch(&run->context->capturing, 1, __ATOMIC_RELAXED);
    run->broken = 1; /* nothing can join it any more */
}

void capture_abandon(struct stream *stream) {
    pthread_mutex_lock(&captures_lock);
    if (stream->capture) {
        struct capture_run *run = stream->capture->run;
        if (stream->capture->origin) {
            finish(run);
            if (run->own_graph) graph_drop(run->graph);
        }
        run->broken = 1;
        leave(stream);
    }
    pthread_mutex_unlock(&captures_lock);
}

CUresult capture_break(struct stream *stream, CUresult why) {
    pthread_mutex_lock(&captures_lock);
    if (stream->capture) stream->capture->run->broken = 1;
    pthread_mutex_unlock(&captures_lock);
    return why;
}

static CUresult put(struct capture *capture, const struct operation *operation) {
    struct node *node;
    REQUIRE(!capture->run->broken, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CUresult error = graph_add(capture->run->graph, operation, capture->last, capture->count, &node);
    return error ? error : set_last(capture, &node, 1);
}

int capture_put(struct stream *stream, const struct operation *operation, CUresult *error) {
    pthread_mutex_lock(&captures_lock);
    int captured = stream_is_captured(stream);
    if (captured) *error = put(stream->capture, operation);
    pthread_mutex_unlock(&captures_lock);
    return captured;
}

static CUresult record(struct capture *capture, struct event *event) {
    REQUIRE(!capture->run->broken, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    struct node **nodes = malloc((capture->count ? capture->count : 1) * sizeof *nodes);
    REQUIRE(nodes, CUDA_ERROR_OUT_OF_MEMORY);
    copy_nodes(nodes, capture->last, capture->count);
    capture_forget(event);
    event->nodes = nodes;
    event->node_count = capture->count;
    __atomic_add_fetch(&capture->run->references, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&event->run, capture->run, __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
}

int capture_record(struct stream *stream, struct event *event, CUresult *error) {
    if (!stream_is_captured(stream)) return 0;
    pthread_mutex_lock(&captures_lock);
    int captured = stream_is_captured(stream);
    if (captured) *error = record(stream->capture, event);
    pthread_mutex_unlock(&captures_lock);
    return captured;
}

int event_is_captured(struct event *event) {
    return __atomic_load_n(&event->run, __ATOMIC_ACQUIRE) != NULL;
}

void capture_forget(struct event *event) {
    if (!event_is_captured(event)) return;
    pthread_mutex_lock(&captures_lock);
    if (event->run) release_run(event->run);
    free(event->nodes);
    event->nodes = NULL;
    event->node_count = 0;
    __atomic_store_n(&event->run, NULL, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&captures_lock);
}

static CUresult wait_in_capture(struct stream *stream, struct event *event) {
    /* an event from outside the capture, or of another capture, cannot be waited for in it */
    if (stream->capture && (!event->run || event->run != stream->capture->run))
        return capture_break(stream,
                             event->run ? CUDA_ERROR_STREAM_CAPTURE_MERGE : CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    REQUIRE(!event->run->broken, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    REQUIRE(stream->kind != STREAM_IS_LEGACY, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    if (!stream->capture) return join(stream, event->run, event->nodes, event->node_count, 0);
    struct capture *capture = stream->capture;
    struct node **all = malloc((capture->count + event->node_count + 1) * sizeof *all);
    REQUIRE(all, CUDA_ERROR_OUT_OF_MEMORY);
    size_t count = capture->count;
    copy_nodes(all, capture->last, count);
    for (size_t i = 0; i < event->node_count; i++) {
        size_t known = 0;
        while (known < count && all[known] != event->nodes[i]) known++;
        if (known == count) all[count++] = event->nodes[i];
    }
    CUresult error = set_last(capture, all, count);
    free(all);
    return error;
}

int capture_join(struct stream *stream, struct event *event, CUresult *error) {
    if (!event_is_captured(event) && !stream_is_captured(stream)) return 0;
    pthread_mutex_lock(&captures_lock);
    int captured = event_is_captured(event) || stream_is_captured(stream);
    if (captured) *error = wait_in_capture(stream, event);
    pthread_mutex_unlock(&captures_lock);
    return captured;
}

CUresult capture_forbids(struct context *context) {
    REQUIRE(thread_mode != CAPTURE_MODE_RELAXED, CUDA_SUCCESS);
    REQUIRE(own_captures == 0, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (thread_mode == CAPTURE_MODE_GLOBAL && __atomic_load_n(&context->capturing, __ATOMIC_RELAXED))
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return CUDA_SUCCESS;
}

CUresult capture_forbids_waiting(struct context *context) {
    CUresult error = CUDA_SUCCESS;
    pthread_mutex_lock(&captures_lock);
    pthread_mutex_lock(&context->lock);
    for (struct stream *stream = context->streams; stream; stream = stream->next)
        if (stream->capture) error = capture_break(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    pthread_mutex_unlock(&context->lock);
    pthread_mutex_unlock(&captures_lock);
    return error;
}

static CUresult begin(CUstream handle, struct graph *graph, struct node *const *nodes, size_t count,
                      CUstreamCaptureMode mode) {
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(mode <= CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(stream->kind != STREAM_IS_LEGACY, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    REQUIRE(!stream->capture, CUDA_ERROR_ILLEGAL_STATE);
    struct capture_run *run = calloc(1, sizeof *run);
    REQUIRE(run, CUDA_ERROR_OUT_OF_MEMORY);
    *run = (struct capture_run){.references = 1,
                                .graph = graph ? graph : graph_make(),
                                .own_graph = !graph,
                                .origin = stream,
                                .context = stream->context,
                                .mode = mode,
                                .thread = pthread_self()};
    run->id = __atomic_add_fetch(&last_id, 1, __ATOMIC_RELAXED);
    error = run->graph ? join(stream, run, nodes, count, 1) : CUDA_ERROR_OUT_OF_MEMORY;
    if (!error && mode != CAPTURE_MODE_RELAXED) own_captures++;
    if (!error && mode == CAPTURE_MODE_GLOBAL) __atomic_add_fetch(&stream->context->capturing, 1, __ATOMIC_RELAXED);
    release_run(run);
    return error;
}

static CUresult end(CUstream handle, CUgraph *out) {
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(stream->capture, CUDA_ERROR_ILLEGAL_STATE);
    struct capture_run *run = stream->capture->run;
    REQUIRE(stream->capture->origin, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    REQUIRE(run->mode == CAPTURE_MODE_RELAXED || pthread_equal(run->thread, pthread_self()),
            CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    /* every stream that joined must have rejoined: the origin depends on its last node */
    pthread_mutex_lock(&stream->context->lock);
    for (struct stream *other = stream->context->streams; other; other = other->next) {
        if (other == stream || !other->capture || other->capture->run != run) continue;
        for (size_t i = 0; i < other->capture->count; i++) {
            struct node *node = other->capture->last[i];
            int followed = 0;
            for (size_t k = 0; k < stream->capture->count; k++) followed |= stream->capture->last[k] == node;
            for (size_t k = 0; k < run->graph->count && !followed; k++)
                for (size_t b = 0; b < run->graph->nodes[k]->before_count; b++)
                    followed |= run->graph->nodes[k]->before[b] == node;
            if (!followed) error = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
        }
        leave(other);
    }
    pthread_mutex_unlock(&stream->context->lock);
    if (run->broken) error = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    finish(run);
    if (out) *out = error ? NULL : run->graph;
    if ((error || !out) && run->own_graph) graph_drop(run->graph);
    leave(stream);
    return error;
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    LOCKABLE();
    LOCKED(begin(stream, NULL, NULL, 0, mode));
}

EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
    LOCKABLE();
    LOCKED(begin(PER_THREAD(stream), NULL, NULL, 0, mode));
}

EXPORT CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *nodes,
                                            const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode) {
    REQUIRE(graph && graph->magic == GRAPH_MAGIC && (nodes || count == 0), CUDA_ERROR_INVALID_VALUE);
    LOCKABLE();
    LOCKED(begin(stream, graph, nodes, count, mode));
}

EXPORT CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *nodes,
                                                 const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode) {
    return cuStreamBeginCaptureToGraph(PER_THREAD(stream), graph, nodes, edges, count, mode);
}

EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    LOCKABLE();
    LOCKED(end(stream, graph));
}

EXPORT CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) {
    LOCKABLE();
    LOCKED(end(PER_THREAD(stream), graph));
}

static CUresult info(CUstream handle, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph,
                     const CUgraphNode **nodes, const CUgraphEdgeData **edges, size_t *count) {
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(status, CUDA_ERROR_INVALID_VALUE);
    if (stream->kind == STREAM_IS_LEGACY && __atomic_load_n(&stream->context->capturing, __ATOMIC_RELAXED) &&
        capture_forbids(stream->context))
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    struct capture *capture = stream->capture;
    *status = !capture ? CAPTURE_NONE : capture->run->broken ? CAPTURE_INVALIDATED : CAPTURE_ACTIVE;
    if (!capture) return CUDA_SUCCESS;
    if (id) *id = capture->run->id;
    if (graph) *graph = capture->run->graph;
    if (nodes) *nodes = capture->last;
    if (edges) *edges = NULL; /* no edge carries data */
    if (count) *count = capture->count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    LOCKED(info(stream, status, NULL, NULL, NULL, NULL, NULL));
}

EXPORT CUresult cuStreamIsCapturing_ptsz(CUstream stream, CUstreamCaptureStatus *status) {
    LOCKED(info(PER_THREAD(stream), status, NULL, NULL, NULL, NULL, NULL));
}

EXPORT CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, uint64_t *id) {
    LOCKED(info(stream, status, id, NULL, NULL, NULL, NULL));
}

EXPORT CUresult cuStreamGetCaptureInfo_ptsz(CUstream stream, CUstreamCaptureStatus *status, uint64_t *id) {
    LOCKED(info(PER_THREAD(stream), status, id, NULL, NULL, NULL, NULL));
}

EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph,
                                          const CUgraphNode **nodes, size_t *count) {
    LOCKED(info(stream, status, id, graph, nodes, NULL, count));
}

EXPORT CUresult cuStreamGetCaptureInfo_v2_ptsz(CUstream stream, CUstreamCaptureStatus *status, uint64_t *id,
                                               CUgraph *graph, const CUgraphNode **nodes, size_t *count) {
    LOCKED(info(PER_THREAD(stream), status, id, graph, nodes, NULL, count));
}

EXPORT CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph,
                                          const CUgraphNode **nodes, const CUgraphEdgeData **edges, size_t *count) {
    LOCKED(info(stream, status, id, graph, nodes, edges, count));
}

EXPORT CUresult cuStreamGetCaptureInfo_v3_ptsz(CUstream stream, CUstreamCaptureStatus *status, uint64_t *id,
                                               CUgraph *graph, const CUgraphNode **nodes, const CUgraphEdgeData **edges,
                                               size_t *count) {
    LOCKED(info(PER_THREAD(stream), status, id, graph, nodes, edges, count));
}

/* flags: 0 adds to the next node's dependencies, 1 replaces them */
static CUresult update_dependencies(CUgraphNode *nodes, size_t count, unsigned flags, CUstream handle) {
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(stream->capture, CUDA_ERROR_ILLEGAL_STATE);
    REQUIRE(flags <= 1 && (nodes || count == 0), CUDA_ERROR_INVALID_VALUE);
    struct capture *capture = stream->capture;
    size_t kept = flags == 1 ? 0 : capture->count;
    struct node **all = malloc((kept + count + 1) * sizeof *all);
    REQUIRE(all, CUDA_ERROR_OUT_OF_MEMORY);
    copy_nodes(all, capture->last, kept);
    copy_nodes(all + kept, nodes, count);
    error = set_last(capture, all, kept + count);
    free(all);
    return error;
}

EXPORT CUresult cuStreamUpdateCaptureDependencies(CUstream stream, CUgraphNode *nodes, size_t count, unsigned flags) {
    LOCKABLE();
    LOCKED(update_dependencies(nodes, count, flags, stream));
}

EXPORT CUresult cuStreamUpdateCaptureDependencies_ptsz(CUstream stream, CUgraphNode *nodes, size_t count,
                                                       unsigned flags) {
    LOCKABLE();
    LOCKED(update_dependencies(nodes, count, flags, PER_THREAD(stream)));
}

EXPORT CUresult cuStreamUpdateCaptureDependencies_v2(CUstream stream, CUgraphNode *nodes, const CUgraphEdgeData *edges,
                                                     size_t count, unsigned flags) {
    LOCKABLE();
    LOCKED(update_dependencies(nodes, count, flags, stream));
}

EXPORT CUresult cuStreamUpdateCaptureDependencies_v2_ptsz(CUstream stream, CUgraphNode *nodes,
                                                          const CUgraphEdgeData *edges, size_t count, unsigned flags) {
    LOCKABLE();
    LOCKED(update_dependencies(nodes, count, flags, PER_THREAD(stream)));
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    REQUIRE_INIT();
    REQUIRE(mode && *mode <= CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
