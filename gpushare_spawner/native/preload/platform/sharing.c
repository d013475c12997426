#include "platform/sharing.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>

bool sharing_wanted(void) {
    static _Atomic int answer; /* 0: not asked yet */
    int known_answer = atomic_load_explicit(&answer, memory_order_relaxed);
    if (!known_answer) {
        const char *socket = getenv("GPUSHARE_SOCKET"), *disabled = getenv("GPUSHARE_DISABLE");
        bool off = disabled && *disabled && strcmp(disabled, "0") != 0;
        /* in a setuid program, which has this library from /etc/ld.so.preload, the environment is the caller's */
        known_answer = socket && *socket && !off && !getauxval(AT_SECURE) ? 1 : 2;
        atomic_store_explicit(&answer, known_answer, memory_order_relaxed);
    }
    return known_answer == 1;
}
