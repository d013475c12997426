/* The engines of a GPU plan by instants: each knows when it is done with what it has taken on. Who waits for an engine
 * sleeps until the end of its own stretch, so that late wake-ups do not add up. All with the GPU's lock held. */
#ifndef SIMGPU_ENGINES_H
#define SIMGPU_ENGINES_H

#include "state.h"

/* Takes the engine for `ns` from `ready` on, after everything taken before, and gives the end. */
uint64_t engine_take(struct engine *engine, uint64_t ready, uint64_t ns);

/* Counts compute time for the utilisation that NVML shows. */
void engine_count_busy(struct gpu *gpu, uint64_t from, uint64_t until);

/* Busy time in the last second before `now`. */
uint64_t engine_recent_busy(const struct gpu *gpu, uint64_t now);

#endif
