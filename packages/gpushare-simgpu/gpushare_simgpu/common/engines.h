/* The engines of a GPU plan by instants: each knows when it is done with what it has taken on. Who waits for an engine
 * sleeps until the end of its own stretch, so that late wake-ups do not add up. All with the GPU's lock held. */
#ifndef SIMGPU_ENGINES_H
#define SIMGPU_ENGINES_H

#include "common/state.h"

/* Takes the engine for `ns` from `ready` on, after everything taken before, and gives the end. */
uint64_t engine_take(struct engine *engine, uint64_t ready, uint64_t ns);

/* Counts pages that left for plain memory, and takes the engine for them; gives the end, 0 for none. */
uint64_t engine_evict(struct state *state, int gpu, uint64_t pages);

/* Counts compute time of a process for the utilisation that NVML shows, of the GPU and of the process. */
void engine_count_busy(struct gpu *gpu, uint32_t slot, uint64_t from, uint64_t until);

/* Busy time in the last second before `now`. */
uint64_t engine_recent_busy(const struct gpu *gpu, uint64_t now);

/* The sample periods that are complete at `now` and still in the buffer: from `first` to before the returned one. */
uint64_t engine_periods(uint64_t now, uint64_t *first);

/* Compute time of a process in the periods from `first` to before `end`, and in *last the latest of them in which it
 * computed. 0: in none of them. */
uint64_t engine_usage(const struct gpu *gpu, uint32_t slot, uint64_t first, uint64_t end, uint64_t *last);

#endif
