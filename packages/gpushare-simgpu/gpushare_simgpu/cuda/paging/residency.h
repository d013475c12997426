/* Moves the pages of this process to a GPU. */
#ifndef SIMGPU_RESIDENCY_H
#define SIMGPU_RESIDENCY_H

#include "cuda/memory/memory.h"

/* The bytes that were moved to make pages resident. */
struct moved {
    uint64_t in, evicted, first_touched, remote;
};

/* Make the page that contains the address resident. Pages are evicted in the order of their arrival or last prefetch:
 * NVIDIA's driver detects faults but not accesses to resident pages, so a kernel's use of a page does not delay its
 * eviction. With `prefetch` a resident page becomes the newest page. With memory_lock and the GPU's lock held; the
 * latter may be released and taken again in between. Memory that has no pages (pinned host memory) costs nothing. */
void residency_bring(uint64_t address, int gpu, int prefetch, struct moved *moved);

/* Remove a page from the GPU. Returns whether it was there and had content. With memory_lock held. */
int residency_send_home(struct region *region, uint32_t index);

/* Fault in a whole range for a copy; each batch reserves the engine for its duration. Returns the instant at which all
 * pages are resident. */
uint64_t residency_fault_range(uint64_t address, uint64_t size, int gpu, uint64_t ready);

/* Return the device time of faults that moved this amount. */
uint64_t residency_fault_ns(const struct moved *moved);

#endif
