/* Which GPUs and MIG instances a program sees: CUDA_VISIBLE_DEVICES, and what CUDA makes of MIG. */
#ifndef SIMGPU_VISIBLE_H
#define SIMGPU_VISIBLE_H

#include "common/state.h"

/* The numbers of what is visible, in the order of CUDA's devices; how many they are. */
int visible_numbers(const struct state *state, int numbers[MAX_GPUS]);

#endif
