#define _GNU_SOURCE
#include "gate/launch.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "contexts/captures.h"
#include "platform/futex.h"
#include "platform/wake.h"

/* The background thread opens the gate after 30 s without an answer. Should that thread hang itself, launches wait 5 s
 * more. */
#define PATIENCE (35 * SECOND)

static struct passage *_Atomic passages;
static struct gpu nowhere; /* never open: what a thread's record points at before its first launch */
static struct lane no_lane = {.gpu = &nowhere};
static pthread_key_t thread_end;

static void thread_ended(void *value) {
    struct passage *passage = value;
    lanes_passage = NULL;
    atomic_store_explicit(&passage->depth, 0, memory_order_relaxed);
    atomic_store_explicit(&passage->used, false, memory_order_release);
}

void launch_prepare(void) {
    static bool keyed;
    pace_prepare();
    if (!keyed) keyed = pthread_key_create(&thread_end, thread_ended) == 0;
}

static __attribute__((noinline, cold)) struct passage *passage_of_new_thread(void) {
    struct passage *passage;
    for (passage = atomic_load(&passages); passage; passage = passage->next) {
        bool free = false;
        if (atomic_compare_exchange_strong(&passage->used, &free, true)) break;
    }
    if (!passage) {
        void *memory;
        if (posix_memalign(&memory, _Alignof(struct passage), sizeof *passage)) return NULL;
        passage = memory;
        __builtin_memset(passage, 0, sizeof *passage);
        passage->used = true;
        passage->lane = &no_lane;
        passage->next = atomic_load(&passages);
        while (!atomic_compare_exchange_weak(&passages, &passage->next, passage)) {
        }
    }
    passage->epoch = 0; /* whatever is remembered is of another thread */
    passage->paced = NULL;
    pthread_setspecific(thread_end, passage);
    return lanes_passage = passage;
}

/* A wait that a signal interrupts ends, so that the program comes to its handler: Python's handler in C does no more
   than take note, and KeyboardInterrupt is raised when the call returns. What the thread launches on its way out of its
   call goes through as well, but no more than that: a program with a timer must not pass the gate at each tick. So the
   interruptions of a process that follow each other are granted after 1 s, then 2 s, and so on. */
#define WAY_OUT_LAUNCHES 16
#define WAY_OUT_TIME     (200 * MILLISECOND)
#define FIRST_INTERVAL   (1 * SECOND)
#define LAST_INTERVAL    (60 * SECOND)

static struct {
    pthread_mutex_t lock;
    uint64_t next_at, interval;
} interruptions = {PTHREAD_MUTEX_INITIALIZER, 0, FIRST_INTERVAL};

static bool interruption_granted(struct passage *passage) {
    uint64_t now = clock_now();
    pthread_mutex_lock(&interruptions.lock);
    bool granted = now >= interruptions.next_at;
    if (granted) {
        if (now > interruptions.next_at + LAST_INTERVAL) interruptions.interval = FIRST_INTERVAL;
        interruptions.next_at = now + interruptions.interval;
        interruptions.interval *= 2;
        if (interruptions.interval > LAST_INTERVAL) interruptions.interval = LAST_INTERVAL;
    }
    pthread_mutex_unlock(&interruptions.lock);
    if (!granted) return false;
    log_line(LOG_INFO, "a signal interrupted a wait for the GPU; up to %d launches go without a lease",
             WAY_OUT_LAUNCHES);
    passage->let_through = WAY_OUT_LAUNCHES;
    passage->let_until = now + WAY_OUT_TIME;
    return true;
}

/* Whether this launch is on the way out of a call that a signal interrupted. */
static bool goes_through(struct passage *passage) {
    if (!passage->let_through) return false;
    passage->let_through = clock_now() < passage->let_until ? passage->let_through - 1 : 0;
    return passage->let_through != 0;
}

/* Wait at the shut gate. False: no answer for too long, go on without a lease. */
static bool wait_at_gate(struct gpu *gpu, struct passage *passage) {
    int kept = errno;
    uint32_t progress = atomic_load(&gpu->progress);
    uint64_t deadline = clock_now() + PATIENCE;
    bool in_time = true, signalled = false;
    atomic_fetch_add(&gpu->waiters, 1);
    wake_up();
    while (!atomic_load(&gpu->open)) {
        struct timespec second = {1, 0};
        /* a wait with a time-out ends with EINTR after any handler, also of one that wants calls to be restarted */
        if (futex_wait(&gpu->open, 0, &second) != 0 && errno == EINTR) signalled = true;
        if (signalled && interruption_granted(passage)) break;
        uint32_t now_progress = atomic_load(&gpu->progress);
        if (now_progress != progress) {
            progress = now_progress;
            deadline = clock_now() + PATIENCE;
        } else if (clock_now() > deadline) {
            log_line(LOG_ERROR, "no lease for %d s; GPU work continues without one", (int)(PATIENCE / SECOND));
            in_time = false;
            break;
        }
    }
    atomic_fetch_sub(&gpu->waiters, 1);
    errno = kept;
    return in_time;
}

struct passage *launch_enter_slowly(struct passage *passage, CUstream stream) {
    if (unlikely(!passage)) {
        int kept = errno;
        if (!wake_listens() || !(passage = passage_of_new_thread())) return NULL;
        errno = kept;
    }
    uint32_t depth = atomic_load_explicit(&passage->depth, memory_order_relaxed);
    if (unlikely(depth)) {
        /* called by the driver, inside another call of this thread: that one has passed the gate */
        atomic_store_explicit(&passage->depth, depth + 1, memory_order_relaxed);
        return passage;
    }
    return launch_pass_slowly(passage, NULL, stream);
}

/* Outside while it waits: nobody must wait for this thread. */
static void stand_aside(struct passage *passage) {
    atomic_store_explicit(&passage->depth, 0, memory_order_release);
}

/* Whether the launch is recorded instead of being done. The driver is asked once in a lane for each news. */
static bool is_recorded(struct lane *lane, CUstream stream) {
    uint32_t news = atomic_load(&captures_news);
    if (atomic_load_explicit(&lane->uncaptured, memory_order_relaxed) == news) return false;
    if (capture_records(stream)) return true;
    atomic_store_explicit(&lane->uncaptured, news, memory_order_relaxed);
    return false;
}

struct passage *launch_pass_slowly(struct passage *passage, struct lane *lane, CUstream stream) {
    for (;; lane = NULL) {
        if (!lane) lane = lane_of(passage, stream);
        if (!lane || (captures_in_progress() && is_recorded(lane, stream))) {
            /* no current context, a GPU that is not arbitrated, or a call that is only recorded */
            launch_announce(passage, &no_lane);
            return passage;
        }
        launch_announce(passage, lane);
        struct gpu *gpu = atomic_load_explicit(&lane->gpu, memory_order_relaxed);
        if (likely(atomic_load_explicit(&gpu->open, memory_order_relaxed))) {
            bool through = passage->let_through && goes_through(passage);
            if (likely(pace_admits(passage, lane, through))) {
                launch_count(passage, lane);
                return passage;
            }
            stand_aside(passage);
            if (pace_wait(gpu, lane)) interruption_granted(passage);
            continue;
        }
        if (!goes_through(passage)) {
            stand_aside(passage);
            if (wait_at_gate(gpu, passage)) continue;
            launch_announce(passage, lane);
        }
        launch_count(passage, lane);
        return passage;
    }
}

bool launch_inside(const struct gpu *gpu) {
    for (struct passage *passage = atomic_load(&passages); passage; passage = passage->next) {
        if (!atomic_load_explicit(&passage->depth, memory_order_acquire)) continue;
        struct lane *lane = atomic_load(&passage->lane);
        if (lane->gpu == gpu) return true;
    }
    return false;
}

uint64_t launches_on(const struct gpu *gpu) {
    uint64_t sum = 0;
    for (struct passage *passage = atomic_load(&passages); passage; passage = passage->next)
        sum += atomic_load_explicit(&passage->launches[gpu->index], memory_order_relaxed);
    return sum;
}

void launch_forget(void) {
    atomic_store(&passages, NULL);
    pthread_mutex_init(&interruptions.lock, NULL);
}
