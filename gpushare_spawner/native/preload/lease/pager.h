/* Moves the program's managed memory in bulk: to the host when it gives way, to the GPU before it runs. Only for the
   background thread, which calls pager_step every millisecond or so while something is being moved. pager_step takes
   contexts_lock and then the accounts' lock, under which it asks the driver for prefetches; it allocates a table of
   what was moved to the host. Nothing waits for the device. */
#pragma once

#include "driver/gpus.h"

struct pager_result {
    uint64_t bytes;
    uint64_t nanoseconds;
};

/* Begin to move up to `bytes`: most recently used first to the GPU, of what was moved to the host before; least
   recently used first to the host. A move that is still in progress is cut short; what it has begun is waited for. */
void pager_start(struct gpu *gpu, bool to_device, uint64_t bytes);

/* Go on. True: done (or nothing was being moved). */
bool pager_step(struct gpu *gpu, struct pager_result *result);

/* Begin no further parts; pager_step says when the last one is done. */
void pager_cut(struct gpu *gpu);

void pager_forget(void); /* in a forked child */
