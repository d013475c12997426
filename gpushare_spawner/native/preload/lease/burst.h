/* Bursts: work from the first launch until the device is quiet, seen from the side. Only for the background thread,
   with no lock held: marks.h says which it takes. */
#pragma once

#include "driver/gpus.h"

enum burst_change { BURST_SAME, BURST_BEGAN, BURST_ENDED };

void burst_lease_begins(struct gpu *gpu);

/* Without a lease: bursts are told from now on, and none is under way; one is, which began before. */
void burst_watch_begins(struct gpu *gpu);
void burst_goes_on(struct gpu *gpu, uint64_t now);

/* Look, and say when to look again. */
enum burst_change burst_step(struct gpu *gpu, uint64_t now, uint64_t *next);

/* The device is known to be quiet. */
void burst_over(struct gpu *gpu, uint64_t now);

/* Nanoseconds of work under the present lease, or since burst_watch_begins; since the last work, 0 while there is some.
 */
uint64_t burst_busy_time(const struct gpu *gpu);
uint64_t burst_quiet_time(const struct gpu *gpu, uint64_t now);

void bursts_forget(void); /* in a forked child */
