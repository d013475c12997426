/* Engine `observe`: bursts are reported, and nothing else is done. Only for the background thread, with no lock held;
   takes those of marks.h. */
#pragma once

#include "driver/gpus.h"

/* An agent that takes such reports has said WELCOME; there is none. */
void observing_begin(struct gpu *gpu);
void observing_end(struct gpu *gpu);

/* Look what is due. When to look again (clock_now); UINT64_MAX: not before something happens. */
uint64_t observing_step(struct gpu *gpu, uint64_t now);

void observing_forget(void); /* in a forked child */
