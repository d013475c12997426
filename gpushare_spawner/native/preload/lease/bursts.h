/* Bursts: work from the first launch until the device is quiet, as the background thread sees it from outside. Whether
   the device is quiet is known from marks: an event in each stream that has had work, queried later. Only for the
   background thread, with no lock held. Functions take contexts_lock, and captures_lock before it, and ask the driver
   without waiting for the device. */
#pragma once

#include "driver/gpus.h"

/* Record an event behind the work of each active stream. False: not now; a stream is being captured, or a context that
   has work is being destroyed. */
bool bursts_record_marks(struct gpu *gpu);

/* Whether all of that work, and that of destroyed streams, is done. */
bool bursts_marks_passed(struct gpu *gpu);

/* Begin the bursts of a lease. */
void burst_lease_begins(struct gpu *gpu);

/* Report the start and end of bursts to the agent (BUSY, IDLE), with the number of the lease. `next`: the instant of
   the next step. */
void burst_step(struct gpu *gpu, uint64_t lease, uint64_t now, uint64_t *next);

/* End the burst: the device is quiet. */
void burst_over(struct gpu *gpu, uint64_t now);

/* Nanoseconds of work under the present lease, or since bursts_observe; nanoseconds since the last work, 0 while there
   is work. */
uint64_t burst_busy_time(const struct gpu *gpu);
uint64_t burst_quiet_time(const struct gpu *gpu, uint64_t now);

/* ---- work from before the connection ----

   Work that was launched without an agent may still run. It ends without a lease, but the agent must know of it: such a
   session is not idle, and its GPU time counts. */

/* Begin to check for such work. */
void bursts_check_earlier_work(struct gpu *gpu);

/* Whether there is such work; true once. `next`: the instant of the next step, while that is not known. */
bool bursts_earlier_work_runs(struct gpu *gpu, uint64_t now, uint64_t *next);

/* ---- engine `observe`: bursts are reported, and the library does nothing else ---- */

/* Begin to report, on a connection to an agent that takes such reports, and end. */
void bursts_observe(struct gpu *gpu);
void bursts_observe_end(struct gpu *gpu);

/* Report bursts. Returns the instant of the next step (clock_now); UINT64_MAX: none before the next launch. */
uint64_t bursts_observe_step(struct gpu *gpu, uint64_t now);
