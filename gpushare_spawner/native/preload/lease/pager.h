/* The pager moves the program's managed memory in bulk: to the host after a lease, to the GPU at its start. Only for
   the background thread, which calls pager_step about every millisecond during a move. pager_step takes contexts_lock
   and then the accounts' lock, under which it requests prefetches from the driver; it allocates a table of the parts on
   the host. No function waits for the device. */
#pragma once

#include "driver/gpus.h"

struct pager_result {
    uint64_t bytes;
    uint64_t nanoseconds;
};

/* Begin to move up to `bytes`: to the GPU, parts that were moved to the host, most recently used first; to the host,
   least recently used parts first, and last those that were moved there before, which page faults may have brought
   back. A move in progress is cut short; the new move begins after the started parts. */
void pager_start(struct gpu *gpu, bool to_device, uint64_t bytes);

/* Move `bytes` more in the same direction as the move in progress, which then also is not cut short. */
void pager_extend(struct gpu *gpu, uint64_t bytes);

/* Continue. True: the move is done, or there was none. */
bool pager_step(struct gpu *gpu, struct pager_result *result);

/* Do not begin further parts; pager_step returns true when the last part is done. */
void pager_cut(struct gpu *gpu);
