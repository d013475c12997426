#include "cuda/streams/call_lock.h"

#include "common/futex.h"

static uint32_t inside;         /* number of threads in such calls */
static uint32_t closed;         /* futex word: 1 while the process is locked */
static __thread uint32_t depth; /* nesting depth of calls */

int call_lock_enter(void) {
    if (__builtin_expect(driver.phase != DRIVER_READY, 0)) return 0;
    if (depth++) return 1;
    for (;;) {
        /* this thread counts itself and then checks; the closing thread does the reverse, so one of them sees the
         * other */
        __atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST);
        if (__builtin_expect(!__atomic_load_n(&closed, __ATOMIC_SEQ_CST), 1)) return 1;
        __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
        futex_wait(&closed, 1, 0, 0);
    }
}

void call_lock_leave(int *entered) {
    if (*entered && --depth == 0) __atomic_sub_fetch(&inside, 1, __ATOMIC_RELEASE);
}

void call_lock_exempt(void) {
    depth++;
}

void call_lock_close(void) {
    __atomic_store_n(&closed, 1, __ATOMIC_SEQ_CST);
}

int call_lock_inside(void) {
    return __atomic_load_n(&inside, __ATOMIC_SEQ_CST) != 0;
}

void call_lock_open(void) {
    __atomic_store_n(&closed, 0, __ATOMIC_SEQ_CST);
    futex_wake_all(&closed, 0);
}

void call_lock_forked(void) {
    inside = closed = depth = 0;
}
