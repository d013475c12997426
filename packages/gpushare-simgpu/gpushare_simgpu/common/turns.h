/* The ownership of the compute engine. Processes take turns in the order of their requests; a turn ends when its
 * process has nothing to run, or when its time slice is over and another process waits. */
#ifndef SIMGPU_TURNS_H
#define SIMGPU_TURNS_H

#include "common/state.h"

/* Wait until the process owns the engine; returns immediately if it already does. Takes and releases the GPU's lock. */
void turns_wait(struct state *state, int gpu, uint32_t slot);

/* Give the engine to the next process in its queue, if any. With the lock held; only by the owner or on its behalf. A
 * stopped process in the queue is credited with its slice and skipped. */
void turns_pass_on(struct state *state, int gpu);

/* Whether another process waits and the owner has used up its slice at instant `now`. With the lock held. */
int turns_over(struct state *state, int gpu, uint64_t now);

/* Let the kernels of stopped processes continue, as on a GPU: they get the time until `now` in which the engine was
 * free, and a slice of each round while other processes want the engine. A stopped owner loses the engine. The memory
 * on which the kernels work changes when their process continues, which then has correspondingly less to wait for. With
 * the lock held. */
void turns_settle(struct state *state, int gpu, uint64_t now);

/* Whether the process owns the engine. With the lock held. */
int turns_owned(const struct state *state, int gpu, uint32_t slot);

/* Remove a dead process as owner and from the queue. With the lock held. */
void turns_forget(struct state *state, int gpu, uint32_t slot);

/* Recount the waiting processes. With the lock held. */
void turns_rebuild(struct state *state, int gpu);

#endif
