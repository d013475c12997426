/* The gate: what a launch passes through.

   The fast path takes no lock, makes no system call and has no atomic read-modify-write. A thread says that it is
   inside (a plain store to its own cache line), looks whether the gate is open (a load of a line that nobody writes),
   and goes on. The store must be visible before the load is made; instead of a fence in each launch, the side that
   shuts the gate calls membarrier(2), which puts that fence into every thread of the process at once: from then on each
   thread either sees the gate shut, or is seen inside. */
#pragma once

#include "driver/gpus.h"
#include "gate/pace.h"

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
    _Atomic uint32_t uncaptured; /* captures_news at which the stream was seen not to be captured */
    struct lane_pace pace;
    struct lane *next;
};

/* Each thread remembers the lanes of the streams it launches into, by the stream's handle: in sets of two, so that 32
 * streams find their places. The three default streams (NULL, 1, 2) have places of their own. */
#define NEAR_BITS     8
#define DEFAULTS      3
#define NO_STREAM     ((CUstream) - 1)
#define NEAR_PLACES   (DEFAULTS + (2 << NEAR_BITS))
#define IS_DEFAULT(s) ((uintptr_t)(s) < DEFAULTS)

struct near_lane {
    CUstream stream; /* NO_STREAM: nothing */
    struct lane *lane;
};

/* The lane of a default stream in the context that the driver named last, in a process with several contexts. */
struct default_lane {
    CUcontext context;
    struct lane *lane; /* NULL: not known */
};

/* One thread's record. Recycled, never freed: the background thread walks the list of them. */
struct passage {
    _Atomic uint32_t depth;    /* wrappers that this thread is inside of */
    uint32_t epoch;            /* of `near`: older ones are forgotten */
    struct lane *_Atomic lane; /* of the present launch, or the last */
    struct lane *paced;        /* of a launch that the pace has admitted and that is being made; else NULL */
    struct pace *pace;
    uint32_t pace_generation;
    uint32_t let_through; /* launches that go without a lease, since a signal interrupted a wait; */
    uint64_t let_until;   /* until then */
    CUcontext context;    /* current, if known */
    struct passage *next;
    _Atomic bool used;
    _Atomic uint64_t launches[MAX_GPUS]; /* calls that put work on a GPU */
    struct default_lane defaults[DEFAULTS];
    struct near_lane near[NEAR_PLACES];
} __attribute__((aligned(128)));

extern __thread struct passage *my_passage __attribute__((tls_model("initial-exec")));
extern _Atomic uint32_t lanes_epoch; /* changes when a context or a stream goes */
extern bool gate_fences;             /* membarrier is not to be had: each launch pays for a fence */

static inline struct near_lane *near_set(struct passage *passage, CUstream stream) {
    return &passage->near[DEFAULTS + ((uintptr_t)stream * 0x9E3779B97F4A7C15ull >> (64 - NEAR_BITS)) * 2];
}

static inline struct lane *near_lane(struct passage *passage, CUstream stream) {
    const struct near_lane *near = IS_DEFAULT(stream) ? &passage->near[(uintptr_t)stream] : near_set(passage, stream);
    if (likely(near->stream == stream)) return near->lane;
    if (!IS_DEFAULT(stream) && near[1].stream == stream) return near[1].lane;
    return NULL;
}

/* This thread is about to launch into the lane: afterwards it sees the gate shut, or is seen inside. */
static inline void gate_announce(struct passage *passage, struct lane *lane) {
    atomic_store_explicit(&passage->depth, 1, memory_order_relaxed);
    atomic_store_explicit(&passage->lane, lane, memory_order_relaxed);
    /* the compiler keeps the order; membarrier makes the processor keep it */
    atomic_signal_fence(memory_order_seq_cst);
    if (unlikely(gate_fences)) atomic_thread_fence(memory_order_seq_cst);
}

/* A thread's first launch, or first into this stream, or one inside another call. */
struct passage *gate_enter_slowly(struct passage *passage, CUstream stream);
/* Find the lane (NULL: not known), wait where the gate is shut or the pace wants it. */
struct passage *gate_pass_slowly(struct passage *passage, struct lane *lane, CUstream stream);

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
    if (unlikely(!passage || atomic_load_explicit(&passage->depth, memory_order_relaxed)))
        return gate_enter_slowly(passage, stream);
    struct lane *lane = near_lane(passage, stream);
    if (unlikely(!lane || passage->epoch != atomic_load_explicit(&lanes_epoch, memory_order_relaxed)))
        return gate_enter_slowly(passage, stream);
    gate_announce(passage, lane);
    struct gpu *gpu = atomic_load_explicit(&lane->gpu, memory_order_relaxed);
    if (unlikely(!atomic_load_explicit(&gpu->fast, memory_order_relaxed)))
        return gate_pass_slowly(passage, lane, stream);
    gate_count(passage, lane);
    return passage;
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
    for (int i = 0; i < DEFAULTS; i++) passage->near[i].stream = NO_STREAM;
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
