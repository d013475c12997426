/* What every file here needs: attributes, units of time, the clock, the log, functions that are looked up late. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "platform/clock.h"
#include "platform/late_libc.h"
#include "platform/log.h"

#define likely(x)   __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* A variable that several files use. Said at its declaration, the compiler reaches it without a look-up in a table. */
#define HIDDEN extern __attribute__((visibility("hidden")))
