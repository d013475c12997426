/* How GPUs are divided by MIG: the profiles of instances, where each may lie, and SIMGPU_MIG, which says what there is.
 *
 * The geometry is that of an A100, which larger GPUs of NVIDIA share: seven compute slices and eight memory slices. An
 * instance takes whole slices. Its id follows from its size and place, as NVIDIA's driver numbers them. */
#ifndef SIMGPU_MIG_PROFILES_H
#define SIMGPU_MIG_PROFILES_H

#include <stdint.h>

#define MIG_INSTANCES     7 /* of one GPU, at most */
#define MIG_MEMORY_SLICES 8
#define MIG_PROFILES      7
#define MIG_PROFILE_NAME  24
/* Of one compute slice: of those of the GPU 70 are left for instances, as of an A100's 108 there are 98. */
#define MIG_MULTIPROCESSORS 10
#define GPU_MULTIPROCESSORS 80

struct mig_profile {
    uint32_t id;        /* nvidia-smi's number of it, unique on the GPU */
    uint32_t kind;      /* NVML_GPU_INSTANCE_PROFILE_* */
    uint32_t compute;   /* slices */
    uint32_t memory;    /* slices */
    uint32_t instances; /* of it on one GPU, at most */
    uint32_t starts;    /* bits: the memory slices at which it may begin */
    uint32_t copy_engines, decoders, jpegs, ofas;
    const char *suffix; /* of its name */
};

extern const struct mig_profile mig_profiles[MIG_PROFILES];

/* A profile's place in mig_profiles, and the memory slice at which the instance begins. */
struct mig_place {
    uint8_t profile, start;
};

/* The instances of one GPU, in the order of their ids. */
struct mig_layout {
    uint8_t on; /* MIG mode */
    uint8_t count;
    struct mig_place places[MIG_INSTANCES];
};

uint32_t mig_profile_id(struct mig_place place);

/* The memory slices that an instance takes, as bits. */
uint32_t mig_profile_slices(struct mig_place place);

/* "1g.10gb": the compute slices, and the share of the GPU's memory in GB, as NVIDIA rounds it. */
void mig_profile_name(int profile, uint64_t memory, char name[MIG_PROFILE_NAME]);

/* The pages of an instance: less than its slices hold, since the driver keeps some for itself. */
uint64_t mig_profile_pages(int profile, uint64_t gpu_pages);

/* Where another instance would lie beside those that take the slices in `taken`; as the driver does it, as far up as it
 * can. -1: nowhere. */
int mig_profile_start(int profile, uint32_t taken);

/* How many further instances of the profile fit beside them. */
uint32_t mig_profile_capacity(int profile, uint32_t taken);

/* Reads SIMGPU_MIG. 1: GPUs can do MIG, and layouts[] has those of `gpus` GPUs. 0: it is not set. -1 after saying on
 * stderr what is wrong. `memory` and `page` in bytes, of one GPU. */
int mig_profiles_read(struct mig_layout *layouts, uint64_t gpus, uint64_t memory, uint64_t page);

#endif
