/* The processes that use the GPUs, and the cleanup after processes that have died. */
#ifndef SIMGPU_PROCESSES_H
#define SIMGPU_PROCESSES_H

#include "common/state.h"

/* Take a slot for this process. Returns its number; -1 if all are taken. */
int processes_join(struct state *state);

/* Free the resources of dead processes, and let the kernels of stopped processes continue (turns.h). Cheap to call
 * often: it checks at most every 20 ms unless `now` is set. Takes the locks. */
void processes_reap(struct state *state, int now);

/* Return the pid, in this process's pid namespace, of the process that has or had a slot. If the pid cannot be
 * determined (a sibling or parent namespace), it is a number that no process has, just as a container on hardware reads
 * pids of the host. May read all of /proc, so do not call it with a GPU's lock held. 0: no process has had the slot. */
int32_t processes_pid(struct state *state, uint32_t slot);

/* Whether the slot still belongs to the process with this serial number. Frees the resources of dead processes. */
int processes_alive(struct state *state, uint32_t slot, uint64_t serial);

/* Called in a child after fork, which does not share its parent's slot. */
void processes_forked(void);

#endif
