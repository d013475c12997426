/* Loaded before libgpushare.so: its clock runs 20 times as fast, or as the environment's FAST says, so that half a
   minute of patience is over in a second. Only for the library's own thread and waits; the simulated GPU and the
   program keep their clocks. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

static unsigned fast(void) {
    static unsigned times;
    if (!times) times = getenv("FAST") ? (unsigned)atoi(getenv("FAST")) : 20;
    return times;
}

static int called_by_library(const void *from) {
    Dl_info info;
    return dladdr(from, &info) && info.dli_fname && strstr(info.dli_fname, "libgpushare.so");
}

EXPORT int clock_gettime(clockid_t clock, struct timespec *t) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
    int result = next(clock, t);
    if (result == 0 && clock == CLOCK_MONOTONIC && called_by_library(__builtin_return_address(0))) {
        unsigned long long now =
            ((unsigned long long)t->tv_sec * 1000000000ull + (unsigned long long)t->tv_nsec) * fast();
        t->tv_sec = (time_t)(now / 1000000000ull);
        t->tv_nsec = (long)(now % 1000000000ull);
    }
    return result;
}

EXPORT int ppoll(struct pollfd *files, nfds_t count, const struct timespec *timeout, const sigset_t *mask) {
    static int (*next)(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *);
    if (!next) next = dlsym(RTLD_NEXT, "ppoll");
    struct timespec shorter;
    if (timeout && called_by_library(__builtin_return_address(0))) {
        unsigned long long wait =
            ((unsigned long long)timeout->tv_sec * 1000000000ull + (unsigned long long)timeout->tv_nsec) / fast();
        shorter.tv_sec = (time_t)(wait / 1000000000ull);
        shorter.tv_nsec = (long)(wait % 1000000000ull);
        timeout = &shorter;
    }
    return next(files, count, timeout, mask);
}

EXPORT int poll(struct pollfd *files, nfds_t count, int timeout) {
    static int (*next)(struct pollfd *, nfds_t, int);
    if (!next) next = dlsym(RTLD_NEXT, "poll");
    if (timeout > 0 && called_by_library(__builtin_return_address(0))) timeout = timeout / (int)fast() + 1;
    return next(files, count, timeout);
}
