/* The lock that cuCheckpointProcessLock takes: it keeps a process' threads out of the calls that launch work, manage
 * resources or change the state of a GPU. Calls that only tell what the driver knows do not look at it. */
#ifndef SIMGPU_CALL_LOCK_H
#define SIMGPU_CALL_LOCK_H

#include "cuda/driver/driver.h"

/* At the head of each call that a locked process cannot make, before it takes any lock: waits while the process is
 * locked; the rest of the calling function is then counted as inside the call. Calls inside calls pass. */
#define LOCKABLE() __attribute__((cleanup(call_lock_leave), unused)) int entered = call_lock_enter()

/* Before cuInit and in a fork nothing waits: the call fails by itself. */
int call_lock_enter(void);
void call_lock_leave(int *entered);

/* For a thread that carries out submitted work: its calls never wait, since a lock waits for the work. */
void call_lock_exempt(void);

/* From now on threads wait at the head of these calls; those inside go on. Does not wait for them. */
void call_lock_close(void);

/* True while a thread is inside such a call. */
int call_lock_inside(void);

/* Lets the waiting threads go on. */
void call_lock_open(void);

/* In a child after fork, which has none of its parent's other threads. */
void call_lock_forked(void);

#endif
