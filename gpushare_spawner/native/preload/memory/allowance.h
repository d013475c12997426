/* How much this process may have allocated on each GPU, as the agent grants it: the allowances of a session's processes
   together stay within the session's limit, and no process needs to know the others. docs/reference/protocol.md has the
   frames. */
#pragma once

#include "platform/frames.h"
#include "driver/gpus.h"

/* Set bytes aside before the driver is asked, so that two threads cannot both take the last ones. False: that would be
   more than the session may have. Not `limited`: managed memory that the program itself asked for, to which the limit
   of the session does not apply, but the budget of host memory does. Any thread but the background thread, with no lock
   held: beyond the allowance it waits for the agent, a second at most, and for streams whose freed blocks it gives
   back. */
bool allowance_take(struct gpu *gpu, size_t bytes, bool managed, bool limited);

/* The same for memory from a pool of stream-ordered memory: what the pool has for reuse is set aside already. Also
   waits for work of the calling thread's context whose end lets the pool give memory back. */
bool allowance_take_from_pool(struct gpu *gpu, size_t bytes, CUmempool pool);

/* The rest is for the background thread, the only one that changes an allowance. */

/* An agent has sent WELCOME: tell it what the process has allocated. Not `grants`: an agent without FEATURE_RESERVE,
   which limits each process by itself. */
void allowance_begin(struct gpu *gpu, bool grants);

/* There is no agent, or the GPU is not the session's. */
void allowance_end(struct gpu *gpu);

/* RESERVED, RECALL and SESSION_MEMORY. */
void allowance_reserved(struct gpu *gpu, const struct frame *frame);
void allowance_recalled(struct gpu *gpu, const struct frame *frame);
void allowance_others(struct gpu *gpu, const struct frame *frame);

/* Send what a thread asks for, and go on with a RECALL. When to look again. `device_quiet`: a free has no work to wait
   for. */
uint64_t allowance_step(struct gpu *gpu, uint64_t now, bool device_quiet);
