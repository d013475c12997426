/* The background thread: one per process, started by cuInit. It owns the socket, the leases and the pager. */
#pragma once

#include "platform/frames.h"
#include "driver/gpus.h"

/* Start it, and wait (a second at most) for the agent's WELCOME: the first allocation must know how it is to be made.
 */
void worker_start(void);

bool worker_runs(void);

/* Something happened: a thread waits at a gate. */
void worker_wake(void);

/* The account of a GPU changed: to be told within 10 ms. Mostly that has been said already: the worker clears `changed`
   before it reads the account. */
void worker_tell_memory(struct gpu *gpu);
static inline void worker_memory_changed(struct gpu *gpu) {
    if (unlikely(!atomic_load_explicit(&gpu->changed, memory_order_relaxed))) worker_tell_memory(gpu);
}

/* Whether the agent that is connected now said that it has this feature. Any thread, no lock. */
bool worker_agent_has(enum feature feature);

/* In a forked child: there is no such thread any more, and its files are closed. */
void worker_forget(void);
