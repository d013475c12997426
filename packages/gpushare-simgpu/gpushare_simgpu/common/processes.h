/* Which processes use the GPUs, and what becomes of the things of those that died. */
#ifndef SIMGPU_PROCESSES_H
#define SIMGPU_PROCESSES_H

#include "common/state.h"

/* Takes a slot for this process. Its number, or -1 when all are taken. */
int processes_join(struct state *state);

/* Frees what dead processes held, and lets the kernels of stopped ones run on (turns.h). Cheap to call often: it looks
 * at most every 20 ms unless `now` is asked for. Takes the locks. */
void processes_reap(struct state *state, int now);

/* The pid of the process that has, or had, a slot, as this process' pid namespace numbers it. Where that cannot be
 * known (a namespace beside or above this one) it is a number that no process has, as on hardware a container reads
 * pids of the host. May read all of /proc: not with a GPU's lock held. 0: nobody has had the slot. */
int32_t processes_pid(struct state *state, uint32_t slot);

/* True while the process that has the slot is the one with this serial number. Frees what dead processes held. */
int processes_alive(struct state *state, uint32_t slot, uint64_t serial);

/* In a child after fork, which has no part in its parent's slot. */
void processes_forked(void);

#endif
