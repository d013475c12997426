/* The GPUs that the driver shows to this process.

   The words of this library:
   - device memory: what cuMemAlloc and its kin give out. Managed memory: CUDA's unified memory, which can leave the
   GPU. Converted memory: managed memory that the program asked for as device memory.
   - allocation: one piece of memory that the program has. Block: freed memory that is kept for a later allocation.
   - account: the sum of the allocations of this process on a GPU. Allowance: the sum that the agent lets it have.
   - launch: any call that puts work on a GPU. Gate: open while launches may go. Passage: the record of one thread that
     launches. Lane: one stream of one context.
   - lease: the agent's permission to open the gate. Burst: work from the first launch until the device is quiet.
   - mark: an event behind work, that says when the work is done. Pace: a bound on work that is queued and not done.
   - turn: the right of one thread to make driver calls in the background (driver_turn.h), or to begin a capture
     (captures.h).
   - frame: a message of the session socket. */
#pragma once

#include <stdatomic.h>

#include "driver/cuda_abi.h"
#include "platform/common.h"

#define MAX_GPUS 64

/* Memory nodes of graphs were seen; pools were. */
enum driver_memory_of { DRIVER_MEMORY_OF_GRAPHS = 1, DRIVER_MEMORY_OF_POOLS = 2 };

struct gpu {
    int index;
    CUdevice device;
    CUuuid uuid;
    bool can_manage; /* managed memory may be accessed by both sides at once: without that nothing can be oversubscribed
                      */

    /* The gate. `open` is the truth (enum gate_state) and the futex that launching threads wait on; `fast` is 1 only
       while a launch may skip every further question: the gate is open, the lease has no pace and nothing in the
       process is being captured into a graph. */
    _Atomic uint32_t open;
    _Atomic uint32_t fast;
    _Atomic bool paced;        /* the lease has a pace (pace.c) */
    _Atomic uint32_t burst;    /* number of the burst: lanes with work carry it */
    _Atomic uint32_t waiters;  /* threads at the shut gate */
    _Atomic uint32_t progress; /* changes while an answer is being worked for */

    /* Calls that the driver refused for lack of device memory, and that wait for a lease (shortage.c). */
    _Atomic uint64_t short_of;    /* bytes that they need, */
    _Atomic uint64_t short_above; /* beyond those that the process had then */
    _Atomic uint32_t shortages;   /* how many there were */
    _Atomic uint32_t grants;      /* futex: changes when a lease begins, when the agent says that the memory does not
                                     come, or when there is no agent */
    _Atomic uint32_t refusals;    /* how often the agent said so */
    _Atomic bool restate;         /* the agent was told of more memory than there is: tell it again (worker.c) */

    /* Accounting, bytes (account.c). */
    _Atomic uint64_t managed;
    _Atomic uint64_t plain;
    _Atomic uint64_t cached; /* of `managed`: freed by the program, kept for its next allocations (block_cache.c) */
    _Atomic bool changed;    /* since the agent was told (worker.c) */
    _Atomic uint64_t pooled; /* plain stream-ordered memory, not in `plain` (pool_memory.c) */
    _Atomic unsigned char driver_memory; /* for what the driver may hold memory: enum driver_memory_of */

    /* What the agent said (worker.c). */
    _Atomic bool shared;    /* one of the session's GPUs */
    _Atomic uint64_t total; /* shown as its memory; 0: the real figure */

    /* Memory that the session may have (allowance.c), bytes. */
    _Atomic uint64_t allowance; /* this process may allocate so much in all */
    _Atomic uint64_t others;    /* allocated by the session's other processes */
    _Atomic bool reserving;     /* the agent grants the allowance, and can be asked for more */
};

HIDDEN struct gpu gpus[MAX_GPUS];
HIDDEN int gpu_count;

/* Ask the driver which there are. Once, at cuInit. */
void gpus_find(void);

/* The GPU of the calling thread's context; NULL without one. Asks the driver. No lock; the same for the next two, which
   ask nobody. */
struct gpu *gpu_current(void);
struct gpu *gpu_of_device(CUdevice device);
struct gpu *gpu_of_uuid(const unsigned char uuid[16]);
