/* How threads wait and wake: futexes, and the file that wakes the background thread. */
#pragma once

#include <linux/futex.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Wait while `*word` is `value`, for at most `timeout`. Returns the result of futex(2): -1 with EINTR after any signal
   handler, even one that restarts calls. */
static inline long futex_wait(_Atomic uint32_t *word, uint32_t value, const struct timespec *timeout) {
    return syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, timeout, NULL, 0);
}

/* Wake all waiting threads. */
static inline void futex_wake(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 30, NULL, NULL, 0);
}

/* Any thread, any lock held. */
bool wake_listens(void); /* whether there is a background thread */
void wake_up(void);      /* wake it: one system call, none if it is awake or does not exist */

/* For the thread that starts the background thread: open the file. False: errno has the reason. */
bool wake_open(void);
void wake_close(void);

/* For the background thread. */
int wake_file(void);   /* the file to poll; -1: none */
void wake_begin(void); /* called before each round: any later event wakes the thread again */
void wake_clear(void); /* called after the file was readable */
