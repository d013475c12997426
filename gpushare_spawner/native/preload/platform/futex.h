/* Futexes within this process, futex(2). The file that includes this defines _GNU_SOURCE first. */
#pragma once

#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Wait while `*word` is `value`, for `timeout` at most. Returns what the system call returned: -1 with EINTR after any
   handler of a signal, also of one that wants calls to be restarted. */
static inline long futex_wait(_Atomic uint32_t *word, uint32_t value, const struct timespec *timeout) {
    return syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, timeout, NULL, 0);
}

/* Wake all threads that wait. */
static inline void futex_wake(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 30, NULL, NULL, 0);
}
