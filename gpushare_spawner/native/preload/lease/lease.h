/* This process's state of the lease on each GPU. Only for the background thread, with no lock held. No function waits
   for the device or for the agent: lease_step returns the instant of the next step. */
#pragma once

#include "driver/gpus.h"

/* End leases and open the gate, if there is no agent or the GPU is not the session's. */
void lease_without_agent(struct gpu *gpu);

/* Begin leases after the WELCOME of an agent that arbitrates this GPU: from now on work needs a lease. */
void lease_begin(struct gpu *gpu);

/* Handle GRANT, REVOKE, PAGE_OUT and PAGE_IN. */
void lease_granted(struct gpu *gpu, const struct frame *frame);
void lease_revoked(struct gpu *gpu, const struct frame *frame);
void lease_page_out(struct gpu *gpu, const struct frame *frame);
void lease_page_in(struct gpu *gpu, const struct frame *frame);

/* Perform the step that is due. Returns the instant (clock_now) of the next step; UINT64_MAX: none before the next
   event. */
uint64_t lease_step(struct gpu *gpu);

/* Whether the process certainly has no work on the GPU and cannot begin work without the background thread noticing
   immediately. If so, a free does not need to wait. */
bool lease_device_quiet(const struct gpu *gpu, uint64_t now);

/* Whether this process neither holds nor is releasing a lease, so that it may be suspended. */
bool lease_is_none(const struct gpu *gpu);

/* Resume after a suspension, for which the gate was shut. `work_possible`: threads were in the driver and may have
   launched work. */
void lease_resume(struct gpu *gpu, bool work_possible);
