/* Work that was launched while no agent was there, and may still run: it ends without a lease, but the agent must know
   of it: such a session is not idle, and what it gets of the GPU counts. Only for the background thread, with no lock
   held; takes those of marks.h. */
#pragma once

#include "driver/gpus.h"

/* There may be such work: find out. */
void unseen_begin(struct gpu *gpu);

/* Whether there is such work; true once. When to look again, while that is not known. */
bool unseen_found(struct gpu *gpu, uint64_t now, uint64_t *next);

void unseen_forget(void); /* in a forked child */
