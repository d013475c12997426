/* Stream capture: operations that go into a graph instead of the ring. */
#ifndef SIMGPU_CAPTURE_H
#define SIMGPU_CAPTURE_H

#include "cuda/streams/stream.h"

struct event;

/* What a capturing stream adds next depends on these nodes. */
struct capture {
    struct capture_run *run;
    CUgraphNode *last;
    size_t count;
    int origin; /* the stream that began it */
};

/* Any thread may begin or end the capture of a stream: true now may be false when the caller looks again. */
static inline int stream_is_captured(struct stream *stream) {
    return __atomic_load_n(&stream->capture, __ATOMIC_ACQUIRE) != NULL;
}
int event_is_captured(struct event *event); /* recorded in a capture */

/* The next three say whether the call was one for a capture; only then it is done, and `error` is its result. */

/* Adds the operation to the graph that the stream captures. */
int capture_put(struct stream *stream, const struct operation *operation, CUresult *error);

/* cuEventRecord and cuStreamWaitEvent in captures: the event remembers the nodes; a stream that waits for it joins. */
int capture_record(struct stream *stream, struct event *event, CUresult *error);
int capture_join(struct stream *stream, struct event *event, CUresult *error);

/* The stream is destroyed: what it captured is lost. */
void capture_abandon(struct stream *stream);

/* The event is recorded anew, or gone. */
void capture_forget(struct event *event);

/* Breaks the capture of a stream, if there is one: a call came that a capture cannot hold. */
CUresult capture_break(struct stream *stream, CUresult why);

/* An unsafe call (an allocation, a synchronisation of everything): fails while a capture forbids it to this thread. */
CUresult capture_forbids(struct context *context);

/* For calls that wait for all of the context: they break the captures in it. */
CUresult capture_forbids_waiting(struct context *context);

#endif
