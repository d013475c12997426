/* Shortage: with engine `suspend`, the driver refuses a call for lack of device memory while another session's memory
   is on the GPU. The process requests the GPU and the memory, the agent suspends other processes, and the call is
   repeated. */
#pragma once

#include "contexts/lanes.h"

HIDDEN _Atomic bool shortage_answered; /* the agent can suspend others. Background thread */

/* Whether to repeat a call that has returned CUDA_ERROR_OUT_OF_MEMORY. `tries`: the number of earlier repetitions.
   Waits for the agent, outside the call; no lock may be held. False: return the error. */
bool shortage_waited(struct passage *passage, unsigned tries);

/* End a call's shortage after its last attempt. */
void shortage_ended(struct passage *passage);

/* Wake the threads that wait here, because a lease begins or there is no agent. Background thread. */
void shortage_over(struct gpu *gpu);

/* Refuse the memory: calls that wait here return the driver's error, even while the process is suspended. Background
   thread. */
void shortage_refused(struct gpu *gpu);
