/* Stream capture: operations that go into a graph instead of the ring. */
#ifndef SIMGPU_CAPTURE_H
#define SIMGPU_CAPTURE_H

#include "cuda/streams/stream.h"

struct event;

/* The next node of a capturing stream depends on these nodes. */
struct capture {
    struct capture_run *run;
    CUgraphNode *last;
    size_t count;
    int origin; /* the stream that began it */
};

/* Any thread may begin or end the capture of a stream, so the result may change at any time. */
static inline int stream_is_captured(struct stream *stream) {
    return __atomic_load_n(&stream->capture, __ATOMIC_ACQUIRE) != NULL;
}
int event_is_captured(struct event *event); /* recorded in a capture */

/* The next three functions return whether the call belonged to a capture; if so, it is done, and `error` is its
 * result. */

/* Add the operation to the graph that the stream captures. */
int capture_put(struct stream *stream, const struct operation *operation, CUresult *error);

/* cuEventRecord and cuStreamWaitEvent in captures: the event stores the nodes; a stream that waits for it joins. */
int capture_record(struct stream *stream, struct event *event, CUresult *error);
int capture_join(struct stream *stream, struct event *event, CUresult *error);

/* Handle the destruction of a stream, whose capture is lost. */
void capture_abandon(struct stream *stream);

/* Clear an event that is recorded again or destroyed. */
void capture_forget(struct event *event);

/* Break the capture of a stream, if any, after a call that a capture cannot contain. */
CUresult capture_break(struct stream *stream, CUresult why);

/* Check an unsafe call (an allocation, a global synchronization), which fails while a capture forbids it to this
 * thread. */
CUresult capture_forbids(struct context *context);

/* For calls that wait for all work of the context, which break the captures in it. */
CUresult capture_forbids_waiting(struct context *context);

#endif
