/* The allowance: the maximum that the agent allows this process to have allocated on each GPU. The allowances of a
   session's processes together stay within the session's limit, and no process needs information on the others.
   docs/reference/protocol.md describes the frames. wrappers/memory_calls.c, handle_calls.c and array_calls.c turn a
   refusal into CUDA_ERROR_OUT_OF_MEMORY; agent/session_limit.py decides for all processes of the session. */
#pragma once

#include "driver/gpus.h"

/* Count bytes before the driver allocates them, so that two threads cannot both take the last bytes. False: they exceed
   the session's limit. Not `limited`: managed memory that the program itself requested, to which the host-memory budget
   applies instead of the limit. Any thread except the background thread, with no lock held: beyond the allowance it
   waits for the agent, at most two seconds, and for streams whose freed blocks it returns. */
bool allowance_take(struct gpu *gpu, size_t bytes, bool managed, bool limited);

/* The same for memory from a stream-ordered pool, whose reusable memory is already counted. Also waits for work of the
   calling thread's context after which the pool can release memory. */
bool allowance_take_from_pool(struct gpu *gpu, size_t bytes, CUmempool pool);

/* The rest is for the background thread, the only thread that changes an allowance. */

/* After WELCOME: send the process's account. Not `grants`: the agent lacks FEATURE_RESERVE and limits each process
   separately. */
void allowance_begin(struct gpu *gpu, bool grants);

/* End allowances without an agent, and for a GPU that is not the session's. */
void allowance_end(struct gpu *gpu);

/* Handle RESERVED, RECALL and SESSION_MEMORY. */
void allowance_reserved(struct gpu *gpu, const struct frame *frame);
void allowance_recalled(struct gpu *gpu, const struct frame *frame);
void allowance_others(struct gpu *gpu, const struct frame *frame);

/* Send a thread's request, and continue a RECALL. Returns the instant of the next step; UINT64_MAX: none is due.
   `device_quiet`: a free has no work to wait for. */
uint64_t allowance_step(struct gpu *gpu, uint64_t now, bool device_quiet);
