/* A launch on its way through the gate. A lane is a stream of a context; a passage is the record of a thread that
   launches (contexts/lanes.h).

   The fast path takes no lock, makes no system call and has no atomic read-modify-write. A thread marks itself inside
   (a plain store to its own cache line), checks that the gate is open (a load of a line that is not written meanwhile),
   and continues. The store must be visible before the load. Instead of a fence in each launch, the thread that shuts
   the gate calls membarrier(2), which executes that fence in every thread of the process simultaneously. Afterwards
   each thread either sees the gate shut or is seen inside. */
#pragma once

#include "contexts/lanes.h"
#include "gate/gate.h"
#include "gate/pace.h"

/* Mark the thread as inside, on its way to a lane. Afterwards it sees the gate shut or is seen inside. */
static inline void launch_mark_inside(struct passage *passage, struct lane *lane) {
    atomic_store_explicit(&passage->depth, 1, memory_order_relaxed);
    atomic_store_explicit(&passage->lane, lane, memory_order_relaxed);
    /* this keeps the order in the compiler; membarrier keeps it in the processor */
    atomic_signal_fence(memory_order_seq_cst);
    if (unlikely(gate_fences)) atomic_thread_fence(memory_order_seq_cst);
}

/* Enter with a thread's first launch or with a launch inside another call. Takes contexts_lock and allocates for a lane
   that the thread has not cached; may wait like launch_pass_slowly. */
struct passage *launch_enter_slowly(CUstream stream);
/* Look up the lane if it is NULL, and wait while the gate is shut (until the agent grants a lease; at most 35 s without
   an answer) or the pace's window is full. Holds no lock while it waits. */
struct passage *launch_pass_slowly(struct passage *passage, struct lane *lane, CUstream stream);

/* Count a launch in a lane. */
static inline void launch_count(struct passage *passage, struct lane *lane) {
    struct gpu *gpu = atomic_load_explicit(&lane->gpu, memory_order_relaxed);
    _Atomic uint64_t *launches = &passage->launches[gpu->index];
    atomic_store_explicit(launches, atomic_load_explicit(launches, memory_order_relaxed) + 1, memory_order_relaxed);
    uint32_t burst = atomic_load_explicit(&gpu->burst, memory_order_relaxed);
    if (unlikely(atomic_load_explicit(&lane->burst, memory_order_relaxed) != burst))
        atomic_store_explicit(&lane->burst, burst, memory_order_relaxed);
}

/* Enter before a driver call that puts work into `stream` (NULL and 1: the legacy default stream, 2: the per-thread
   default stream). May wait. Inlined into each wrapper, because a call would cost 20 of a launch's 94 instructions. */
static inline __attribute__((always_inline)) struct passage *launch_enter(CUstream stream) {
    struct passage *passage = lanes_passage;
    if (unlikely(!passage || atomic_load_explicit(&passage->depth, memory_order_relaxed)))
        return launch_enter_slowly(stream);
    struct lane *lane = near_lane(passage, stream);
    if (unlikely(!lane || passage->epoch != atomic_load_explicit(&contexts_epoch, memory_order_relaxed))) {
        lane = IS_DEFAULT(stream) ? lane_of_default_again(passage, stream) : NULL;
        if (unlikely(!lane)) return launch_pass_slowly(passage, NULL, stream);
    }
    launch_mark_inside(passage, lane);
    struct gpu *gpu = atomic_load_explicit(&lane->gpu, memory_order_relaxed);
    if (unlikely(!atomic_load_explicit(&gpu->fast, memory_order_relaxed)))
        return launch_pass_slowly(passage, lane, stream);
    launch_count(passage, lane);
    return passage;
}

/* With engine `suspend`, enter before any other driver call that a suspended process must not make. Waits while the
   process is suspended, like launch_pass_slowly at the gate. Allocates at a thread's first call. */
struct passage *launch_enter_call(void);

/* Step out of such a call, so that no thread waits for this thread, and step in again, which waits like entering.
   False: the thread is inside two calls and stays inside. */
bool launch_step_outside(struct passage *passage);
void launch_step_inside(struct passage *passage);
/* Step in again without waiting, for a thread that makes no further driver call before it leaves. */
void launch_step_back(struct passage *passage);

/* Return the GPU of the thread's context, else the session's first GPU. Queries the driver only for the context's
   handle, which the driver returns even while it blocks other calls. Takes contexts_lock if there are several GPUs. */
struct gpu *launch_gpu_to_ask_for(void);

/* Leave, after launch_enter or launch_enter_call and the driver's call. */
static inline void launch_leave(struct passage *passage) {
    if (unlikely(!passage)) return;
    if (unlikely(passage->paced)) pace_left(passage);
    atomic_signal_fence(memory_order_seq_cst);
    uint32_t depth = atomic_load_explicit(&passage->depth, memory_order_relaxed);
    atomic_store_explicit(&passage->depth, depth - 1, memory_order_release);
}

/* Prepare the records of threads. Called once per process, before the first launch. */
void launch_prepare(void);

/* Return whether a thread is inside a wrapper on the way to this GPU (NULL: or inside any call after
   launch_enter_call), and the number of launches so far. Any thread, no lock; the background thread calls these after
   it has shut the gate. */
bool launch_inside(const struct gpu *gpu);
uint64_t launches_on(const struct gpu *gpu);
