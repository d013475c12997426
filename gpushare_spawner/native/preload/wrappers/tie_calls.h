/* What a program shares with other processes or APIs (memory/ties.h). */
#pragma once

#include "driver/cuda_abi.h"

/* Memory at this address is shown to other processes, until it is freed. Takes the locks of allocations.h and ties.h.
 */
void tie_calls_exported(CUdeviceptr at);
