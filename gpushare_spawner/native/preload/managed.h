/* Device memory served by managed memory, so that it can leave the GPU. */
#pragma once

#include "gpus.h"

/* Whether allocations on this GPU are to be converted: the agent says so, the GPU can, the user has not switched it
 * off. */
bool managed_wanted(const struct gpu *gpu);

/* Managed memory that prefers the GPU. */
CUresult managed_allocate(const struct gpu *gpu, CUdeviceptr *out, size_t bytes);

/* What the agent's WELCOME said. */
void managed_set(bool oversubscribed);
