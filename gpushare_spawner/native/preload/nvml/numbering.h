/* How NVML numbers the GPUs for this process: those of the session only, in CUDA's order. Decided at the first call
   that needs it, and kept: a program that has counted the GPUs must not find others later. Where the agent did not
   answer then, the driver's numbers stay. */
#pragma once

#include "platform/common.h"

/* How many GPUs the session has; -1: the driver's numbers hold. */
int numbering_count(void);

/* The UUID of one of them, from 0 on. After numbering_count(). */
const unsigned char *numbering_uuid(int index);

/* The number of a GPU; -1: it is not the session's. */
int numbering_index(const unsigned char uuid[16]);
