/* Events: marks in streams that can be waited for and timed. */
#ifndef SIMGPU_EVENT_H
#define SIMGPU_EVENT_H

#include "cuda/streams/context.h"

#define EVENT_MAGIC 0x45564e54u

struct event {
    uint32_t magic;
    uint32_t references;
    struct context *context;
    unsigned flags;
    uint64_t recorded;  /* number of records */
    uint64_t completed; /* the last record that was reached */
    uint64_t time;      /* instant of the last reached record */
    uint32_t reached;   /* futex word */
    uint32_t watchers;
    /* recorded in a capture: */
    struct capture_run *run;
    CUgraphNode *nodes;
    size_t node_count;
};

void event_reach(struct event *event, uint64_t number, uint64_t instant);
void event_wait(struct event *event, uint64_t number);
void event_retain(struct event *event);
void event_release(struct event *event);

#endif
