/* How much this process may have allocated on each GPU, as the agent grants it: the allowances of a session's processes
   together stay within the session's limit, and no process needs to know the others. docs/reference/protocol.md has the
   frames. */
#pragma once

#include "platform/frames.h"
#include "driver/gpus.h"

enum allowance_answer {
    ALLOWANCE_REFUSED,  /* beyond a limit: the allocation fails */
    ALLOWANCE_GREW,     /* compare again */
    ALLOWANCE_UNCHECKED /* nobody answers: the allocation is made without the agent */
};

/* Bytes of device memory of every kind that the process has allocated on the GPU. */
uint64_t allowance_used(const struct gpu *gpu);

/* Ask the agent for `bytes` more than the process has now. `own_managed`: managed memory that the program itself asked
   for. Any thread but the background thread, with no lock held. Waits for the answer, a second at most. */
enum allowance_answer allowance_ask(struct gpu *gpu, uint64_t bytes, bool managed, bool own_managed);

/* The rest is for the background thread, the only one that changes an allowance. */

/* An agent has sent WELCOME: tell it what the process has allocated. An agent without FEATURE_RESERVE limits each
   process by itself. */
void allowance_begin(struct gpu *gpu);

/* There is no agent, or the GPU is not the session's. */
void allowance_end(struct gpu *gpu);

/* RESERVED, RECALL and SESSION_MEMORY. */
void allowance_reserved(struct gpu *gpu, const struct frame *frame);
void allowance_recalled(struct gpu *gpu, const struct frame *frame);
void allowance_others(struct gpu *gpu, const struct frame *frame);

/* Send what a thread asks for, and go on with a RECALL. When to look again. `device_quiet`: a free has no work to wait
   for. */
uint64_t allowance_step(struct gpu *gpu, uint64_t now, bool device_quiet);

void allowance_forget(void); /* in a forked child */
