/* What every file here needs: attributes, the clock, the log. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver/cuda_abi.h"
#include "platform/late_libc.h"

#define likely(x)   __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* The wrapper of a driver function is `wrapped_NAME`; a program that is linked against libcuda finds it as NAME. */
#define EXPORTED(name)                                                                                                 \
    extern __typeof__(wrapped_##name) name __attribute__((alias("wrapped_" #name), visibility("default")))

#define MILLISECOND 1000000ull
#define SECOND      1000000000ull

/* Monotonic, nanoseconds. */
uint64_t now_ns(void);

enum log_level { LOG_OFF, LOG_ERROR, LOG_INFO, LOG_DEBUG };

/* Read GPUSHARE_LOG, once. */
void log_prepare(void);

/* One line to where GPUSHARE_LOG says (default: errors, to stderr). */
void log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
