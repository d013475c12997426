/* What the simulated GPUs are like. Read from the environment by whoever creates the state file, and stored in it, so
 * that all its processes see the same machine. */
#ifndef SIMGPU_SETTINGS_H
#define SIMGPU_SETTINGS_H

#include <stdint.h>

#include "common/mig_profiles.h"

#define MAX_GPUS     16
#define MODEL_LENGTH 96

/* What the driver can do with cuCheckpointProcess*: all; too old to know the functions; knows them, and refuses. */
enum checkpoint_support { CHECKPOINT_SUPPORTED, CHECKPOINT_ABSENT, CHECKPOINT_UNSUPPORTED };

struct settings {
    uint64_t devices;
    uint64_t memory;                    /* bytes of VRAM of each GPU */
    uint64_t page;                      /* bytes of a page of VRAM */
    uint64_t h2d;                       /* bytes/s of copies and prefetches to the device */
    uint64_t d2h;                       /* bytes/s of copies, prefetches and their evictions to the host */
    uint64_t fault;                     /* bytes/s of pages faulted in */
    uint64_t fault_evict;               /* bytes/s of the evictions that faults cause */
    uint64_t hbm;                       /* bytes/s at which kernels read and write VRAM */
    uint64_t launch_ns;                 /* device time of an empty kernel */
    uint64_t slice_ns;                  /* time slice between processes */
    uint64_t mode;                      /* access rights of the state file */
    uint64_t context_memory;            /* bytes of VRAM that each context takes */
    enum checkpoint_support checkpoint; /* what the calls cuCheckpointProcess* do */
    int checkpoint_refuses_managed;     /* a process with managed memory: refused, and stays locked; 0: it fails */
    int checkpoint_retries;             /* a restore that was short of memory may be tried again */
    uint64_t checkpoint_d2h;            /* bytes/s of checkpoints, where the bus is not slower */
    uint64_t checkpoint_h2d;            /* bytes/s of restores, likewise */
    uint64_t restore_ns;                /* time of a restore besides its copies */
    char model[MODEL_LENGTH];
    int mig; /* the GPUs can do MIG */
    struct mig_layout mig_layouts[MAX_GPUS];
};

/* 0, or -1 after saying on stderr which variable is wrong and what would be right. */
int settings_read(struct settings *settings);

#endif
