/* Shortage: with engine `suspend`, a call that the driver refuses for lack of device memory while another session's
   memory is on the GPU. The process asks for the GPU and the memory, the agent suspends others, and the call is made
   again. */
#pragma once

#include "contexts/lanes.h"

HIDDEN _Atomic bool shortage_answered; /* the agent can suspend others. Background thread */

/* Whether to make a call again that has returned CUDA_ERROR_OUT_OF_MEMORY; `tries`: the number of earlier repetitions.
   Waits for the agent, outside; no lock may be held. False: return the error. */
bool shortage_waited(struct passage *passage, unsigned tries);

/* End the shortage of a call, after its last try. */
void shortage_settled(struct passage *passage);

/* Wake the threads that wait here: a lease begins, or there is no agent. Background thread. */
void shortage_over(struct gpu *gpu);

/* Refuse the memory: calls that wait here return the driver's error, also while the process is suspended. Background
   thread. */
void shortage_refused(struct gpu *gpu);
