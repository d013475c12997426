/* The clock of everything here: monotonic, in nanoseconds. */
#pragma once

#include <stdint.h>

#define MILLISECOND 1000000ull
#define SECOND      1000000000ull

/* Nanoseconds of CLOCK_MONOTONIC. Any thread; takes no lock. */
uint64_t clock_now(void);
