#include "cuda/checkpoint/restore_thread.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/futex.h"
#include "cuda/checkpoint/device_memory.h"
#include "cuda/driver/driver.h"
#include "cuda/streams/call_lock.h"
#include "cuda/streams/context.h"

/* The interval at which a lock checks whether the process is at rest. */
#define LOOK_AGAIN (NS_PER_MS / 2)

static struct checkpoint *own(void) {
    return &driver.state->checkpoints[driver.slot];
}

static enum process_state state_now(void) {
    return (enum process_state)__atomic_load_n(&own()->state, __ATOMIC_ACQUIRE);
}

static void become(enum process_state state) {
    __atomic_store_n(&own()->state, state, __ATOMIC_RELEASE);
}

static void look_idle(struct context *context, void *idle) {
    if (*(int *)idle) *(int *)idle = context_idle(context);
}

/* Whether no call that could submit work is in progress and all submitted work is done. */
static int at_rest(void) {
    int idle = 1;
    if (call_lock_inside()) return 0;
    contexts_visit(look_idle, &idle);
    return idle;
}

/* Whether no caller waits for the answer any more, because it was killed. */
static int is_abandoned(void) {
    int error = pthread_mutex_trylock(&own()->caller);
    if (error == EBUSY) return 0;
    if (error == EOWNERDEAD) pthread_mutex_consistent(&own()->caller);
    pthread_mutex_unlock(&own()->caller);
    return 1;
}

static CUresult lock(void) {
    uint64_t deadline = own()->deadline;
    REQUIRE(state_now() == PROCESS_RUNNING, CUDA_ERROR_ILLEGAL_STATE);
    call_lock_close();
    for (;;) {
        int rests = at_rest();
        uint64_t now = clock_now(), latest = rests ? deadline + CHECKPOINT_GRACE / 2 : deadline;
        if ((deadline && now >= latest) || is_abandoned()) break;
        if (rests) {
            become(PROCESS_LOCKED);
            return CUDA_SUCCESS;
        }
        clock_sleep_until(now + LOOK_AGAIN);
    }
    call_lock_open();
    return CUDA_ERROR_NOT_READY;
}

static CUresult checkpoint(void) {
    REQUIRE(state_now() == PROCESS_LOCKED, CUDA_ERROR_ILLEGAL_STATE);
    if (device_memory_has_managed()) {
        /* the driver does not return to its initial state; its calls stay locked */
        if (!driver.state->settings.checkpoint_refuses_managed) become(PROCESS_FAILED);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    device_memory_leave();
    become(PROCESS_CHECKPOINTED);
    return CUDA_SUCCESS;
}

static CUresult restore(void) {
    static int was_short;
    REQUIRE(state_now() == PROCESS_CHECKPOINTED, CUDA_ERROR_ILLEGAL_STATE);
    REQUIRE(!was_short || driver.state->settings.checkpoint_retries, CUDA_ERROR_OPERATING_SYSTEM);
    CUresult error = device_memory_return();
    was_short = error == CUDA_ERROR_OUT_OF_MEMORY;
    if (!error) become(PROCESS_LOCKED);
    return error;
}

static CUresult unlock(void) {
    REQUIRE(state_now() == PROCESS_LOCKED, CUDA_ERROR_ILLEGAL_STATE);
    become(PROCESS_RUNNING);
    return CUDA_SUCCESS;
}

static CUresult carry_out(enum checkpoint_action action) {
    switch (action) {
    case ACTION_LOCK: return lock();
    case ACTION_CHECKPOINT: return checkpoint();
    case ACTION_RESTORE: return restore();
    case ACTION_UNLOCK: return unlock();
    }
    return CUDA_ERROR_INVALID_VALUE;
}

static void *serve(void *unused) {
    struct checkpoint *asked = own();
    clock_exact_sleeps();
    __atomic_store_n(&asked->thread, (uint32_t)syscall(SYS_gettid), __ATOMIC_RELEASE);
    futex_wake_all(&asked->thread, 1);
    for (;;) {
        uint32_t phase = __atomic_load_n(&asked->phase, __ATOMIC_ACQUIRE);
        if (phase != REQUEST_ASKED) {
            checkpoint_wait(asked, (enum request_phase)phase, 0);
            continue;
        }
        if (!checkpoint_advance(asked, REQUEST_ASKED, REQUEST_TAKEN)) continue;
        int meant = asked->serial == driver.state->processes[driver.slot].serial;
        enum checkpoint_action action = (enum checkpoint_action)asked->action;
        CUresult result = meant ? carry_out(action) : CUDA_ERROR_INVALID_VALUE;
        asked->result = (int32_t)result;
        checkpoint_advance(asked, REQUEST_TAKEN, REQUEST_ANSWERED);
        /* last, because the program may have been waiting only for this in order to end */
        if (action == ACTION_UNLOCK && result == CUDA_SUCCESS) call_lock_open();
    }
    return NULL;
}

void restore_thread_start(void) {
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_t thread;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 256 * 1024);
    /* the program's signal handlers run on its own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, &attributes, serve, NULL);
    while (!failed && !__atomic_load_n(&own()->thread, __ATOMIC_ACQUIRE)) futex_wait(&own()->thread, 0, 0, 1);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}
