/* The checkpoint of a process: its state, and the request of a caller, usually another process.
 *
 * * No process can move another process's memory. So each process that has called cuInit has a thread for this purpose
 * (its restore thread), and the calls cuCheckpointProcess* send a request to that thread and wait for the answer.
 * Either side may be killed at any time: the lock is robust, and each side checks whether the other has died. */
#ifndef SIMGPU_CHECKPOINT_H
#define SIMGPU_CHECKPOINT_H

#include <pthread.h>
#include <stdint.h>

/* Time after the deadline at which the caller itself abandons a lock, because the process may be stopped. The process
 * gives up earlier, so that it is never locked without a caller that knows it. */
#define CHECKPOINT_GRACE (200 * 1000000ull)

/* The values of CUprocessState. */
enum process_state { PROCESS_RUNNING, PROCESS_LOCKED, PROCESS_CHECKPOINTED, PROCESS_FAILED };

enum checkpoint_action { ACTION_LOCK, ACTION_CHECKPOINT, ACTION_RESTORE, ACTION_UNLOCK };

/* A caller changes NONE to ASKED, the restore thread changes the phase to TAKEN and ANSWERED, and the caller changes it
 * back to NONE. */
enum request_phase { REQUEST_NONE, REQUEST_ASKED, REQUEST_TAKEN, REQUEST_ANSWERED };

struct checkpoint {
    pthread_mutex_t caller; /* held by the caller that makes this request */
    uint32_t state;         /* enum process_state; only its restore thread writes it */
    uint32_t thread;        /* the restore thread's id in its own pid namespace; 0: there is none; futex word */
    uint32_t phase;         /* enum request_phase; futex word */
    uint32_t action;        /* enum checkpoint_action */
    uint64_t serial;        /* serial of the intended process, because another process may have taken the slot */
    uint64_t deadline;      /* instant until which locking is attempted; 0: no limit */
    int32_t result;         /* CUresult of the request */
};

/* Reset the slot for a new process. Callers that wait for its predecessor's answer check again. */
void checkpoint_reset(struct checkpoint *checkpoint);

/* Change from one phase to another and wake all waiting threads. In any other phase, return false and do nothing. */
int checkpoint_advance(struct checkpoint *checkpoint, enum request_phase from, enum request_phase to);

/* Wait until the phase is not `seen`, or for timeout_ns (0: no limit); the caller must check again. */
void checkpoint_wait(struct checkpoint *checkpoint, enum request_phase seen, uint64_t timeout_ns);

#endif
