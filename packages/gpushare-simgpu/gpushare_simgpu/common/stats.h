/* Counters of a simulated GPU since its state file was created, for all processes together. Exported by both libraries;
 * the layout grows only at its end. */
#ifndef SIMGPU_STATS_H
#define SIMGPU_STATS_H

#include <stddef.h>
#include <stdint.h>

struct simgpu_stats {
    uint64_t kernels;          /* kernels run */
    uint64_t busy_ns;          /* time for which the compute engine was busy, faults included */
    uint64_t fault_ns;         /* part of it: waiting for faults */
    uint64_t faulted_in;       /* bytes migrated to the device by faults of kernels and copies */
    uint64_t first_touched;    /* bytes of pages created on the device, which needed no move */
    uint64_t fault_evicted;    /* bytes evicted to the host by faults */
    uint64_t prefetched_in;    /* bytes moved to the device by cuMemPrefetchAsync */
    uint64_t prefetched_out;   /* bytes moved to the host by cuMemPrefetchAsync */
    uint64_t prefetch_evicted; /* bytes evicted to the host to make room for a prefetch */
    uint64_t plain_evicted;    /* bytes evicted to the host to make room for plain device memory */
    uint64_t copied_in;        /* bytes of plain copies, host to device */
    uint64_t copied_out;       /* bytes of plain copies, device to host */
    uint64_t remote;           /* bytes read in place over the bus, because nothing could be evicted for them */
    uint64_t memory;           /* bytes of VRAM */
    uint64_t memory_free;      /* part of it: free */
    uint64_t memory_managed;   /* part of it: resident managed pages, which can be evicted */
    uint64_t checkpointed;     /* bytes moved to the host by checkpoints of processes */
    uint64_t restored;         /* bytes moved back to the device by their restores */
};

/* Fill at most `size` bytes of *out for a GPU by its number on the machine (CUDA_VISIBLE_DEVICES is ignored). Works
 * before cuInit. Returns 0, or -1 if there is no such GPU or the state cannot be opened. */
int simgpu_stats(int gpu, struct simgpu_stats *out, size_t size);

/* Return the bytes of VRAM that a process holds on a GPU; 0 for a process that holds none. -1 as above. */
int64_t simgpu_resident(int gpu, int32_t pid);

/* Return the nanoseconds for which a process owned a GPU's compute engine, faults included; 0 for a process that never
 * owned it. An ended process stays readable until 255 others have started after it. -1 as above. */
int64_t simgpu_gpu_time(int gpu, int32_t pid);

#endif
