/* What NVML is to show of the session: its limit and its processes, as the agent says. A program may use NVML without
   ever calling cuInit, so these come from a question of their own, over a connection that ends with the answer.

   Any thread. Every function asks the agent where its last answer is older than a second, and waits for half a second
   at most; other threads that want figures wait with it. Nothing is asked again within a second, answered or not, and
   an agent that is there and does not answer is asked less and less often, every 10 s in the end. The last answer
   stands for 5 s where the next one does not come. */
#pragma once

#include "platform/common.h"

#define FIGURES_PROCESSES 32

struct process_figures {
    unsigned pid;     /* as the process numbers itself */
    uint64_t bytes;   /* allocated */
    unsigned percent; /* of the GPU's time */
};

struct gpu_figures {
    unsigned char uuid[16];
    uint64_t total, used; /* bytes: the session's limit, and what its processes have allocated */
    bool movable;         /* memory may leave the GPU: all up to the limit can be had */
    bool with_use;        /* the agent says `percent` */
    unsigned percent;     /* the part of the GPU's time that the session had in the last second */
    uint64_t at;          /* when the agent said so, microseconds since the epoch */
    int processes;
    struct process_figures process[FIGURES_PROCESSES];
};

/* Whether NVML is to show the share at all: sharing is wanted, and GPUSHARE_NVML is not "driver". Asks nobody. */
bool figures_wanted(void);

/* The session's GPUs, in the order in which CUDA numbers them, at most `room`. Returns how many there are; -1: not
   known, NVML is to show what the driver says. */
int figures_gpus(unsigned char (*uuids)[16], int room);

/* One GPU. False: it is not the session's, or nothing is known now. */
bool figures_of(const unsigned char uuid[16], struct gpu_figures *figures);
