/* Bringing the pages of this process to a GPU. */
#ifndef SIMGPU_RESIDENCY_H
#define SIMGPU_RESIDENCY_H

#include "cuda/memory/memory.h"

/* What bringing pages in moved, in bytes. */
struct moved {
    uint64_t in, evicted, first_touched, remote;
};

/* Makes the page that holds the address resident. Pages leave in the order in which they came or were last prefetched:
 * like NVIDIA's driver, which learns of faults but not of accesses to what is resident, a kernel's use of a page keeps
 * it no longer. With `prefetch` a resident page counts as come anew. With memory_lock and the GPU's lock held; the
 * latter may be left and taken again in between. Memory that has no pages (pinned host memory) costs nothing. */
void residency_bring(uint64_t address, int gpu, int prefetch, struct moved *moved);

/* Takes a page off the GPU. True when it was there and had content. With memory_lock held. */
int residency_send_home(struct region *region, uint32_t index);

/* Faults in a whole range for a copy, each batch taking the engine for its time. Gives the instant at which all is
 * there. */
uint64_t residency_fault_range(uint64_t address, uint64_t size, int gpu, uint64_t ready);

/* Device time of faults that moved this much. */
uint64_t residency_fault_ns(const struct moved *moved);

#endif
