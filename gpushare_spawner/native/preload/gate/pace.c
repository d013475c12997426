#define _GNU_SOURCE
#include "gate/pace.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "contexts/captures.h"
#include "gate/gate.h"

/* Two launches keep a GPU busy: one runs, and the other waits behind it. Launches beyond the driver's own queue have no
   effect. */
#define LEAST_WINDOW 2
/* A launch that takes this many paces needs no launch queued behind it: the gap is far below 1 % of its time, and a
   queued launch could not be withdrawn. The first launch is assumed to be that long. */
#define LONG_LAUNCH 10
#define MOST_WINDOW 1024
/* Number of marks in a window. */
#define SEGMENTS    8
#define SHORT_SLEEP (50 * MILLISECOND / 1000)
#define LONG_SLEEP  (2 * MILLISECOND)
/* Work that makes no progress for this time while threads wait may depend on their launches: some launches are let
   through, more after twice the time, and so on. */
#define DEADLOCK_PATIENCE (5 * SECOND)
/* Launches may be long, and slowed down by other processes' work: wait for this multiple of their time. */
#define LAUNCHES_PATIENCE 8
/* The patience while no launch has ended yet. */
#define FIRST_PATIENCE (30 * SECOND)

/* Launches into a stream that was destroyed before they completed. */
struct ended_stream {
    CUevent event;
    CUcontext context;
    uint32_t generation;
    uint64_t launches;
    struct ended_stream *next;
};

struct pace {
    _Atomic uint64_t nanoseconds; /* 0: none */
    /* Upper half: the generation. Lower half: admitted launches that are not known to be done. Both are in one word, so
       that a launch is never subtracted from another generation's account. */
    _Atomic uint64_t account;
    _Atomic uint32_t window, segment;
    _Atomic uint32_t extra; /* launches beyond the window, let through to escape from a deadlock */
    _Atomic uint64_t busy_since;
    pthread_mutex_t lock; /* protects the following and the lanes' marks. Taken after captures_lock and contexts_lock */
    struct lane *lanes;   /* lanes with launches in this generation */
    struct ended_stream *ended;
    uint64_t launch_time; /* nanoseconds of a launch, estimated; 0: no estimate */
    bool backlog;         /* uncounted work of an earlier generation may run before the counted work */
    uint64_t stuck_since, patience;
    _Atomic uint64_t measured_time; /* nanoseconds of a launch, measured at the last launch that ended; 0: none has
                                       ended */
};

static struct pace paces[MAX_GPUS] = {[0 ... MAX_GPUS - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER}};
static uint32_t generations;

static uint32_t generation_of(uint64_t account) {
    return (uint32_t)(account >> 32);
}

static uint32_t outstanding(const struct pace *pace) {
    return (uint32_t)atomic_load_explicit(&pace->account, memory_order_relaxed);
}

static void take_off(struct pace *pace, uint32_t generation, uint64_t launches) {
    uint64_t account = atomic_load(&pace->account);
    while (generation_of(account) == generation && launches) {
        uint64_t counted = account & UINT32_MAX, less = launches < counted ? launches : counted;
        if (atomic_compare_exchange_weak(&pace->account, &account, account - less)) return;
    }
}

static void adapt(struct pace *pace) {
    uint64_t room = pace->launch_time ? atomic_load(&pace->nanoseconds) / pace->launch_time : 0;
    uint64_t time = pace->launch_time;
    uint32_t least = !time || time > LONG_LAUNCH * atomic_load(&pace->nanoseconds) ? 1 : LEAST_WINDOW;
    uint32_t window = room < LEAST_WINDOW ? least : room > MOST_WINDOW ? MOST_WINDOW : (uint32_t)room;
    atomic_store(&pace->window, window);
    atomic_store(&pace->segment, window < 2 * SEGMENTS ? 1 : window / SEGMENTS);
}

void pace_begin(struct gpu *gpu, uint64_t nanoseconds) {
    struct pace *pace = &paces[gpu->index];
    pthread_mutex_lock(&pace->lock);
    atomic_store(&pace->nanoseconds, nanoseconds);
    atomic_store(&gpu->paced, nanoseconds != 0);
    atomic_store(&pace->account, (uint64_t)++generations << 32);
    atomic_store(&pace->extra, 0);
    atomic_store(&pace->busy_since, 0);
    pace->lanes = NULL;
    pace->backlog = false;
    adapt(pace);
    pthread_mutex_unlock(&pace->lock);
    gate_refresh(gpu);
}

void pace_set(struct gpu *gpu, uint64_t nanoseconds) {
    struct pace *pace = &paces[gpu->index];
    bool begins = nanoseconds && !atomic_load(&pace->nanoseconds);
    if (begins) pace_begin(gpu, 0);
    pthread_mutex_lock(&pace->lock);
    if (begins) pace->backlog = true;
    atomic_store(&pace->nanoseconds, nanoseconds);
    atomic_store(&gpu->paced, nanoseconds != 0);
    adapt(pace);
    pthread_mutex_unlock(&pace->lock);
    gate_refresh(gpu);
}

uint64_t pace_patience(const struct gpu *gpu) {
    const struct pace *pace = &paces[gpu->index];
    if (!atomic_load(&pace->nanoseconds)) return DEADLOCK_PATIENCE;
    uint64_t seen = atomic_load(&pace->measured_time), long_enough = seen ? LAUNCHES_PATIENCE * seen : FIRST_PATIENCE;
    return long_enough > DEADLOCK_PATIENCE ? long_enough : DEADLOCK_PATIENCE;
}

void pace_relax(struct gpu *gpu) {
    atomic_fetch_add(&paces[gpu->index].extra, LEAST_WINDOW + atomic_load(&gpu->waiters));
}

/* Whether the lane is a default stream. A default stream also orders the work of other streams, so an event is recorded
   there only together with a launch. */
static bool is_default(const struct lane *lane) {
    return lane->stream == NULL || lane->stream == CU_STREAM_PER_THREAD;
}

/* ---- with the lock held ---- */

static void begin_lane(struct pace *pace, struct lane *lane, uint32_t generation) {
    struct lane_pace *own = &lane->pace;
    if (atomic_load(&own->generation) == generation || generation_of(atomic_load(&pace->account)) != generation) return;
    atomic_store(&own->submitted, 0);
    atomic_store(&own->marked, 0);
    atomic_store(&own->pending, 0);
    own->done = 0;
    own->first = 0;
    own->next = pace->lanes;
    pace->lanes = lane;
    atomic_store(&own->generation, generation);
}

/* Subtract the lane's completed launches, up to this number. Returns how many were not yet subtracted. */
static uint64_t complete_up_to(struct pace *pace, struct lane *lane, uint64_t upto) {
    uint64_t launches = upto - lane->pace.done;
    lane->pace.done = upto;
    take_off(pace, atomic_load(&lane->pace.generation), launches);
    return launches;
}

/* Query the lane's marks. Returns the number of launches that are newly done. */
static uint64_t query_marks(struct pace *pace, struct lane *lane) {
    struct lane_pace *own = &lane->pace;
    uint64_t launches = 0;
    uint32_t pending = atomic_load(&own->pending);
    /* an error counts as passed */
    while (pending && real.cuEventQuery(own->marks[own->first].event) != CUDA_ERROR_NOT_READY) {
        launches += complete_up_to(pace, lane, own->marks[own->first].upto);
        own->first = (own->first + 1) % PACE_MARKS;
        atomic_store(&own->pending, --pending);
    }
    return launches;
}

/* Record a mark behind the lane's launches. If that fails, the launches are no longer counted. */
static void record_mark(struct pace *pace, struct lane *lane) {
    struct lane_pace *own = &lane->pace;
    uint32_t pending = atomic_load(&own->pending);
    uint64_t submitted = atomic_load(&own->submitted);
    if (pending == PACE_MARKS || submitted == atomic_load(&own->marked)) return;
    CUcontext current = NULL, context = lane->context->handle;
    real.cuCtxGetCurrent(&current);
    bool switched = current != context && real.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
    uint32_t at = (own->first + pending) % PACE_MARKS;
    if (!own->marks[at].event && real.cuEventCreate(&own->marks[at].event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        own->marks[at].event = NULL;
    bool recorded = own->marks[at].event && real.cuEventRecord(own->marks[at].event, lane->stream) == CUDA_SUCCESS;
    if (switched) real.cuCtxPopCurrent_v2(&current);
    atomic_store(&own->marked, submitted);
    if (recorded) {
        own->marks[at].upto = submitted;
        atomic_store(&own->pending, pending + 1);
    } else if (!pending) {
        complete_up_to(pace, lane, submitted);
    }
}

/* Estimate the time of a launch from the launches that are newly done. `awaited`: a thread waits for the window. */
static void estimate(struct pace *pace, uint64_t launches, bool awaited) {
    uint64_t now = clock_now(), since = atomic_load(&pace->busy_since), old = pace->launch_time;
    bool empty = outstanding(pace) == 0;
    if (launches) {
        uint64_t seen = since && !pace->backlog ? (now - since) / launches + 1 : old;
        if (!old)
            pace->launch_time = seen;
        else
            pace->launch_time = seen > old ? (old + seen) / 2 : (3 * old + seen) / 4;
        if (since && !pace->backlog) atomic_store(&pace->measured_time, seen);
        pace->backlog = false;
        atomic_store(&pace->busy_since, empty ? 0 : now);
        atomic_store(&pace->extra, 0);
        pace->stuck_since = now;
        pace->patience = DEADLOCK_PATIENCE;
        if (awaited && empty && atomic_load(&pace->window) > 1) {
            /* the queue ran empty before this query, even if the query was late: the window was too small */
            if (old && pace->launch_time > old) pace->launch_time = old;
            if (!pace->launch_time) pace->launch_time = atomic_load(&pace->nanoseconds) / LEAST_WINDOW;
            pace->launch_time = pace->launch_time / 2 + 1;
        }
        adapt(pace);
    } else if (since && old && !pace->backlog) {
        /* no launch has completed: a launch takes longer than estimated */
        uint64_t at_least = (now - since) / (2 * atomic_load(&pace->segment));
        if (at_least <= old) return;
        pace->launch_time = at_least;
        adapt(pace);
    }
}

/* Query the events of destroyed streams. Returns the number of launches that are newly done. */
static uint64_t query_ended_streams(struct pace *pace) {
    uint64_t launches = 0;
    for (struct ended_stream **link = &pace->ended; *link;) {
        struct ended_stream *stream = *link;
        if (real.cuEventQuery(stream->event) == CUDA_ERROR_NOT_READY) {
            link = &stream->next;
            continue;
        }
        real.cuEventDestroy_v2(stream->event);
        take_off(pace, stream->generation, stream->launches);
        if (stream->generation == generation_of(atomic_load(&pace->account))) launches += stream->launches;
        *link = stream->next;
        free(stream);
    }
    return launches;
}

/* Query all marks, and record new ones. `own`: the lane of the calling thread. */
static void update_marks(struct pace *pace, const struct lane *own) {
    uint64_t launches = query_ended_streams(pace);
    for (struct lane *lane = pace->lanes; lane; lane = lane->pace.next) {
        launches += query_marks(pace, lane);
        if (atomic_load(&lane->pace.pending)) continue;
        if (lane == own || !is_default(lane))
            record_mark(pace, lane);
        else /* fewer than a segment: no event would ever show their completion */
            complete_up_to(pace, lane, atomic_load(&lane->pace.submitted));
    }
    estimate(pace, launches, true);
}

/* Let additional launches through after a long time without progress. */
static void escape(struct gpu *gpu, struct pace *pace, uint64_t now, uint64_t waiting_since) {
    uint64_t since = pace->stuck_since > waiting_since ? pace->stuck_since : waiting_since;
    if (!pace->patience) pace->patience = DEADLOCK_PATIENCE;
    if (now - since < pace->patience || now - since < LAUNCHES_PATIENCE * atomic_load(&pace->measured_time)) return;
    log_line(LOG_INFO,
             "GPU %d: queued work makes no progress while threads wait to launch more; some launches go ahead",
             gpu->index);
    atomic_fetch_add(&pace->extra, LEAST_WINDOW);
    pace->stuck_since = now;
    pace->patience *= 2;
}

/* ---- without the lock ---- */

bool pace_admits(struct passage *passage, struct lane *lane, bool through) {
    struct gpu *gpu = atomic_load_explicit(&lane->gpu, memory_order_relaxed);
    struct pace *pace = &paces[gpu->index];
    if (!atomic_load_explicit(&pace->nanoseconds, memory_order_relaxed)) return true;
    uint64_t account = atomic_load(&pace->account);
    do {
        uint32_t generation = generation_of(account);
        if (atomic_load(&lane->pace.generation) != generation) {
            pthread_mutex_lock(&pace->lock);
            begin_lane(pace, lane, generation);
            pthread_mutex_unlock(&pace->lock);
        }
        /* during a capture no event may be recorded, so nothing would show when the window has room */
        if ((uint32_t)account >= atomic_load(&pace->window) + atomic_load(&pace->extra) && !through &&
            !captures_in_progress())
            return false;
    } while (!atomic_compare_exchange_weak(&pace->account, &account, account + 1));
    if (!(uint32_t)account) atomic_store(&pace->busy_since, clock_now());
    passage->paced = lane;
    passage->pace = pace;
    passage->pace_generation = generation_of(account);
    return true;
}

void pace_left(struct passage *passage) {
    if (atomic_load_explicit(&passage->depth, memory_order_relaxed) > 1) return; /* a call inside the admitted call */
    struct lane *lane = passage->paced;
    struct pace *pace = passage->pace;
    uint32_t generation = passage->pace_generation;
    struct lane_pace *own = &lane->pace;
    passage->paced = NULL;
    if (atomic_load(&own->generation) != generation) { /* its stream was destroyed in the meantime */
        take_off(pace, generation, 1);
        return;
    }
    uint64_t submitted = atomic_fetch_add(&own->submitted, 1) + 1;
    if (submitted - atomic_load(&own->marked) < atomic_load(&pace->segment) &&
        outstanding(pace) < atomic_load(&pace->window))
        return;
    int kept = errno;
    captures_lock();
    pthread_mutex_lock(&pace->lock);
    if (!captures_in_progress() && atomic_load(&own->generation) == generation &&
        generation_of(atomic_load(&pace->account)) == generation) {
        estimate(pace, query_marks(pace, lane), false);
        record_mark(pace, lane);
    }
    pthread_mutex_unlock(&pace->lock);
    captures_unlock();
    errno = kept;
}

/* Block all signals except those raised by a fault of the thread itself. */
static void block_signals(sigset_t *before) {
    sigset_t most;
    sigfillset(&most);
    const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&most, faults[i]);
    pthread_sigmask(SIG_BLOCK, &most, before);
}

bool pace_wait(struct gpu *gpu, struct lane *lane) {
    struct pace *pace = &paces[gpu->index];
    uint64_t waiting_since = clock_now(), first_sleep = SHORT_SLEEP;
    int kept = errno;
    bool interrupted = false;
    sigset_t before;
    block_signals(&before); /* a signal outside ppoll would not end the wait */
    while (!interrupted && atomic_load(&gpu->gate_state) && atomic_load(&pace->nanoseconds)) {
        captures_lock();
        pthread_mutex_lock(&pace->lock);
        bool capturing = captures_in_progress();
        if (!capturing) update_marks(pace, lane);
        uint32_t room = atomic_load(&pace->window) + atomic_load(&pace->extra), segment = atomic_load(&pace->segment);
        bool free = outstanding(pace) + segment <= room;
        if (!free) escape(gpu, pace, clock_now(), waiting_since);
        uint64_t sleep = pace->launch_time ? pace->launch_time * segment / 2 : (first_sleep *= 2);
        pthread_mutex_unlock(&pace->lock);
        captures_unlock();
        if (free || capturing) break;
        if (sleep < SHORT_SLEEP) sleep = SHORT_SLEEP;
        if (sleep > LONG_SLEEP) sleep = LONG_SLEEP;
        struct timespec timeout = {0, (long)sleep};
        interrupted = ppoll(NULL, 0, &timeout, &before) != 0 && errno == EINTR;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = kept;
    return interrupted;
}

/* Record an event behind the lane's work, to be queried after the stream's destruction. */
static void add_ended_stream(struct pace *pace, struct lane *lane, uint64_t launches) {
    struct ended_stream *stream = capture_records(lane->stream) ? NULL : malloc(sizeof *stream);
    if (!stream) return;
    *stream =
        (struct ended_stream){.context = lane->context->handle, .generation = atomic_load(&lane->pace.generation)};
    CUcontext current = NULL;
    real.cuCtxGetCurrent(&current);
    bool switched = current != stream->context && real.cuCtxPushCurrent_v2(stream->context) == CUDA_SUCCESS;
    bool made = real.cuEventCreate(&stream->event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
    bool recorded = made && real.cuEventRecord(stream->event, lane->stream) == CUDA_SUCCESS;
    if (made && !recorded) real.cuEventDestroy_v2(stream->event);
    if (switched) real.cuCtxPopCurrent_v2(&current);
    if (!recorded) {
        free(stream);
        return;
    }
    stream->launches = launches;
    stream->next = pace->ended;
    pace->ended = stream;
    lane->pace.done += launches; /* this event counts them now */
}

enum lane_end { LANE_STREAM_ENDS, LANE_CONTEXT_ENDS, LANE_CONTEXT_DESTROYED };

static void end_lane(struct lane *lane, enum lane_end end) {
    struct lane_pace *own = &lane->pace;
    struct pace *pace = &paces[lane->context->gpu->index];
    pthread_mutex_lock(&pace->lock);
    for (struct lane **link = &pace->lanes; *link; link = &(*link)->pace.next) {
        if (*link != lane) continue;
        *link = own->next;
        uint64_t submitted = atomic_load(&own->submitted);
        if (end == LANE_STREAM_ENDS && atomic_load(&pace->nanoseconds) && submitted > own->done)
            add_ended_stream(pace, lane, submitted - own->done);
        complete_up_to(pace, lane, submitted);
        break;
    }
    atomic_store(&own->generation, 0);
    atomic_store(&own->pending, 0);
    for (int i = 0; i < PACE_MARKS; i++) {
        if (own->marks[i].event && end != LANE_CONTEXT_DESTROYED) real.cuEventDestroy_v2(own->marks[i].event);
        own->marks[i].event = NULL;
    }
    pthread_mutex_unlock(&pace->lock);
}

void pace_stream_ends(CUstream stream) {
    for (struct context *context = contexts; context; context = context->next)
        for (struct lane *lane = context->lanes; lane; lane = lane->next)
            if (lane->stream == stream) end_lane(lane, LANE_STREAM_ENDS);
}

static void end_lanes_of_context(CUcontext handle, enum lane_end end) {
    for (struct context *context = contexts; context; context = context->next) {
        if (context->handle != handle) continue;
        for (struct lane *lane = context->lanes; lane; lane = lane->next) end_lane(lane, end);
    }
}

void pace_context_destroyed(CUcontext context) {
    end_lanes_of_context(context, LANE_CONTEXT_DESTROYED);
}

void pace_context_ends(CUcontext context) {
    end_lanes_of_context(context, LANE_CONTEXT_ENDS);
    for (int i = 0; i < gpu_count; i++) {
        struct pace *pace = &paces[i];
        pthread_mutex_lock(&pace->lock);
        for (struct ended_stream **link = &pace->ended; *link;) {
            struct ended_stream *stream = *link;
            if (stream->context != context) {
                link = &stream->next;
                continue;
            }
            real.cuEventDestroy_v2(stream->event);
            take_off(pace, stream->generation, stream->launches);
            *link = stream->next;
            free(stream);
        }
        pthread_mutex_unlock(&pace->lock);
    }
}

RESET_IN_CHILD(pace_reset);
void pace_reset(void) {
    memset(paces, 0, sizeof paces);
    for (int i = 0; i < MAX_GPUS; i++) pthread_mutex_init(&paces[i].lock, NULL);
}
