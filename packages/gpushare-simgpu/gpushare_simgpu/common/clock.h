/* Monotonic time, and waiting for an instant of it. All instants of the simulator are CLOCK_MONOTONIC nanoseconds,
 * which every process of the machine reads alike. */
#ifndef SIMGPU_CLOCK_H
#define SIMGPU_CLOCK_H

#include <stdint.h>

#define NS_PER_SECOND 1000000000ull
#define NS_PER_MS     1000000ull

uint64_t clock_now(void);

/* Sleeps until the instant. Returns at once when it is nearer than a sleep is accurate: the caller plans by instants,
 * so what is gained here is not lost but carried over into its next wait. */
void clock_sleep_until(uint64_t instant);

/* How long that many bytes take, rounded up; 0 bytes take no time. */
uint64_t clock_transfer_ns(uint64_t bytes, uint64_t bytes_per_second);

/* Makes the sleeps of the calling thread as exact as the kernel can (its timers are otherwise 50 us lazy). */
void clock_exact_sleeps(void);

#endif
