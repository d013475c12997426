/* Bursts: work from the first launch until the device is quiet, as detected by the background thread. Marks show
   whether the device is quiet: an event in each stream that has had work, queried later. Only for the background
   thread, with no lock held. Functions take captures_lock, then contexts_lock, and query the driver without waiting for
   the device. */
#pragma once

#include "driver/gpus.h"

/* Record an event behind the work of each active stream. False: not possible now, because a stream is being captured or
   a context that has work is being destroyed. */
bool bursts_record_marks(struct gpu *gpu);

/* Whether all of that work and the work of destroyed streams is done. */
bool bursts_marks_passed(struct gpu *gpu);

/* Begin the bursts of a lease. */
void burst_lease_begins(struct gpu *gpu);

/* Report the start and end of bursts to the agent (BUSY, IDLE), with the lease's number. `next`: the instant of the
   next step. */
void burst_step(struct gpu *gpu, uint64_t lease, uint64_t now, uint64_t *next);

/* End the burst, because the device is quiet. */
void burst_over(struct gpu *gpu, uint64_t now);

/* Return the nanoseconds of work under the current lease, or since bursts_observe, and the nanoseconds since the last
   work (0 while there is work). */
uint64_t burst_busy_time(const struct gpu *gpu);
uint64_t burst_quiet_time(const struct gpu *gpu, uint64_t now);

/* ---- work from before the connection ----

   Work that was launched without an agent may still run. It ends without a lease, but it must be reported to the agent:
   such a session is not idle, and its GPU time counts. */

/* Begin to check for such work. */
void bursts_check_earlier_work(struct gpu *gpu);

/* Whether there is such work; returns true once. `next`: the instant of the next step while the result is unknown. */
bool bursts_earlier_work_runs(struct gpu *gpu, uint64_t now, uint64_t *next);

/* ---- engine `observe`: bursts are reported, and the library does nothing else ---- */

/* Begin to report on a connection to an agent that accepts such reports, and end. */
void bursts_observe(struct gpu *gpu);
void bursts_observe_end(struct gpu *gpu);

/* Report bursts. Returns the instant of the next step (clock_now); UINT64_MAX: none before the next launch. */
uint64_t bursts_observe_step(struct gpu *gpu, uint64_t now);
