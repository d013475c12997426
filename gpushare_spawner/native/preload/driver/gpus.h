/* The GPUs that the driver shows to this process. */
#pragma once

#include <stdatomic.h>

#include "driver/cuda_abi.h"
#include "platform/common.h"

#define MAX_GPUS 64

struct gpu {
    int index;
    CUdevice device;
    CUuuid uuid;
    bool can_manage; /* managed memory may be accessed by both sides at once: without that nothing can be oversubscribed
                      */

    /* The gate. `open` is the truth and the futex that launching threads wait on; `fast` is 1 only while a launch may
       skip every further question: the gate is open, the lease has no pace and nothing in the process is being captured
       into a graph. */
    _Atomic uint32_t open;
    _Atomic uint32_t fast;
    _Atomic bool paced;        /* the lease has a pace (pace.c) */
    _Atomic uint32_t burst;    /* number of the burst: lanes with work carry it */
    _Atomic uint32_t waiters;  /* threads at the shut gate */
    _Atomic uint32_t progress; /* changes while an answer is being worked for */

    /* Accounting, bytes (account.c). */
    _Atomic uint64_t managed;
    _Atomic uint64_t plain;
    _Atomic uint64_t cached;   /* of `managed`: freed by the program, kept for its next allocations (block_cache.c) */
    _Atomic bool changed;      /* since the agent was told (worker.c) */
    _Atomic bool graph_memory; /* memory nodes of graphs were seen; the driver knows their size */

    /* What the agent said (lease.c). */
    _Atomic bool shared;    /* one of the session's GPUs */
    _Atomic uint64_t total; /* shown as its memory; 0: the real figure */

    /* Memory that the session may have (allowance.c), bytes. */
    _Atomic uint64_t allowance; /* this process may allocate so much in all */
    _Atomic uint64_t others;    /* allocated by the session's other processes */
    _Atomic bool reserving;     /* the agent grants the allowance, and can be asked for more */
};

HIDDEN struct gpu gpus[MAX_GPUS];
HIDDEN int gpu_count;

/* Ask the driver which there are. */
void gpus_find(void);

/* The GPU of the calling thread's context; NULL without one. */
struct gpu *gpu_current(void);
struct gpu *gpu_of_device(CUdevice device);
struct gpu *gpu_of_uuid(const unsigned char uuid[16]);
