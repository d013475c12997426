/* A thread in front of something that is shut: the gate of a GPU, or every driver call of a suspended process. */
#pragma once

#include "contexts/lanes.h"

enum waiting_end {
    WAITING_OPENED,      /* look again */
    WAITING_INTERRUPTED, /* by a signal: a few calls of the thread may go through (waiting_goes_through) */
    WAITING_UNANSWERED,  /* the agent has not answered for too long: go on without it */
};

/* Wait while `*word` is `shut`, and have the background thread ask the agent for the GPU: 35 s without an answer at
   most. Holds no lock, and must not be inside a call. */
enum waiting_end waiting_in_front(_Atomic uint32_t *word, uint32_t shut, struct gpu *gpu, struct passage *passage);

/* Whether a wait of this thread that a signal interrupted now may end; a few of its calls go through then. While the
   process is suspended only a wait for memory ends (shortage.c), and no call goes through. */
bool waiting_interrupted(struct passage *passage);

/* Whether this call is on the way out of one that a signal interrupted. */
bool waiting_goes_through(struct passage *passage);

void waiting_forget(void); /* in a forked child */
