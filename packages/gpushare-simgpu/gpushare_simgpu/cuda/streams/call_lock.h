/* The lock that cuCheckpointProcessLock takes: it keeps a process's threads out of the calls that launch work, manage
 * resources or change the state of a GPU. Calls that only read the driver's state ignore it. */
#ifndef SIMGPU_CALL_LOCK_H
#define SIMGPU_CALL_LOCK_H

#include "cuda/driver/driver.h"

/* Placed at the start of each call that a locked process cannot make, before it takes any lock. Waits while the process
 * is locked; the rest of the calling function then counts as inside the call. Nested calls pass. */
#define LOCKABLE() __attribute__((cleanup(call_lock_leave), unused)) int entered = call_lock_enter()

/* Before cuInit and in a fork no call waits, because the call itself fails. */
int call_lock_enter(void);
void call_lock_leave(int *entered);

/* For a thread that executes submitted work: its calls never wait, because a lock waits for the work. */
void call_lock_exempt(void);

/* From now on threads wait at the start of these calls; threads inside continue. Does not wait for them. */
void call_lock_close(void);

/* Whether a thread is inside such a call. */
int call_lock_inside(void);

/* Let the waiting threads continue. */
void call_lock_open(void);

/* Called in a child after fork, which has none of its parent's other threads. */
void call_lock_forked(void);

#endif
