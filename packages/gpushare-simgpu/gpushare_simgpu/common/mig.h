/* The MIG instances that there are. An instance is a GPU of its own to whatever computes: it has frames, engines and
 * turns in state->gpus[] behind the whole GPUs, MIG_INSTANCES places for each of them. Its frames are those of its
 * memory slices. A GPU in MIG mode has no frames left, and nothing computes on it. */
#ifndef SIMGPU_MIG_H
#define SIMGPU_MIG_H

#include "common/state.h"

/* A GPU instance has the memory; with a compute instance, which has the multiprocessors, it is a MIG device. */
enum mig_stage { MIG_NOTHING, MIG_GPU_INSTANCE, MIG_DEVICE };

/* The number of a GPU's instance, by its index on the GPU. */
int mig_number(const struct state *state, int gpu, int index);

/* What there is at a number; MIG_NOTHING for that of a GPU. */
enum mig_stage mig_stage(const struct state *state, int number);

/* True when there is a MIG device of that number. */
int mig_exists(const struct state *state, int number);

/* The whole GPU of that number, or the one that the instance of that number is on. */
int mig_parent(const struct state *state, int number);

int mig_is_instance(const struct state *state, int number);

/* The index of an instance on its GPU. */
int mig_index(const struct state *state, int number);

/* Bytes of VRAM of a GPU or of an instance. */
uint64_t mig_memory(const struct state *state, int number);

/* What a GPU or an instance has of the GPU's parts; memory slices bring their part of caches and bandwidth. */
struct mig_parts {
    uint32_t multiprocessors, memory_slices;
};
struct mig_parts mig_parts(const struct state *state, int number);

/* Bytes/s at which kernels read and write the VRAM of a GPU or of an instance. */
uint64_t mig_hbm(const struct state *state, int number);

/* "Simulated GPU 80 GiB", or that with " MIG 1g.10gb". */
#define MIG_NAME (MODEL_LENGTH + MIG_PROFILE_NAME + 5)
void mig_name(const struct state *state, int number, char name[MIG_NAME]);

/* The memory slices of a GPU that instances have, as bits. */
uint32_t mig_taken(const struct state *state, int gpu);

/* The instance that CUDA takes of a GPU when none is named: the first; -1 where there is none. */
int mig_first(const struct state *state, int gpu);

/* How many further instances of a profile fit on a GPU. */
uint32_t mig_capacity(const struct state *state, int gpu, int profile);

/* A number of the GPU at which there is nothing; -1: all have instances. */
int mig_free_number(const struct state *state, int gpu);

/* These change what there is, all with the locks of the state and of the number held, or before anybody else has the
 * state; the caller has made sure that nobody uses the number. */
void mig_enable(struct state *state, int gpu);
void mig_disable(struct state *state, int gpu);
void mig_make(struct state *state, int number, struct mig_place place); /* a GPU instance */
void mig_add_compute(struct state *state, int number);
void mig_remove_compute(struct state *state, int number);
void mig_remove(struct state *state, int number);

/* Makes what SIMGPU_MIG says of a GPU. */
void mig_divide(struct state *state, int gpu, const struct mig_layout *layout);

#endif
