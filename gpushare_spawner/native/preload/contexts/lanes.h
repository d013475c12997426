/* Lanes: the streams of contexts into which work is put. Passages: the records of threads that launch work.

   A default stream has a lane in each context; a per-thread default stream has a lane for each thread and context. A
   passage stores the lanes of its thread. */
#pragma once

#include "contexts/contexts.h"

struct pace;

#define PACE_MARKS 8

/* The state of a lane for pace.c, defined here so that a launch can access it through the lane. */
struct lane_pace {
    _Atomic uint32_t generation; /* the pace's generation; values of another generation do not count */
    _Atomic uint32_t pending;    /* number of marks that have not passed */
    _Atomic uint64_t submitted;  /* launches that the driver has taken */
    _Atomic uint64_t marked;     /* of those, launches followed by a mark */
    uint64_t done;               /* of those, launches followed by a mark that has passed */
    uint32_t first;              /* the oldest mark */
    struct {
        CUevent event;
        uint64_t upto;
    } marks[PACE_MARKS];
    struct lane *next;
};

/* A stream of a context into which work is put. Lanes are recycled but never freed, because a thread may read a removed
   lane. */
struct lane {
    struct gpu *_Atomic gpu;
    struct context *context;
    CUstream stream;
    const struct passage *thread; /* for a per-thread default stream, its thread; else NULL */
    _Atomic uint32_t burst;       /* the last burst of the GPU in which work was put here */
    CUevent mark;                 /* recorded by the background thread, and passed when the work is done */
    bool pending;                 /* the mark is recorded and has not passed */
    _Atomic uint32_t uncaptured;  /* captures_version at which the driver reported the stream as not captured */
    struct lane_pace pace;
    struct lane *next;
};

/* Each thread caches the lanes of the streams into which it launches, by the stream's handle, in sets of two, so that
   32 streams fit. The three default streams (NULL, 1, 2) have separate places. */
#define NEAR_BITS     8
#define DEFAULTS      3
#define NO_STREAM     ((CUstream) - 1)
#define NEAR_PLACES   (DEFAULTS + (2 << NEAR_BITS))
#define IS_DEFAULT(s) ((uintptr_t)(s) < DEFAULTS)

struct near_lane {
    CUstream stream; /* NO_STREAM: the place is empty */
    struct lane *lane;
};

/* In a process with several contexts: the lane of a default stream in the context that the driver last reported as
   current. */
struct default_lane {
    CUcontext context; /* NO_CONTEXT: the place is empty */
    struct lane *lane;
};

/* Not the handle of a context; for a thread without a context the driver returns NULL. */
#define NO_CONTEXT ((CUcontext) - 1)

/* The request exceeded the session's limit, so device memory is not short. */
#define LANES_REFUSED UINT64_MAX

/* The record of a thread. Recycled but never freed, because the background thread walks the list of all passages. */
struct passage {
    _Atomic uint32_t depth;    /* number of wrappers that this thread is inside */
    uint32_t epoch;            /* contexts_epoch of `near`: entries of another epoch are invalid */
    struct lane *_Atomic lane; /* of the current or the last launch */
    struct lane *paced;        /* of the current launch if the pace has counted it; else NULL */
    struct pace *pace;
    uint32_t pace_generation;
    uint32_t let_through; /* number of launches that may pass without a lease after a signal interrupted a wait, */
    uint64_t let_until;   /* up to this instant */
    CUcontext context;    /* the current context; NULL: ask the driver */
    struct gpu *short_of; /* the current call waited for memory of this GPU (shortage.c), */
    uint64_t short_bytes; /* for this number of bytes */
    uint64_t counted;     /* with engine `suspend`: bytes that the current call has counted, or LANES_REFUSED */
    struct passage *next;
    _Atomic bool used;
    _Atomic uint64_t launches[MAX_GPUS]; /* number of calls that put work on a GPU */
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

/* Return the lane of a launch into `stream` by this thread; NULL: its GPU is not arbitrated. Takes contexts_lock and
   allocates if the thread has not cached the lane. */
struct lane *lane_of(struct passage *passage, CUstream stream);

/* In a process with several contexts: return the lane of a default stream if the thread's context, according to the
   driver, is the same as at its last launch into that stream. NULL: call lane_of. */
static inline struct lane *lane_of_default_again(const struct passage *passage, CUstream stream) {
    if (unlikely(passage->epoch != atomic_load_explicit(&contexts_epoch, memory_order_relaxed))) return NULL;
    const struct default_lane *last = &passage->defaults[(uintptr_t)stream];
    CUcontext context = NULL; /* stays NULL if the driver fails */
    real.cuCtxGetCurrent(&context);
    return likely(context == last->context) ? last->lane : NULL;
}

/* Whether the lane has had work since the device was last quiet. With contexts_lock held. */
bool lane_is_active(const struct lane *lane);

/* Remove the lanes of a stream that is about to be destroyed; an event recorded behind its work is kept. With
   contexts_lock held. */
void lanes_remove_stream(CUstream stream);

/* Remove the lanes of a destroyed context, whose streams and events no longer exist. With contexts_lock held. */
void lanes_remove_context(CUcontext handle);

/* Invalidate the cached context of the calling thread, which may have changed. */
static inline void lanes_context_changed(void) {
    struct passage *passage = lanes_passage;
    if (!passage) return;
    for (int i = 0; i < DEFAULTS; i++) passage->near[i].stream = NO_STREAM;
    passage->context = NULL;
}
