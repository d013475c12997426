/* The session's figures that NVML shows: its limit and its processes, as reported by the agent. A program may use NVML
   without calling cuInit, so the figures come from a separate query over a connection that ends with the answer.

   Any thread. Every function queries the agent if its last answer is older than a second, and waits at most half a
   second; other threads that need figures wait for the same query. Queries are at least a second apart, with or without
   an answer; an agent that accepts the connection but does not answer is queried less and less often, down to every 10
   s. Without a newer answer, an answer is valid for 5 s. */
#pragma once

#include "platform/common.h"

#define FIGURES_PROCESSES 32

struct process_figures {
    unsigned pid;     /* the process's own pid */
    uint64_t bytes;   /* allocated */
    unsigned percent; /* of the GPU's time */
};

struct gpu_figures {
    unsigned char uuid[16];
    uint64_t total, used; /* bytes: the session's limit, and what its processes have allocated */
    bool movable;         /* memory may leave the GPU, so all memory up to the limit is available */
    bool with_use;        /* the agent sends `percent` */
    unsigned percent;     /* the part of the GPU's time that the session had in the last second */
    uint64_t at;          /* the time of the answer, microseconds since the epoch */
    int processes;
    struct process_figures process[FIGURES_PROCESSES];
};

/* Whether NVML shows the share at all: the process is shared and GPUSHARE_NVML is not "driver". Does not query the
   agent. */
bool figures_enabled(void);

/* List at most `room` of the session's GPUs, in CUDA's order. Returns their number; -1: unknown, and NVML shows the
   driver's GPUs. */
int figures_gpus(unsigned char (*uuids)[16], int room);

/* Read the figures of a GPU. False: the GPU is not the session's, or the agent has not answered. */
bool figures_of(const unsigned char uuid[16], struct gpu_figures *figures);
