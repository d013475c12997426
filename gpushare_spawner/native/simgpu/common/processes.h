/* Which processes use the GPUs, and what becomes of the things of those that died. */
#ifndef SIMGPU_PROCESSES_H
#define SIMGPU_PROCESSES_H

#include "state.h"

/* Takes a slot for this process. Its number, or -1 when all are taken. */
int processes_join(struct state *state);

/* Frees what dead processes held. Cheap to call often: it looks at most every 20 ms unless `now` is asked for. Takes
 * the locks. */
void processes_reap(struct state *state, int now);

int processes_alive(const struct process *process);

#endif
