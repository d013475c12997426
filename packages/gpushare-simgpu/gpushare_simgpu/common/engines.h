/* The engines of a GPU schedule by instants: each stores the end of the work that it has accepted. A thread that waits
 * for an engine sleeps until the end of its own work, so that late wake-ups do not accumulate. All functions require
 * the GPU's lock. */
#ifndef SIMGPU_ENGINES_H
#define SIMGPU_ENGINES_H

#include "common/state.h"

/* Reserve the engine for `ns` from `ready` on, after all earlier reservations. Returns the end. */
uint64_t engine_take(struct engine *engine, uint64_t ready, uint64_t ns);

/* Count pages evicted for plain memory, and reserve the engine for them. Returns the end; 0 for no pages. */
uint64_t engine_evict(struct state *state, int gpu, uint64_t pages);

/* Count a process's compute time for the utilization of the GPU and of the process that NVML shows. */
void engine_count_busy(struct gpu *gpu, uint32_t slot, uint64_t from, uint64_t until);

/* Return the busy time in the last second before `now`. */
uint64_t engine_recent_busy(const struct gpu *gpu, uint64_t now);

/* Return the range of sample periods that are complete at `now` and still in the buffer: from `first` up to, but not
 * including, the returned period. */
uint64_t engine_periods(uint64_t now, uint64_t *first);

/* Return the compute time of a process in the periods from `first` up to, but not including, `end`, and in *last the
 * latest period in which it computed. 0: it computed in none of them. */
uint64_t engine_usage(const struct gpu *gpu, uint32_t slot, uint64_t first, uint64_t end, uint64_t *last);

#endif
