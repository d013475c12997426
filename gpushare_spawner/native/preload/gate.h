/* The gate: what a launch passes through.

   The fast path takes no lock, makes no system call and has no atomic read-modify-write. A thread says that it is
   inside (a plain store to its own cache line), looks whether the gate is open (a load of a line that nobody writes),
   and goes on. The store must be visible before the load is made; instead of a fence in each launch, the side that
   shuts the gate calls membarrier(2), which puts that fence into every thread of the process at once: from then on each
   thread either sees the gate shut, or is seen inside. */
#pragma once

#include "gpus.h"
#include "pace.h"

struct context;

/* A stream of a context, as far as work is concerned. Lanes are recycled, never freed: a thread may look at one that is
 * gone. */
struct lane {
    struct gpu *_Atomic gpu;
    struct context *context;
    CUstream stream;
    const struct passage *thread; /* of the thread's own default stream: whose; else NULL */
    _Atomic uint32_t burst;       /* the last burst of the GPU in which work was put here */
    CUevent mark;                 /* recorded by the background thread to learn when the work is done */
    bool pending;
    struct lane_pace pace;
    struct lane *next;
};

#define NEAR_LANES 16
#define NO_STREAM  ((CUstream) - 1)

/* One thread's record. Recycled, never freed: the background thread walks the list of them. */
struct passage {
    _Atomic uint32_t depth; /* wrappers that this thread is inside of */
    uint32_t epoch;         /* of `lane` and `near`: older ones are forgotten */
    CUstream stream;        /* of `lane`; NO_STREAM: ask again */
    struct lane *_Atomic lane;
    CUcontext context; /* current, if known */
    struct {
        CUcontext context;
        CUstream stream;
        struct lane *lane;
    } near[NEAR_LANES];
    _Atomic uint64_t launches[MAX_GPUS]; /* calls that put work on a GPU */
    struct lane *paced;                  /* of a launch that the pace has admitted and that is being made; else NULL */
    struct pace *pace;
    uint32_t pace_generation;
    struct passage *next;
    _Atomic bool used;
} __attribute__((aligned(128)));

extern __thread struct passage *my_passage __attribute__((tls_model("initial-exec")));
extern _Atomic uint32_t lanes_epoch; /* changes when a context or a stream goes */
extern bool gate_fences;             /* membarrier is not to be had: each launch pays for a fence */

struct passage *gate_enter_slowly(struct passage *passage, CUstream stream);

/* Count a launch in a lane. */
static inline void gate_count(struct passage *passage, struct lane *lane) {
    struct gpu *gpu = atomic_load_explicit(&lane->gpu, memory_order_relaxed);
    _Atomic uint64_t *launches = &passage->launches[gpu->index];
    atomic_store_explicit(launches, atomic_load_explicit(launches, memory_order_relaxed) + 1, memory_order_relaxed);
    uint32_t burst = atomic_load_explicit(&gpu->burst, memory_order_relaxed);
    if (unlikely(atomic_load_explicit(&lane->burst, memory_order_relaxed) != burst))
        atomic_store_explicit(&lane->burst, burst, memory_order_relaxed);
}

/* Before a driver call that puts work into `stream` (NULL and 1: the legacy default stream, 2: the thread's own). May
 * wait. */
static inline struct passage *gate_enter(CUstream stream) {
    struct passage *passage = my_passage;
    if (unlikely(!passage)) return gate_enter_slowly(NULL, stream);
    uint32_t depth = atomic_load_explicit(&passage->depth, memory_order_relaxed);
    atomic_store_explicit(&passage->depth, depth + 1, memory_order_relaxed);
    atomic_signal_fence(
        memory_order_seq_cst); /* the compiler keeps the order; membarrier makes the processor keep it */
    if (unlikely(gate_fences)) atomic_thread_fence(memory_order_seq_cst);

    struct lane *lane = atomic_load_explicit(&passage->lane, memory_order_relaxed);
    if (likely(passage->stream == stream &&
               passage->epoch == atomic_load_explicit(&lanes_epoch, memory_order_relaxed) &&
               atomic_load_explicit(&atomic_load_explicit(&lane->gpu, memory_order_relaxed)->fast,
                                    memory_order_relaxed))) {
        gate_count(passage, lane);
        return passage;
    }
    return gate_enter_slowly(passage, stream);
}

/* After it. */
static inline void gate_leave(struct passage *passage) {
    if (unlikely(!passage)) return;
    if (unlikely(passage->paced)) pace_left(passage);
    atomic_signal_fence(memory_order_seq_cst);
    uint32_t depth = atomic_load_explicit(&passage->depth, memory_order_relaxed);
    atomic_store_explicit(&passage->depth, depth - 1, memory_order_release);
}

/* The calling thread has, or may have, another current context. */
static inline void gate_context_changed(void) {
    struct passage *passage = my_passage;
    if (!passage) return;
    passage->stream = NO_STREAM;
    passage->context = NULL;
}

/* For the side that opens and shuts (the background thread, and whoever loses the agent). */
void gate_prepare(void);            /* once per process, before the first launch */
void gate_open(struct gpu *gpu);    /* and wake the threads that wait */
void gate_shut(struct gpu *gpu);    /* afterwards every thread sees it shut, or is seen inside */
void gate_refresh(struct gpu *gpu); /* `fast` follows `open`, the pace and the captures in progress */
bool gate_inside(const struct gpu *gpu);
uint64_t gate_launches(const struct gpu *gpu);
void gate_forget_threads(void); /* in a forked child: only this thread is left */
