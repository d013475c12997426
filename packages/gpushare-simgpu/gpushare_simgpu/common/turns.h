/* Who owns the compute engine. Processes take turns in the order in which they ask; a turn ends when its process has
 * nothing to run, or when a time slice is over and another waits. */
#ifndef SIMGPU_TURNS_H
#define SIMGPU_TURNS_H

#include "common/state.h"

/* Waits until the process owns the engine (at once if it does already). Takes and leaves the GPU's lock. */
void turns_wait(struct state *state, int gpu, uint32_t slot);

/* Gives the engine to the next process in its queue, or to nobody. With the lock held; only by the owner, or for it. A
 * stopped process in the queue has its slice in passing. */
void turns_pass_on(struct state *state, int gpu);

/* True when another waits and the owner has had its slice at instant `now`. With the lock held. */
int turns_over(struct state *state, int gpu, uint64_t now);

/* What stopped processes have launched runs on, as on a GPU: it gets the time until `now` that the engine was free, and
 * a slice of each round while others want the engine. A stopped owner loses the engine. The memory that the kernels
 * work on changes when their process goes on: it then has so much less to wait for. With the lock held. */
void turns_settle(struct state *state, int gpu, uint64_t now);

/* True while the process owns the engine. With the lock held. */
int turns_owned(const struct state *state, int gpu, uint32_t slot);

/* Removes a dead process from owner and line. With the lock held. */
void turns_forget(struct state *state, int gpu, uint32_t slot);

/* Counts those who wait anew. With the lock held. */
void turns_rebuild(struct state *state, int gpu);

#endif
