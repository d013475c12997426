/* Stream capture: operations that go into a graph instead of the ring. */
#ifndef SIMGPU_CAPTURE_H
#define SIMGPU_CAPTURE_H

#include "stream.h"

struct event;

/* What a capturing stream adds next depends on these nodes. */
struct capture {
    struct capture_run *run;
    CUgraphNode *last;
    size_t count;
    int origin; /* the stream that began it */
};

/* Adds the operation to the graph that the stream captures. */
CUresult capture_put(struct stream *stream, const struct operation *operation);

/* cuEventRecord and cuStreamWaitEvent in captures: the event remembers the nodes; a stream that waits for it joins. */
CUresult capture_record(struct stream *stream, struct event *event);
CUresult capture_join(struct stream *stream, struct event *event);

/* The stream is destroyed: what it captured is lost. */
void capture_abandon(struct stream *stream);

/* The event is recorded anew, or gone. */
void capture_forget(struct event *event);

/* Breaks the capture of a stream: a call came that a capture cannot hold. */
CUresult capture_break(struct stream *stream, CUresult why);

/* An unsafe call (an allocation, a synchronisation of everything): fails while a capture forbids it to this thread. */
CUresult capture_forbids(struct context *context);

/* For calls that wait for all of the context: they break the captures in it. */
CUresult capture_forbids_waiting(struct context *context);

#endif
