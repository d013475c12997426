/* The lease on each GPU, as this process sees it. Only for the background thread, with no lock held. Nothing here waits
   for the device or for the agent: lease_step says when to look again. */
#pragma once

#include "platform/frames.h"
#include "driver/gpus.h"

/* No agent, or a GPU that is not the session's: the gate is open and nothing is asked. */
void lease_without_agent(struct gpu *gpu);

/* An agent that arbitrates this GPU has said WELCOME: from now on work needs a lease. */
void lease_begin(struct gpu *gpu);

/* GRANT, REVOKE and PAGE_OUT. */
void lease_granted(struct gpu *gpu, const struct frame *frame);
void lease_revoked(struct gpu *gpu, const struct frame *frame);
void lease_page_out(struct gpu *gpu, const struct frame *frame);

/* Look what is due. Returns the instant (clock_now) at which to look again; UINT64_MAX: not before something happens.
 */
uint64_t lease_step(struct gpu *gpu);

/* Whether the process is known to have no work on the GPU, and begins none without the background thread's leave or a
   burst of which it hears at once: then a free waits for nothing. */
bool lease_device_quiet(const struct gpu *gpu, uint64_t now);

/* Whether this process holds no lease, and gives none back just now: it may be suspended. */
bool lease_is_none(const struct gpu *gpu);

/* The process is no longer suspended; the gate was shut for that. `unseen`: threads were in the driver, and may have
   launched work. */
void lease_resume(struct gpu *gpu, bool unseen);

void leases_forget(void); /* in a forked child */
