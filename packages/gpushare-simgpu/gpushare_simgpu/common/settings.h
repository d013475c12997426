/* The properties of the simulated GPUs. The process that creates the state file reads them from the environment and
 * stores them in the file, so that all processes see the same machine. */
#ifndef SIMGPU_SETTINGS_H
#define SIMGPU_SETTINGS_H

#include <stdint.h>

#include "common/mig_profiles.h"

#define MAX_GPUS     16
#define MODEL_LENGTH 96

/* The driver's support for cuCheckpointProcess*: full; absent, because the driver is too old; present, but refusing all
 * calls. */
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
    enum checkpoint_support checkpoint; /* support for the calls cuCheckpointProcess* */
    int checkpoint_refuses_managed;     /* a process with managed memory is refused and stays locked; 0: it fails */
    int checkpoint_retries;             /* a restore that lacked memory may be retried */
    uint64_t checkpoint_d2h;            /* bytes/s of checkpoints, unless the bus is slower */
    uint64_t checkpoint_h2d;            /* bytes/s of restores, likewise */
    uint64_t restore_ns;                /* time of a restore besides its copies */
    char model[MODEL_LENGTH];
    int mig; /* the GPUs support MIG */
    struct mig_layout mig_layouts[MAX_GPUS];
};

/* Read the settings. Returns 0, or -1 if a variable is invalid; stderr then has the variable and the correction. */
int settings_read(struct settings *settings);

#endif
