/* How MIG divides GPUs: the profiles of instances, their possible places, and SIMGPU_MIG, which lists the instances.
 *
 * * The geometry is the A100's, which NVIDIA's larger GPUs share: seven compute slices and eight memory slices. An
 * instance occupies whole slices. Its id follows from its size and place, as in NVIDIA's driver. */
#ifndef SIMGPU_MIG_PROFILES_H
#define SIMGPU_MIG_PROFILES_H

#include <stdint.h>

#define MIG_INSTANCES     7 /* maximum on one GPU */
#define MIG_MEMORY_SLICES 8
#define MIG_PROFILES      7
#define MIG_PROFILE_NAME  24
/* Multiprocessors of one compute slice: 70 of the GPU's multiprocessors are available to instances, as 98 of an A100's
 * 108. */
#define MIG_MULTIPROCESSORS 10
#define GPU_MULTIPROCESSORS 80

struct mig_profile {
    uint32_t id;        /* nvidia-smi's number for it, unique on the GPU */
    uint32_t kind;      /* NVML_GPU_INSTANCE_PROFILE_* */
    uint32_t compute;   /* slices */
    uint32_t memory;    /* slices */
    uint32_t instances; /* maximum number on one GPU */
    uint32_t starts;    /* bits: the memory slices at which it may begin */
    uint32_t copy_engines, decoders, jpegs, ofas;
    const char *suffix; /* suffix of its name */
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

/* Return the memory slices that an instance occupies, as bits. */
uint32_t mig_profile_slices(struct mig_place place);

/* Write a name such as "1g.10gb": the compute slices, and the share of the GPU's memory in GB, rounded as by NVIDIA. */
void mig_profile_name(int profile, uint64_t memory, char name[MIG_PROFILE_NAME]);

/* Return the number of pages of an instance: fewer than its slices hold, because the driver reserves some. */
uint64_t mig_profile_pages(int profile, uint64_t gpu_pages);

/* Return the start of another instance in addition to those that occupy the slices in `taken`: as high as possible, as
 * in the driver. -1: it does not fit. */
int mig_profile_start(int profile, uint32_t taken);

/* Return how many more instances of the profile fit in addition to them. */
uint32_t mig_profile_capacity(int profile, uint32_t taken);

/* Read SIMGPU_MIG. 1: GPUs support MIG, and layouts[] contains the layouts of `gpus` GPUs. 0: it is not set. -1: it is
 * invalid, and stderr has the reason. `memory` and `page`: bytes of one GPU. */
int mig_profiles_read(struct mig_layout *layouts, uint64_t gpus, uint64_t memory, uint64_t page);

#endif
