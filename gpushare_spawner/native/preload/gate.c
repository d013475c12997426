#define _GNU_SOURCE
#include "gate.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "capture.h"
#include "contexts.h"
#include "worker.h"

/* numbers of membarrier(2), Linux 4.14; glibc 2.17 has no name for them */
#define MEMBARRIER_PRIVATE_EXPEDITED          (1 << 3)
#define MEMBARRIER_REGISTER_PRIVATE_EXPEDITED (1 << 4)

/* The background thread opens the gate after 30 s without an answer. Should that thread hang itself, launches wait 5 s
 * more. */
#define PATIENCE (35 * SECOND)

__thread struct passage *my_passage __attribute__((tls_model("initial-exec")));
_Atomic uint32_t lanes_epoch = 1;
bool gate_fences;

static struct passage *_Atomic passages;
static struct gpu nowhere; /* never open: what a thread's record points at before its first launch */
static struct lane no_lane = {.gpu = &nowhere};
static pthread_mutex_t turning = PTHREAD_MUTEX_INITIALIZER; /* of `open` and `fast` together */
static pthread_key_t thread_end;

static void thread_ended(void *value) {
    struct passage *passage = value;
    my_passage = NULL;
    atomic_store_explicit(&passage->depth, 0, memory_order_relaxed);
    atomic_store_explicit(&passage->used, false, memory_order_release);
}

void gate_prepare(void) {
    static bool keyed;
    pace_prepare();
    if (!keyed) keyed = pthread_key_create(&thread_end, thread_ended) == 0;
#ifdef GATE_ALWAYS_FENCES
    gate_fences = true;
    return;
#endif
    gate_fences = syscall(SYS_membarrier, MEMBARRIER_REGISTER_PRIVATE_EXPEDITED, 0, 0) != 0;
    if (gate_fences) log_line(LOG_INFO, "no membarrier(2) here: each launch pays for a memory fence");
}

static struct passage *passage_of_new_thread(void) {
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
    passage->stream = NO_STREAM;
    passage->context = NULL;
    passage->epoch = 0;
    passage->paced = NULL;
    pthread_setspecific(thread_end, passage);
    return my_passage = passage;
}

/* Wait at the shut gate. False: no answer for too long, go on without a lease. */
static bool gate_wait(struct gpu *gpu) {
    uint32_t progress = atomic_load(&gpu->progress);
    uint64_t deadline = now_ns() + PATIENCE;
    bool in_time = true;
    atomic_fetch_add(&gpu->waiters, 1);
    worker_wake();
    while (!atomic_load(&gpu->open)) {
        struct timespec second = {1, 0};
        syscall(SYS_futex, &gpu->open, FUTEX_WAIT_PRIVATE, 0, &second, NULL, 0);
        uint32_t now_progress = atomic_load(&gpu->progress);
        if (now_progress != progress) {
            progress = now_progress;
            deadline = now_ns() + PATIENCE;
        } else if (now_ns() > deadline) {
            in_time = false;
            break;
        }
    }
    atomic_fetch_sub(&gpu->waiters, 1);
    return in_time;
}

struct passage *gate_enter_slowly(struct passage *passage, CUstream stream) {
    int kept = errno;
    if (!passage) {
        if (!worker_runs() || !(passage = passage_of_new_thread())) return NULL;
        atomic_store(&passage->depth, 1);
    }
    /* called by the driver, inside another call of this thread: that one has passed the gate */
    if (atomic_load_explicit(&passage->depth, memory_order_relaxed) > 1) return passage;

    for (;;) {
        struct lane *lane = lane_of(passage, stream);
        if (!lane) break; /* no current context, or a GPU that is not arbitrated */
        if (captures_in_progress() && is_capturing(stream)) break;
        passage->stream = NO_STREAM;
        atomic_store(&passage->lane, lane);
        atomic_thread_fence(memory_order_seq_cst);
        struct gpu *gpu = atomic_load(&lane->gpu);
        if (atomic_load(&gpu->open)) {
            if (!pace_admits(passage, lane)) {
                atomic_store(&passage->depth, 0);
                pace_wait(gpu, lane);
                atomic_store(&passage->depth, 1);
                continue;
            }
            if (lane_is_certain(stream)) passage->stream = stream;
            gate_count(passage, lane);
            break;
        }
        atomic_store(&passage->depth, 0);
        bool in_time = gate_wait(gpu);
        atomic_store(&passage->depth, 1);
        if (!in_time) {
            log_line(LOG_ERROR, "no lease in %d s: going on without one", (int)(PATIENCE / SECOND));
            gate_count(passage, lane);
            break;
        }
    }
    errno = kept;
    return passage;
}

static void refresh(struct gpu *gpu) {
    atomic_store(&gpu->fast, atomic_load(&gpu->open) && !pace_is_set(gpu) && !captures_in_progress());
}

void gate_refresh(struct gpu *gpu) {
    pthread_mutex_lock(&turning);
    refresh(gpu);
    pthread_mutex_unlock(&turning);
}

void gate_open(struct gpu *gpu) {
    pthread_mutex_lock(&turning);
    atomic_store(&gpu->open, 1);
    refresh(gpu);
    pthread_mutex_unlock(&turning);
    syscall(SYS_futex, &gpu->open, FUTEX_WAKE_PRIVATE, 1 << 30, NULL, NULL, 0);
}

void gate_shut(struct gpu *gpu) {
    pthread_mutex_lock(&turning);
    atomic_store(&gpu->open, 0);
    refresh(gpu);
    pthread_mutex_unlock(&turning);
    if (gate_fences || syscall(SYS_membarrier, MEMBARRIER_PRIVATE_EXPEDITED, 0, 0) != 0)
        atomic_thread_fence(memory_order_seq_cst);
}

bool gate_inside(const struct gpu *gpu) {
    for (struct passage *passage = atomic_load(&passages); passage; passage = passage->next) {
        if (!atomic_load_explicit(&passage->depth, memory_order_acquire)) continue;
        struct lane *lane = atomic_load(&passage->lane);
        if (lane->gpu == gpu) return true;
    }
    return false;
}

uint64_t gate_launches(const struct gpu *gpu) {
    uint64_t sum = 0;
    for (struct passage *passage = atomic_load(&passages); passage; passage = passage->next)
        sum += atomic_load_explicit(&passage->launches[gpu->index], memory_order_relaxed);
    return sum;
}

void gate_forget_threads(void) {
    atomic_store(&passages, NULL);
    my_passage = NULL;
    pthread_mutex_init(&turning, NULL);
}
