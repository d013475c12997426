/* The suspension of this process by the agent (docs/reference/protocol.md): only for the background thread, with no
   lock held, and with engine `suspend`. No function waits: suspension_step returns the instant of the next step. */
#pragma once

#include "platform/frames.h"

/* Handle SUSPEND, RESUMED, and a GRANT, which implies RESUMED. */
void suspension_requested(const struct frame *frame);
void suspension_resumed(const struct frame *frame);
void suspension_lease_granted(void);

/* Handle WELCOME and the end of the connection. `capable`: whether the agent can suspend processes. */
void suspension_connected(bool capable);
void suspension_disconnected(void);

/* Perform the step that is due. Returns the instant (clock_now) of the next step; UINT64_MAX: none before the next
   event. */
uint64_t suspension_step(uint64_t now);

/* Release the threads of an exiting program, and report that they may be blocked. Any thread. */
void suspension_exit(void);
