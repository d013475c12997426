/* The gate of each GPU, open or shut, and the threads that wait at it. launch.h describes the cost for a launch.

   Only the background thread and the end of the program open and shut gates. These functions take a private lock and
   may be called with any other lock held. */
#pragma once

#include "driver/gpus.h"

struct passage;

enum gate_state {
    GATE_SHUT,
    GATE_OPEN,
    GATE_RESTING, /* open; the background thread does not poll for launches, and the next launch wakes it */
};

HIDDEN bool gate_fences; /* the kernel lacks membarrier: each launch makes a fence */

void gate_prepare(void);            /* once per process, before the first launch */
void gate_open(struct gpu *gpu);    /* and wake the waiting threads */
void gate_shut(struct gpu *gpu);    /* afterwards every thread sees the gate shut or is seen inside */
void gate_rest(struct gpu *gpu);    /* afterwards the next launch wakes the background thread or is seen inside */
void gate_stir(struct gpu *gpu);    /* end the resting state; for the launch that wakes the background thread */
void gate_refresh(struct gpu *gpu); /* set `fast` from `gate_state`, the pace and the captures in progress */

enum gate_wait_end {
    GATE_WAIT_OVER,        /* read the word again */
    GATE_WAIT_INTERRUPTED, /* interrupted by a signal: a few calls of the thread may pass (gate_lets_through) */
    GATE_WAIT_UNANSWERED,  /* the agent has not answered for too long: continue without it */
};

/* Wait while `*word` is `shut`, and make the background thread (lease_step) request the GPU from the agent. Waits at
   most 35 s without an answer. The word is a gate, the suspension of the process (launch.c), or a count of grants
   (shortage.c). The caller must hold no lock and must not be inside a call. */
enum gate_wait_end gate_wait(_Atomic uint32_t *word, uint32_t shut, struct gpu *gpu, struct passage *passage);

/* Whether a wait that a signal has interrupted may end now; a few of the thread's calls may then pass. While the
   process is suspended, only a wait for memory ends (shortage.c), and no call passes. */
bool gate_interrupted(struct passage *passage);

/* Whether this call may pass without a lease, after a signal has interrupted a wait of its thread. */
bool gate_lets_through(struct passage *passage);
