/* Monotonic time, and waiting for an instant. All instants in the simulator are CLOCK_MONOTONIC nanoseconds, which are
 * the same in every process on the machine. */
#ifndef SIMGPU_CLOCK_H
#define SIMGPU_CLOCK_H

#include <stdint.h>

#define NS_PER_SECOND 1000000000ull
#define NS_PER_MS     1000000ull

uint64_t clock_now(void);

/* Sleep until the instant. Returns immediately if the instant is nearer than the accuracy of a sleep: the caller
 * schedules by instants, so the time gained is carried over into its next wait. */
void clock_sleep_until(uint64_t instant);

/* Return the duration of a transfer of `bytes`, rounded up; 0 bytes take no time. */
uint64_t clock_transfer_ns(uint64_t bytes, uint64_t bytes_per_second);

/* Make the calling thread's sleeps as exact as the kernel allows (by default its timers have a slack of 50 us). */
void clock_exact_sleeps(void);

#endif
