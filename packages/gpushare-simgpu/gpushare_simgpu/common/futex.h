/* The kernel's futex calls: waiting for a 32-bit word to change, in this process or across processes. */
#ifndef SIMGPU_FUTEX_H
#define SIMGPU_FUTEX_H

#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Wait until the word is not `seen`, a wake-up, a signal, or the end of timeout_ns (0: no limit); the caller must check
 * again. */
static inline void futex_wait(uint32_t *word, uint32_t seen, uint64_t timeout_ns, int shared) {
    struct timespec t = {.tv_sec = (time_t)(timeout_ns / 1000000000ull), .tv_nsec = (long)(timeout_ns % 1000000000ull)};
    syscall(SYS_futex, word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, seen, timeout_ns ? &t : NULL, NULL, 0);
}

static inline void futex_wake_all(uint32_t *word, int shared) {
    syscall(SYS_futex, word, shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

#endif
