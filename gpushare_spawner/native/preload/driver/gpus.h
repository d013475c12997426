/* The GPUs that the driver shows to this process.

   Terms used in this library:
   - device memory: memory allocated by cuMemAlloc and similar calls. Managed memory: CUDA's unified memory, which
     can leave the GPU. Converted memory: managed memory that the program requested as device memory.
   - allocation: a piece of memory that the program has allocated. Block: freed memory that is kept for a later
     allocation.
   - account: the sum of the allocations of this process on a GPU. Allowance: the largest account that the agent grants.
   - launch: a call that puts work on a GPU. Gate: open while launches may pass. Passage: the record of a thread that
     launches. Lane: a stream of a context.
   - lease: the agent's permission to open the gate. Burst: work from the first launch until the device is quiet.
   - mark: an event behind work; it has passed when the work is done. Pace: a bound on work that is queued and not done.
   - turn: the right of the background thread to make driver calls (contexts.h).
   - frame: a message on the session socket. */
#pragma once

#include "driver/driver.h"
#include "platform/frames.h"

#define MAX_GPUS 64

/* Kinds of memory that the driver itself holds: for memory nodes of graphs, and in pools. */
enum driver_memory_of { DRIVER_MEMORY_OF_GRAPHS = 1, DRIVER_MEMORY_OF_POOLS = 2 };

struct gpu {
    int index;
    CUdevice device;
    CUuuid uuid;
    bool can_manage; /* host and GPU may access managed memory at the same time; otherwise it is not used */

    /* The gate. `gate_state` (enum gate_state) is also the futex that launching threads wait on; `fast` is 1 only
       while a launch needs no further check: the gate is open, the lease has no pace and no stream of the process is
       being captured into a graph. */
    _Atomic uint32_t gate_state;
    _Atomic uint32_t fast;
    _Atomic bool paced;        /* the lease has a pace (pace.c) */
    _Atomic uint32_t burst;    /* number of the burst, which is copied to lanes with work */
    _Atomic uint32_t waiters;  /* threads at the shut gate */
    _Atomic uint32_t progress; /* changes while the agent's answer is being prepared */

    /* Calls that the driver refused for lack of device memory and that wait for a lease (shortage.c). */
    _Atomic uint64_t short_of;    /* the bytes that they need, */
    _Atomic uint64_t short_above; /* beyond the process's memory at the first call */
    _Atomic uint32_t shortages;   /* the number of such calls so far */
    _Atomic uint32_t grants;      /* futex: changes when a lease begins, when the agent refuses the memory, or when the
                                     connection ends */
    _Atomic uint32_t refusals;    /* the number of the agent's refusals */
    _Atomic bool restate;         /* the last MEMORY included missing memory, so send it again (worker.c) */

    /* Accounting, bytes (account.c). */
    _Atomic uint64_t managed;
    _Atomic uint64_t plain;
    _Atomic uint64_t cached; /* the part of `managed` that the program has freed and that is kept for its next
                                allocations (block_cache.c) */
    _Atomic bool changed;    /* changed since the last MEMORY (worker.c) */
    _Atomic uint64_t pooled; /* plain stream-ordered memory, not included in `plain` (account.c) */
    _Atomic unsigned char driver_memory; /* enum driver_memory_of: the driver may hold memory of these kinds */

    /* From the agent (worker.c). */
    _Atomic bool shared;    /* whether this is one of the session's GPUs */
    _Atomic uint64_t total; /* the total memory to show; 0: the real figure */

    /* Memory that the session may have (allowance.c), in bytes. */
    _Atomic uint64_t allowance; /* the maximum that this process may have allocated */
    _Atomic uint64_t others;    /* allocated by the session's other processes */
    _Atomic bool reserving;     /* the agent grants the allowance and accepts requests for more */
};

HIDDEN struct gpu gpus[MAX_GPUS];
HIDDEN int gpu_count;

/* Read the GPUs from the driver. Called once, at cuInit. */
void gpus_read(void);

/* Return the GPU of the calling thread's context; NULL without a context. Queries the driver. No lock. */
struct gpu *gpu_current(void);
/* Return the GPU with this driver number or UUID; NULL: it is not in `gpus`. No lock. */
struct gpu *gpu_of_device(CUdevice device);
struct gpu *gpu_of_uuid(const unsigned char uuid[16]);

/* Send the agent a frame about a GPU. Background thread; an error closes the connection. */
void gpu_send(const struct gpu *gpu, struct frame frame);
