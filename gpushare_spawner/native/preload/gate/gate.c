#define _GNU_SOURCE
#include "gate/gate.h"

#include <errno.h>
#include <pthread.h>

#include "contexts/captures.h"
#include "contexts/lanes.h"
#include "platform/wake.h"

/* commands of membarrier(2), Linux 4.14, for which glibc 2.17 has no names */
#define MEMBARRIER_PRIVATE_EXPEDITED          (1 << 3)
#define MEMBARRIER_REGISTER_PRIVATE_EXPEDITED (1 << 4)

bool gate_fences;

static pthread_mutex_t turning = PTHREAD_MUTEX_INITIALIZER; /* protects `gate_state` and `fast` together */

void gate_prepare(void) {
#ifdef GATE_ALWAYS_FENCES
    gate_fences = true;
    return;
#endif
    gate_fences = syscall(SYS_membarrier, MEMBARRIER_REGISTER_PRIVATE_EXPEDITED, 0, 0) != 0;
    if (gate_fences) log_line(LOG_INFO, "membarrier(2) is missing; each launch makes a memory fence");
}

static void refresh(struct gpu *gpu) {
    atomic_store(&gpu->fast,
                 atomic_load(&gpu->gate_state) == GATE_OPEN && !atomic_load(&gpu->paced) && !captures_in_progress());
}

void gate_refresh(struct gpu *gpu) {
    pthread_mutex_lock(&turning);
    refresh(gpu);
    pthread_mutex_unlock(&turning);
}

void gate_open(struct gpu *gpu) {
    pthread_mutex_lock(&turning);
    atomic_store(&gpu->gate_state, GATE_OPEN);
    refresh(gpu);
    pthread_mutex_unlock(&turning);
    futex_wake(&gpu->gate_state);
}

/* Change the state. Every later launch either sees the new state or is seen inside. */
static void leave_open_state(struct gpu *gpu, enum gate_state state) {
    pthread_mutex_lock(&turning);
    atomic_store(&gpu->gate_state, state);
    refresh(gpu);
    pthread_mutex_unlock(&turning);
    if (gate_fences || syscall(SYS_membarrier, MEMBARRIER_PRIVATE_EXPEDITED, 0, 0) != 0)
        atomic_thread_fence(memory_order_seq_cst);
}

void gate_shut(struct gpu *gpu) {
    leave_open_state(gpu, GATE_SHUT);
}

void gate_rest(struct gpu *gpu) {
    leave_open_state(gpu, GATE_RESTING);
}

void gate_stir(struct gpu *gpu) {
    pthread_mutex_lock(&turning);
    if (atomic_load(&gpu->gate_state) == GATE_RESTING) atomic_store(&gpu->gate_state, GATE_OPEN);
    refresh(gpu);
    pthread_mutex_unlock(&turning);
    wake_up();
}

/* ---- threads that wait ---- */

/* The background thread opens the gate after 30 s without an answer. If that thread itself hangs, launches wait 5 s
   longer. */
#define PATIENCE (35 * SECOND)

/* A signal ends a wait, so that the program's handler takes effect: Python's handler in C only sets a flag, and Python
   raises KeyboardInterrupt when the call returns. The thread's launches on its way out of that call pass as well, but
   no other launches: a program with a timer must not pass the gate at each tick. So a process's successive
   interruptions are granted after 1 s, then 2 s, and so on. */
#define WAY_OUT_LAUNCHES 16
#define WAY_OUT_TIME     (200 * MILLISECOND)
#define FIRST_INTERVAL   (1 * SECOND)
#define LAST_INTERVAL    (60 * SECOND)

static struct {
    pthread_mutex_t lock;
    uint64_t next_at, interval;
} interruptions = {PTHREAD_MUTEX_INITIALIZER, 0, FIRST_INTERVAL};

bool gate_interrupted(struct passage *passage) {
    /* the driver would block a call of a suspended process, and no signal ends that wait; a call that waits for memory
       returns its error and makes no further driver call */
    bool suspended = driver_threads_suspended();
    if (suspended && !passage->short_of) return false;
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
    if (suspended) return true;
    log_line(LOG_INFO, "a signal interrupted a wait for the GPU; up to %d launches go without a lease",
             WAY_OUT_LAUNCHES);
    passage->let_through = WAY_OUT_LAUNCHES;
    passage->let_until = now + WAY_OUT_TIME;
    return true;
}

bool gate_lets_through(struct passage *passage) {
    if (!passage->let_through) return false;
    passage->let_through = clock_now() < passage->let_until ? passage->let_through - 1 : 0;
    return passage->let_through != 0;
}

enum gate_wait_end gate_wait(_Atomic uint32_t *word, uint32_t shut, struct gpu *gpu, struct passage *passage) {
    int kept = errno;
    uint32_t progress = atomic_load(&gpu->progress);
    uint64_t deadline = clock_now() + PATIENCE;
    enum gate_wait_end end = GATE_WAIT_OVER;
    bool signalled = false;
    atomic_fetch_add(&gpu->waiters, 1);
    wake_up();
    while (atomic_load(word) == shut) {
        struct timespec second = {1, 0};
        /* a futex wait with a time-out ends with EINTR after any handler, also after a handler that restarts calls */
        if (futex_wait(word, shut, &second) != 0 && errno == EINTR) signalled = true;
        if (signalled && gate_interrupted(passage)) {
            end = GATE_WAIT_INTERRUPTED;
            break;
        }
        uint32_t now_progress = atomic_load(&gpu->progress);
        if (now_progress != progress) {
            progress = now_progress;
            deadline = clock_now() + PATIENCE;
        } else if (clock_now() > deadline) {
            log_line(LOG_ERROR, "no lease for %d s; GPU work continues without one", (int)(PATIENCE / SECOND));
            end = GATE_WAIT_UNANSWERED;
            break;
        }
    }
    atomic_fetch_sub(&gpu->waiters, 1);
    errno = kept;
    return end;
}

RESET_IN_CHILD(gate_reset);
void gate_reset(void) {
    pthread_mutex_init(&turning, NULL);
    pthread_mutex_init(&interruptions.lock, NULL);
}
