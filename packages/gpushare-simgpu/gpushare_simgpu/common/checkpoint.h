/* The checkpoint of a process: its state, and what a caller, mostly another process, asks of it.
 *
 * Nobody can move another process' memory. So each process that has called cuInit has a thread that does it (its
 * restore thread), and the calls cuCheckpointProcess* ask that thread here, and wait for its answer. Either side may be
 * killed at any instant: the lock is robust, and both look for the other's death. */
#ifndef SIMGPU_CHECKPOINT_H
#define SIMGPU_CHECKPOINT_H

#include <pthread.h>
#include <stdint.h>

/* So much later than at its deadline the caller itself gives a lock up: the process may be stopped. The process has
 * given up before, so that it is never locked without anybody who knows it. */
#define CHECKPOINT_GRACE (200 * 1000000ull)

/* As CUprocessState. */
enum process_state { PROCESS_RUNNING, PROCESS_LOCKED, PROCESS_CHECKPOINTED, PROCESS_FAILED };

enum checkpoint_action { ACTION_LOCK, ACTION_CHECKPOINT, ACTION_RESTORE, ACTION_UNLOCK };

/* From NONE a caller goes to ASKED, the restore thread to TAKEN and ANSWERED, and the caller back to NONE. */
enum request_phase { REQUEST_NONE, REQUEST_ASKED, REQUEST_TAKEN, REQUEST_ANSWERED };

struct checkpoint {
    pthread_mutex_t caller; /* held by the one caller whose request this is */
    uint32_t state;         /* enum process_state; only its restore thread writes it */
    uint32_t thread;        /* the restore thread, as its own pid namespace numbers it; 0: there is none; futex word */
    uint32_t phase;         /* enum request_phase; futex word */
    uint32_t action;        /* enum checkpoint_action */
    uint64_t serial;        /* of the process that is meant: the slot may have gone to another one */
    uint64_t deadline;      /* instant until which a lock is tried; 0: no limit */
    int32_t result;         /* CUresult of what was asked */
};

/* A new process has the slot. Whoever waits for an answer of the one before it looks again. */
void checkpoint_reset(struct checkpoint *checkpoint);

/* Goes from one phase to another and wakes whoever waits. False, and nothing is done, in any other phase. */
int checkpoint_advance(struct checkpoint *checkpoint, enum request_phase from, enum request_phase to);

/* Returns when the phase is not `seen`, or after timeout_ns (0: no limit); the caller looks again. */
void checkpoint_wait(struct checkpoint *checkpoint, enum request_phase seen, uint64_t timeout_ns);

#endif
