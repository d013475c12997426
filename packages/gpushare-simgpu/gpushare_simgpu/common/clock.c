#include "common/clock.h"

#include <errno.h>
#include <sys/prctl.h>
#include <time.h>

/* The approximate scheduling cost of a sleep, below which sleeping is not worthwhile. */
#define SHORTEST_SLEEP 60000ull

uint64_t clock_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS_PER_SECOND + (uint64_t)t.tv_nsec;
}

void clock_sleep_until(uint64_t instant) {
    if (instant < clock_now() + SHORTEST_SLEEP) return;
    struct timespec t = {.tv_sec = (time_t)(instant / NS_PER_SECOND), .tv_nsec = (long)(instant % NS_PER_SECOND)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR);
}

uint64_t clock_transfer_ns(uint64_t bytes, uint64_t bytes_per_second) {
    if (bytes == 0) return 0;
    return (uint64_t)((double)bytes * (double)NS_PER_SECOND / (double)bytes_per_second) + 1;
}

void clock_exact_sleeps(void) {
    prctl(PR_SET_TIMERSLACK, 1ul, 0, 0, 0);
}
