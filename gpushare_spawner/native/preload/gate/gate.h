/* The gate of each GPU: open or shut. launch.h has what a launch pays for it.

   For the side that opens and shuts: the background thread, and the end of the program. All of this takes a lock of its
   own, and may be called with any other lock held. */
#pragma once

#include "driver/gpus.h"

enum gate_state {
    GATE_SHUT,
    GATE_OPEN,
    GATE_RESTING, /* open; the next launch wakes the background thread, which does not look for one */
};

HIDDEN bool gate_fences; /* membarrier is not to be had: each launch pays for a fence */

void gate_prepare(void);            /* once per process, before the first launch */
void gate_open(struct gpu *gpu);    /* and wake the threads that wait */
void gate_shut(struct gpu *gpu);    /* afterwards every thread sees it shut, or is seen inside */
void gate_rest(struct gpu *gpu);    /* from now on the next launch wakes the background thread, or is seen inside */
void gate_stir(struct gpu *gpu);    /* and the one after it does not */
void gate_refresh(struct gpu *gpu); /* `fast` follows `open`, the pace and the captures in progress */
void gate_forget(void);             /* in a forked child */
