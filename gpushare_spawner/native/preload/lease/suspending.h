/* The conversation about suspending this process (docs/reference/protocol.md): only for the background thread, with no
   lock held, and with engine `suspend`. Nothing here waits: suspending_step says when to look again. */
#pragma once

#include "platform/common.h"
#include "platform/frames.h"

/* SUSPEND, RESUMED, and a GRANT, which says the same as RESUMED. */
void suspending_asked(const struct frame *frame);
void suspending_resumed(const struct frame *frame);
void suspending_granted(void);

/* An agent has sent WELCOME and can suspend processes, or cannot; the connection to it has ended. */
void suspending_greeted(bool capable);
void suspending_without_agent(void);

/* Look what is due. When to look again (clock_now); UINT64_MAX: not before something happens. */
uint64_t suspending_step(uint64_t now);

/* The program is exiting: its threads go on, and the agent learns that they may be blocked. Any thread. */
void suspending_exit(void);

void suspending_forget(void); /* in a forked child */
