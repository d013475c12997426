/* Lanes: the streams of contexts, as far as work is concerned. Passages: what each thread knows of them.

   lane: one stream of one context; a default stream has one in each context, and the thread's own default stream one
   for each thread. passage: the record of one thread that launches work, on its way through the gate. */
#pragma once

#include "contexts/contexts.h"

struct pace;

#define PACE_MARKS 8

/* What pace.c knows of a lane; here, so that a launch finds it without looking it up. */
struct lane_pace {
    _Atomic uint32_t generation; /* of the pace; another one's figures do not count */
    _Atomic uint32_t pending;    /* marks that have not passed */
    _Atomic uint64_t submitted;  /* launches that the driver has taken */
    _Atomic uint64_t marked;     /* of them, those with a mark behind them */
    uint64_t done;               /* of them, those behind which a mark has passed */
    uint32_t first;              /* the oldest mark */
    struct {
        CUevent event;
        uint64_t upto;
    } marks[PACE_MARKS];
    struct lane *next;
};

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
    CUcontext context; /* NO_CONTEXT: the lane is not known */
    struct lane *lane;
};

/* No handle of a context, and not what the driver says where a thread has none (NULL). */
#define NO_CONTEXT ((CUcontext) - 1)

/* More than the session may have: not for lack of memory. */
#define LANES_REFUSED UINT64_MAX

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
    struct gpu *short_of; /* the present call waited for memory of this GPU (shortage.c); */
    uint64_t short_bytes; /* for so much */
    uint64_t wanted; /* with engine `suspend`: device memory that the present call has set aside, or LANES_REFUSED */
    struct passage *next;
    _Atomic bool used;
    _Atomic uint64_t launches[MAX_GPUS]; /* calls that put work on a GPU */
    struct default_lane defaults[DEFAULTS];
    struct near_lane near[NEAR_PLACES];
} __attribute__((aligned(128)));

HIDDEN __thread struct passage *lanes_passage __attribute__((tls_model("initial-exec")));

static inline struct near_lane *near_set(struct passage *passage, CUstream stream) {
    return &passage->near[DEFAULTS + ((uintptr_t)stream * 0x9E3779B97F4A7C15ull >> (64 - NEAR_BITS)) * 2];
}

static inline struct lane *near_lane(struct passage *passage, CUstream stream) {
    const struct near_lane *near = IS_DEFAULT(stream) ? &passage->near[(uintptr_t)stream] : near_set(passage, stream);
    if (likely(near->stream == stream)) return near->lane;
    if (!IS_DEFAULT(stream) && near[1].stream == stream) return near[1].lane;
    return NULL;
}

/* The lane that a launch into `stream` by this thread goes to; NULL where there is none that is arbitrated. Takes
   contexts_lock, and allocates, where the thread does not remember it. */
struct lane *lane_of(struct passage *passage, CUstream stream);

/* In a process with several contexts: the lane of a default stream, where the driver says that the thread's context is
   the same as at its last launch into that stream. NULL: ask lane_of. */
static inline struct lane *lane_of_default_again(const struct passage *passage, CUstream stream) {
    if (unlikely(passage->epoch != atomic_load_explicit(&contexts_epoch, memory_order_relaxed))) return NULL;
    const struct default_lane *last = &passage->defaults[(uintptr_t)stream];
    CUcontext context = NULL; /* stays so where the driver fails */
    real.cuCtxGetCurrent(&context);
    return likely(context == last->context) ? last->lane : NULL;
}

/* With contexts_lock held. Whether the lane has had work since the device was last seen quiet. */
bool lane_is_active(const struct lane *lane);

/* With contexts_lock held. A stream is about to be destroyed: its work, if any, is remembered by an event. */
void lanes_of_stream_end(CUstream stream);

/* With contexts_lock held. The context is gone, and its streams and events with it. */
void lanes_of_context_gone(CUcontext handle);

/* The calling thread has, or may have, another current context. */
static inline void lanes_context_changed(void) {
    struct passage *passage = lanes_passage;
    if (!passage) return;
    for (int i = 0; i < DEFAULTS; i++) passage->near[i].stream = NO_STREAM;
    passage->context = NULL;
}

void lanes_forget(void); /* in a forked child */
