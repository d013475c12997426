/* The existing MIG instances. For computations an instance is a separate GPU: it has frames, engines and turns in
 * state->gpus[] after the whole GPUs, with MIG_INSTANCES places for each GPU. Its frames are the frames of its memory
 * slices. A GPU in MIG mode has no frames left, and no process computes on it. */
#ifndef SIMGPU_MIG_H
#define SIMGPU_MIG_H

#include "common/state.h"

/* A GPU instance has the memory; with a compute instance, which has the multiprocessors, it is a MIG device. */
enum mig_stage { MIG_NOTHING, MIG_GPU_INSTANCE, MIG_DEVICE };

/* Return the number of a GPU's instance, by its index on the GPU. */
int mig_number(const struct state *state, int gpu, int index);

/* Return the stage of the instance with a number; MIG_NOTHING for the number of a GPU. */
enum mig_stage mig_stage(const struct state *state, int number);

/* Whether there is a MIG device with this number. */
int mig_exists(const struct state *state, int number);

/* Return the whole GPU with this number, or the GPU of the instance with this number. */
int mig_parent(const struct state *state, int number);

int mig_is_instance(const struct state *state, int number);

/* Return the index of an instance on its GPU. */
int mig_index(const struct state *state, int number);

/* Return the bytes of VRAM of a GPU or an instance. */
uint64_t mig_memory(const struct state *state, int number);

/* The GPU's parts that a GPU or an instance has; memory slices include their part of caches and bandwidth. */
struct mig_parts {
    uint32_t multiprocessors, memory_slices;
};
struct mig_parts mig_parts(const struct state *state, int number);

/* Return the bytes/s at which kernels read and write the VRAM of a GPU or an instance. */
uint64_t mig_hbm(const struct state *state, int number);

/* Length of a name such as "Simulated GPU 80 GiB" or "Simulated GPU 80 GiB MIG 1g.10gb". */
#define MIG_NAME (MODEL_LENGTH + MIG_PROFILE_NAME + 5)
void mig_name(const struct state *state, int number, char name[MIG_NAME]);

/* Return the memory slices of a GPU that instances occupy, as bits. */
uint32_t mig_taken(const struct state *state, int gpu);

/* Return the instance of a GPU that CUDA uses if none is named: the first; -1 if there is none. */
int mig_first(const struct state *state, int gpu);

/* Return how many more instances of a profile fit on a GPU. */
uint32_t mig_capacity(const struct state *state, int gpu, int profile);

/* Return an unused instance number of the GPU; -1: all are used. */
int mig_free_number(const struct state *state, int gpu);

/* The following functions change instances. They require the locks of the state and of the number, or exclusive access
 * to a new state; the caller ensures that no process uses the number. */
void mig_enable(struct state *state, int gpu);
void mig_disable(struct state *state, int gpu);
void mig_make(struct state *state, int number, struct mig_place place); /* a GPU instance */
void mig_add_compute(struct state *state, int number);
void mig_remove_compute(struct state *state, int number);
void mig_remove(struct state *state, int number);

/* Create the instances of a GPU according to SIMGPU_MIG. */
void mig_divide(struct state *state, int gpu, const struct mig_layout *layout);

#endif
