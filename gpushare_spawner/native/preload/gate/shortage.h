/* With engine `suspend`, a call that the driver refuses for lack of device memory, while another session's memory is on
   the GPU: the process asks for the GPU and for the memory, the agent suspends others, and the call is made again. */
#pragma once

#include "contexts/lanes.h"

HIDDEN _Atomic bool shortage_answered; /* the agent can suspend others. Background thread */

/* Whether the call that the passage is in, and that has answered CUDA_ERROR_OUT_OF_MEMORY, is to be made again; `tries`
   as often as it was made before. Waits for the agent, outside; no lock may be held. False: the error stands. */
bool shortage_waited(struct passage *passage, unsigned tries);

/* After the last try, whatever came of it. */
void shortage_settled(struct passage *passage);

/* Threads that wait here look again: a lease begins, or there is no agent. Background thread. */
void shortage_over(struct gpu *gpu);

/* The memory does not come: the calls that wait here return the driver's error, also while the process is suspended.
   Background thread. */
void shortage_refused(struct gpu *gpu);
