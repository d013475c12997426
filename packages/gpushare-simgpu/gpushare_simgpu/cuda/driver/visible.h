/* The GPUs and MIG instances that a program sees, according to CUDA_VISIBLE_DEVICES and CUDA's rules for MIG. */
#ifndef SIMGPU_VISIBLE_H
#define SIMGPU_VISIBLE_H

#include "common/state.h"

/* Write the numbers of the visible GPUs and instances, in CUDA's device order. Returns their count. */
int visible_numbers(const struct state *state, int numbers[MAX_GPUS]);

#endif
