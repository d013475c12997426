/* Definitions for all files: attributes, units of time, the clock, the log, and libc.h. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "platform/libc.h"

#define likely(x)   __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* A variable that several files use. With this declaration the compiler accesses it without the global offset table. */
#define HIDDEN extern __attribute__((visibility("hidden")))

/* Exports the wrapper `wrapped_NAME` as NAME, for programs that are linked against the driver's library. */
#define EXPORTED(name)                                                                                                 \
    extern __typeof__(wrapped_##name) name __attribute__((alias("wrapped_" #name), visibility("default")))

#define MILLISECOND 1000000ull
#define SECOND      1000000000ull

/* Return CLOCK_MONOTONIC in nanoseconds. Any thread; takes no lock. */
static inline uint64_t clock_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * SECOND + (uint64_t)now.tv_nsec;
}

enum log_level { LOG_OFF, LOG_ERROR, LOG_INFO, LOG_DEBUG };

/* Read the level and the log file from GPUSHARE_LOG, once (default: errors, to stderr). Takes a lock and allocates. */
void log_prepare(void);

/* Write one line. Any thread, with any lock held; preserves errno. Makes a system call if the level is logged. */
void log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
