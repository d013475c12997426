#define _GNU_SOURCE
#include "gate/pace.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "contexts/captures.h"
#include "contexts/contexts.h"
#include "gate/gate.h"
#include "driver/driver.h"

/* Two launches keep a GPU busy: one runs, one waits behind it. More than a driver's own queue holds have no effect. */
#define LEAST_WINDOW 2
/* A launch of so many paces' length needs none behind it: the gap that is left is far below a hundredth of it, and the
   one behind it could not be taken back. The first launch is taken for such a one. */
#define LONG_LAUNCH 10
#define MOST_WINDOW 1024
/* A mark stands behind this part of a window. */
#define SEGMENTS    8
#define SHORT_SLEEP (50 * MILLISECOND / 1000)
#define LONG_SLEEP  (2 * MILLISECOND)
/* Work that makes no progress for so long while threads wait may be waiting for their launches: some are let through,
   again after twice the time, and so on. */
#define DEADLOCK_PATIENCE (5 * SECOND)
/* Launches may be long, and slow beside other processes': so many times as long as they took is waited. */
#define LAUNCHES_PATIENCE 8
/* Where none has ended yet. */
#define FIRST_PATIENCE (30 * SECOND)

/* Launches into a stream that was destroyed before they were done. */
struct gone {
    CUevent event;
    CUcontext context;
    uint32_t generation;
    uint64_t launches;
    struct gone *next;
};

struct pace {
    _Atomic uint64_t nanoseconds; /* 0: none */
    /* Upper half: the generation. Lower half: launches that were admitted and are not known to be done. In one word, so
       that a launch is never taken off another generation's account. */
    _Atomic uint64_t account;
    _Atomic uint32_t window, segment;
    _Atomic uint32_t extra; /* beyond the window: let through by the escape from a deadlock */
    _Atomic uint64_t busy_since;
    pthread_mutex_t lock; /* of all that follows, and of the lanes' marks. Taken after contexts_lock and the turn of
                             captures.h */
    struct lane *lanes;   /* with launches in this generation */
    struct gone *gone;
    uint64_t launch_time; /* nanoseconds of one launch, estimated; 0: not known */
    bool backlog;         /* work from before this generation may be ahead of what is counted */
    uint64_t stuck_since, patience;
    _Atomic uint64_t seen_time; /* nanoseconds of one launch, as those took that ended; 0: none has */
};

static struct pace paces[MAX_GPUS];
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
    uint64_t known = pace->launch_time;
    uint32_t least = !known || known > LONG_LAUNCH * atomic_load(&pace->nanoseconds) ? 1 : LEAST_WINDOW;
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
    uint64_t seen = atomic_load(&pace->seen_time), long_enough = seen ? LAUNCHES_PATIENCE * seen : FIRST_PATIENCE;
    return long_enough > DEADLOCK_PATIENCE ? long_enough : DEADLOCK_PATIENCE;
}

void pace_relax(struct gpu *gpu) {
    atomic_fetch_add(&paces[gpu->index].extra, LEAST_WINDOW + atomic_load(&gpu->waiters));
}

void pace_prepare(void) {
    for (int i = 0; i < MAX_GPUS; i++) {
        struct pace *pace = &paces[i];
        atomic_store(&pace->nanoseconds, 0);
        pace->lanes = NULL;
        pace->gone = NULL;
        pace->launch_time = 0;
        pthread_mutex_init(&pace->lock, NULL);
    }
}

/* A default stream orders the work of others too, so that an event must not be put into it but beside a launch there.
 */
static bool is_default(const struct lane *lane) {
    return lane->stream == NULL || lane->stream == CU_STREAM_PER_THREAD;
}

/* ---- with the lock held ---- */

static void lane_begins(struct pace *pace, struct lane *lane, uint32_t generation) {
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

/* Launches of the lane up to this one are done. Returns how many that are. */
static uint64_t done_upto(struct pace *pace, struct lane *lane, uint64_t upto) {
    uint64_t launches = upto - lane->pace.done;
    lane->pace.done = upto;
    take_off(pace, atomic_load(&lane->pace.generation), launches);
    return launches;
}

static uint64_t look_at_marks(struct pace *pace, struct lane *lane) {
    struct lane_pace *own = &lane->pace;
    uint64_t launches = 0;
    uint32_t pending = atomic_load(&own->pending);
    /* an error is no reason to wait */
    while (pending && real.cuEventQuery(own->marks[own->first].event) != CUDA_ERROR_NOT_READY) {
        launches += done_upto(pace, lane, own->marks[own->first].upto);
        own->first = (own->first + 1) % PACE_MARKS;
        atomic_store(&own->pending, --pending);
    }
    return launches;
}

/* Put a mark behind the lane's launches. Where that fails they are no longer counted. */
static void put_mark(struct pace *pace, struct lane *lane) {
    struct lane_pace *own = &lane->pace;
    uint32_t pending = atomic_load(&own->pending);
    uint64_t submitted = atomic_load(&own->submitted);
    if (pending == PACE_MARKS || submitted == atomic_load(&own->marked)) return;
    CUcontext current = NULL, meant = lane->context->handle;
    real.cuCtxGetCurrent(&current);
    bool switched = current != meant && real.cuCtxPushCurrent_v2(meant) == CUDA_SUCCESS;
    uint32_t at = (own->first + pending) % PACE_MARKS;
    if (!own->marks[at].event && real.cuEventCreate(&own->marks[at].event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        own->marks[at].event = NULL;
    bool put = own->marks[at].event && real.cuEventRecord(own->marks[at].event, lane->stream) == CUDA_SUCCESS;
    if (switched) real.cuCtxPopCurrent_v2(&current);
    atomic_store(&own->marked, submitted);
    if (put) {
        own->marks[at].upto = submitted;
        atomic_store(&own->pending, pending + 1);
    } else if (!pending) {
        done_upto(pace, lane, submitted);
    }
}

/* Estimate the time of a launch from what was seen to be done. `awaited`: a thread waits for the window. */
static void learn(struct pace *pace, uint64_t launches, bool awaited) {
    uint64_t now = clock_now(), since = atomic_load(&pace->busy_since), known = pace->launch_time;
    bool empty = outstanding(pace) == 0;
    if (launches) {
        uint64_t seen = since && !pace->backlog ? (now - since) / launches + 1 : known;
        if (!known)
            pace->launch_time = seen;
        else
            pace->launch_time = seen > known ? (known + seen) / 2 : (3 * known + seen) / 4;
        if (since && !pace->backlog) atomic_store(&pace->seen_time, seen);
        pace->backlog = false;
        atomic_store(&pace->busy_since, empty ? 0 : now);
        atomic_store(&pace->extra, 0);
        pace->stuck_since = now;
        pace->patience = DEADLOCK_PATIENCE;
        if (awaited && empty && atomic_load(&pace->window) > 1) {
            /* the queue ran dry before this thread looked: however late that was, the window was too small */
            if (known && pace->launch_time > known) pace->launch_time = known;
            if (!pace->launch_time) pace->launch_time = atomic_load(&pace->nanoseconds) / LEAST_WINDOW;
            pace->launch_time = pace->launch_time / 2 + 1;
        }
        adapt(pace);
    } else if (since && known && !pace->backlog) {
        /* that nothing was done says something too */
        uint64_t at_least = (now - since) / (2 * atomic_load(&pace->segment));
        if (at_least <= known) return;
        pace->launch_time = at_least;
        adapt(pace);
    }
}

static uint64_t look_at_gone(struct pace *pace) {
    uint64_t launches = 0;
    for (struct gone **link = &pace->gone; *link;) {
        struct gone *gone = *link;
        if (real.cuEventQuery(gone->event) == CUDA_ERROR_NOT_READY) {
            link = &gone->next;
            continue;
        }
        real.cuEventDestroy_v2(gone->event);
        take_off(pace, gone->generation, gone->launches);
        if (gone->generation == generation_of(atomic_load(&pace->account))) launches += gone->launches;
        *link = gone->next;
        free(gone);
    }
    return launches;
}

static void look(struct pace *pace, const struct lane *mine) {
    uint64_t launches = look_at_gone(pace);
    for (struct lane *lane = pace->lanes; lane; lane = lane->pace.next) {
        launches += look_at_marks(pace, lane);
        if (atomic_load(&lane->pace.pending)) continue;
        if (lane == mine || !is_default(lane))
            put_mark(pace, lane);
        else /* fewer than a segment; nothing would ever say that they are done */
            done_upto(pace, lane, atomic_load(&lane->pace.submitted));
    }
    learn(pace, launches, true);
}

/* Let more through if nothing has been done for long. */
static void escape(struct gpu *gpu, struct pace *pace, uint64_t now, uint64_t waiting_since) {
    uint64_t since = pace->stuck_since > waiting_since ? pace->stuck_since : waiting_since;
    if (!pace->patience) pace->patience = DEADLOCK_PATIENCE;
    if (now - since < pace->patience || now - since < LAUNCHES_PATIENCE * atomic_load(&pace->seen_time)) return;
    log_line(LOG_INFO,
             "GPU %d: queued work makes no progress while threads wait to launch more; some launches go ahead",
             gpu->index);
    atomic_fetch_add(&pace->extra, LEAST_WINDOW);
    pace->stuck_since = now;
    pace->patience *= 2;
}

/* ---- without it ---- */

bool pace_admits(struct passage *passage, struct lane *lane, bool through) {
    struct gpu *gpu = atomic_load_explicit(&lane->gpu, memory_order_relaxed);
    struct pace *pace = &paces[gpu->index];
    if (!atomic_load_explicit(&pace->nanoseconds, memory_order_relaxed)) return true;
    uint64_t account = atomic_load(&pace->account);
    do {
        uint32_t generation = generation_of(account);
        if (atomic_load(&lane->pace.generation) != generation) {
            pthread_mutex_lock(&pace->lock);
            lane_begins(pace, lane, generation);
            pthread_mutex_unlock(&pace->lock);
        }
        /* while anything is being captured no event may be put anywhere, so that nobody could say when there is room */
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
    if (atomic_load_explicit(&passage->depth, memory_order_relaxed) > 1) return; /* a call inside the admitted one */
    struct lane *lane = passage->paced;
    struct pace *pace = passage->pace;
    uint32_t generation = passage->pace_generation;
    struct lane_pace *own = &lane->pace;
    passage->paced = NULL;
    if (atomic_load(&own->generation) != generation) { /* its stream went meanwhile */
        take_off(pace, generation, 1);
        return;
    }
    uint64_t submitted = atomic_fetch_add(&own->submitted, 1) + 1;
    if (submitted - atomic_load(&own->marked) < atomic_load(&pace->segment) &&
        outstanding(pace) < atomic_load(&pace->window))
        return;
    int kept = errno;
    captures_hold_off();
    pthread_mutex_lock(&pace->lock);
    if (!captures_in_progress() && atomic_load(&own->generation) == generation &&
        generation_of(atomic_load(&pace->account)) == generation) {
        learn(pace, look_at_marks(pace, lane), false);
        put_mark(pace, lane);
    }
    pthread_mutex_unlock(&pace->lock);
    captures_let_on();
    errno = kept;
}

/* All signals but those that a fault of the thread itself raises. */
static void block_signals(sigset_t *before) {
    sigset_t most;
    sigfillset(&most);
    const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&most, faults[i]);
    pthread_sigmask(SIG_BLOCK, &most, before);
}

bool pace_wait(struct gpu *gpu, struct lane *lane) {
    struct pace *pace = &paces[gpu->index];
    uint64_t waiting_since = clock_now(), unknown = SHORT_SLEEP;
    int kept = errno;
    bool interrupted = false;
    sigset_t before;
    block_signals(&before); /* one that comes outside of ppoll would not be noticed */
    while (!interrupted && atomic_load(&gpu->open) && atomic_load(&pace->nanoseconds)) {
        captures_hold_off();
        pthread_mutex_lock(&pace->lock);
        bool capturing = captures_in_progress();
        if (!capturing) look(pace, lane);
        uint32_t room = atomic_load(&pace->window) + atomic_load(&pace->extra), segment = atomic_load(&pace->segment);
        bool free = outstanding(pace) + segment <= room;
        if (!free) escape(gpu, pace, clock_now(), waiting_since);
        uint64_t sleep = pace->launch_time ? pace->launch_time * segment / 2 : (unknown *= 2);
        pthread_mutex_unlock(&pace->lock);
        captures_let_on();
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

/* Put an event behind the lane's work, to be asked when the stream is no more. */
static void keep_as_gone(struct pace *pace, struct lane *lane, uint64_t launches) {
    struct gone *gone = capture_records(lane->stream) ? NULL : malloc(sizeof *gone);
    if (!gone) return;
    *gone = (struct gone){.context = lane->context->handle, .generation = atomic_load(&lane->pace.generation)};
    CUcontext current = NULL;
    real.cuCtxGetCurrent(&current);
    bool switched = current != gone->context && real.cuCtxPushCurrent_v2(gone->context) == CUDA_SUCCESS;
    bool made = real.cuEventCreate(&gone->event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
    bool put = made && real.cuEventRecord(gone->event, lane->stream) == CUDA_SUCCESS;
    if (made && !put) real.cuEventDestroy_v2(gone->event);
    if (switched) real.cuCtxPopCurrent_v2(&current);
    if (!put) {
        free(gone);
        return;
    }
    gone->launches = launches;
    gone->next = pace->gone;
    pace->gone = gone;
    lane->pace.done += launches; /* they are on this account now */
}

enum lane_end { LANE_STREAM_ENDS, LANE_CONTEXT_ENDS, LANE_CONTEXT_GONE };

static void lane_ends(struct lane *lane, enum lane_end end) {
    struct lane_pace *own = &lane->pace;
    struct pace *pace = &paces[lane->context->gpu->index];
    pthread_mutex_lock(&pace->lock);
    for (struct lane **link = &pace->lanes; *link; link = &(*link)->pace.next) {
        if (*link != lane) continue;
        *link = own->next;
        uint64_t submitted = atomic_load(&own->submitted);
        if (end == LANE_STREAM_ENDS && atomic_load(&pace->nanoseconds) && submitted > own->done)
            keep_as_gone(pace, lane, submitted - own->done);
        done_upto(pace, lane, submitted);
        break;
    }
    atomic_store(&own->generation, 0);
    atomic_store(&own->pending, 0);
    for (int i = 0; i < PACE_MARKS; i++) {
        if (own->marks[i].event && end != LANE_CONTEXT_GONE) real.cuEventDestroy_v2(own->marks[i].event);
        own->marks[i].event = NULL;
    }
    pthread_mutex_unlock(&pace->lock);
}

void pace_stream_ends(CUstream stream) {
    for (struct context *context = contexts; context; context = context->next)
        for (struct lane *lane = context->lanes; lane; lane = lane->next)
            if (lane->stream == stream) lane_ends(lane, LANE_STREAM_ENDS);
}

static void lanes_of_context_end(CUcontext handle, enum lane_end end) {
    for (struct context *context = contexts; context; context = context->next) {
        if (context->handle != handle) continue;
        for (struct lane *lane = context->lanes; lane; lane = lane->next) lane_ends(lane, end);
    }
}

void pace_context_gone(CUcontext context) {
    lanes_of_context_end(context, LANE_CONTEXT_GONE);
}

void pace_context_ends(CUcontext context) {
    lanes_of_context_end(context, LANE_CONTEXT_ENDS);
    for (int i = 0; i < gpu_count; i++) {
        struct pace *pace = &paces[i];
        pthread_mutex_lock(&pace->lock);
        for (struct gone **link = &pace->gone; *link;) {
            struct gone *gone = *link;
            if (gone->context != context) {
                link = &gone->next;
                continue;
            }
            real.cuEventDestroy_v2(gone->event);
            take_off(pace, gone->generation, gone->launches);
            *link = gone->next;
            free(gone);
        }
        pthread_mutex_unlock(&pace->lock);
    }
}
