#define _GNU_SOURCE
#include "gate/waiting.h"

#include <errno.h>
#include <pthread.h>

#include "driver/suspension.h"
#include "platform/futex.h"
#include "platform/wake.h"

/* The background thread opens the gate after 30 s without an answer. Should that thread hang itself, launches wait 5 s
 * more. */
#define PATIENCE (35 * SECOND)

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

bool waiting_interrupted(struct passage *passage) {
    /* the driver would block a call of a suspended process, and no signal ends that; a call that waits for memory has
       its error already, and makes no other */
    bool suspended = suspension_waits();
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

bool waiting_goes_through(struct passage *passage) {
    if (!passage->let_through) return false;
    passage->let_through = clock_now() < passage->let_until ? passage->let_through - 1 : 0;
    return passage->let_through != 0;
}

enum waiting_end waiting_in_front(_Atomic uint32_t *word, uint32_t shut, struct gpu *gpu, struct passage *passage) {
    int kept = errno;
    uint32_t progress = atomic_load(&gpu->progress);
    uint64_t deadline = clock_now() + PATIENCE;
    enum waiting_end end = WAITING_OPENED;
    bool signalled = false;
    atomic_fetch_add(&gpu->waiters, 1);
    wake_up();
    while (atomic_load(word) == shut) {
        struct timespec second = {1, 0};
        /* a wait with a time-out ends with EINTR after any handler, also of one that wants calls to be restarted */
        if (futex_wait(word, shut, &second) != 0 && errno == EINTR) signalled = true;
        if (signalled && waiting_interrupted(passage)) {
            end = WAITING_INTERRUPTED;
            break;
        }
        uint32_t now_progress = atomic_load(&gpu->progress);
        if (now_progress != progress) {
            progress = now_progress;
            deadline = clock_now() + PATIENCE;
        } else if (clock_now() > deadline) {
            log_line(LOG_ERROR, "no lease for %d s; GPU work continues without one", (int)(PATIENCE / SECOND));
            end = WAITING_UNANSWERED;
            break;
        }
    }
    atomic_fetch_sub(&gpu->waiters, 1);
    errno = kept;
    return end;
}

void waiting_forget(void) {
    pthread_mutex_init(&interruptions.lock, NULL);
}
