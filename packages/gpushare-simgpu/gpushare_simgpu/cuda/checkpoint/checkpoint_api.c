/* The driver calls that checkpoint a process, usually another process. They need neither cuInit nor a context. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/processes.h"
#include "cuda/driver/driver.h"

/* Time within which a caller notices that the other process was killed. */
#define LOOK_AGAIN (25 * NS_PER_MS)

struct target {
    struct state *state;
    uint32_t slot;
    uint64_t serial;
    struct checkpoint *checkpoint;
};

/* A caller may checkpoint a process if it may attach to it as a debugger: the same user or CAP_SYS_PTRACE, and the
 * kernel's further conditions. The kernel applies the same conditions to the memory of the process. */
static CUresult check_permission(int pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/mem", pid);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file >= 0) {
        close(file);
        return CUDA_SUCCESS;
    }
    return errno == ENOENT || errno == ESRCH ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_PERMITTED;
}

static CUresult find(int pid, struct target *target) {
    REQUIRE(pid > 0, CUDA_ERROR_INVALID_VALUE);
    struct state *state = state_open();
    REQUIRE(state, CUDA_ERROR_NOT_INITIALIZED);
    REQUIRE(state->settings.checkpoint == CHECKPOINT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
    CUresult error = check_permission(pid);
    if (error) return error;
    processes_reap(state, 1);
    for (uint32_t slot = 0; slot < MAX_PROCESSES; slot++) {
        if (!state->processes[slot].pid || processes_pid(state, slot) != pid) continue;
        *target = (struct target){state, slot, state->processes[slot].serial, &state->checkpoints[slot]};
        return __atomic_load_n(&target->checkpoint->thread, __ATOMIC_ACQUIRE) ? CUDA_SUCCESS
                                                                              : CUDA_ERROR_NOT_INITIALIZED;
    }
    return CUDA_ERROR_NOT_INITIALIZED;
}

static int is_alive(const struct target *target) {
    return processes_alive(target->state, target->slot, target->serial);
}

/* Become the process's only caller. CUDA_ERROR_NOT_READY at the deadline (0: none). */
static CUresult enter(const struct target *target, uint64_t deadline) {
    int error = 0;
    if (deadline) {
        struct timespec until;
        uint64_t now = clock_now(), left = deadline > now ? deadline - now : 0;
        clock_gettime(CLOCK_REALTIME, &until);
        left += (uint64_t)until.tv_nsec;
        until.tv_sec += (time_t)(left / NS_PER_SECOND);
        until.tv_nsec = (long)(left % NS_PER_SECOND);
        error = pthread_mutex_timedlock(&target->checkpoint->caller, &until);
    } else {
        error = pthread_mutex_lock(&target->checkpoint->caller);
    }
    /* a caller was killed: its request is still in progress or already answered */
    if (error == EOWNERDEAD) pthread_mutex_consistent(&target->checkpoint->caller);
    return error == ETIMEDOUT ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

static void leave(const struct target *target) {
    pthread_mutex_unlock(&target->checkpoint->caller);
}

/* Wait until the restore thread has nothing to do. */
static CUresult settle(const struct target *target, uint64_t deadline) {
    struct checkpoint *checkpoint = target->checkpoint;
    for (;;) {
        uint32_t phase = __atomic_load_n(&checkpoint->phase, __ATOMIC_ACQUIRE);
        if (!is_alive(target)) return CUDA_ERROR_INVALID_VALUE;
        if (phase == REQUEST_NONE || checkpoint_advance(checkpoint, REQUEST_ANSWERED, REQUEST_NONE))
            return CUDA_SUCCESS;
        if (deadline && clock_now() >= deadline) {
            /* the thread has not seen the request, and no caller needs the answer */
            checkpoint_advance(checkpoint, REQUEST_ASKED, REQUEST_NONE);
            return CUDA_ERROR_NOT_READY;
        }
        checkpoint_wait(checkpoint, (enum request_phase)phase, LOOK_AGAIN);
    }
}

static CUresult request(const struct target *target, enum checkpoint_action action, uint64_t deadline) {
    struct checkpoint *checkpoint = target->checkpoint;
    CUresult error = settle(target, deadline);
    if (error) return error;
    checkpoint->action = action;
    checkpoint->serial = target->serial;
    checkpoint->deadline = deadline;
    checkpoint_advance(checkpoint, REQUEST_NONE, REQUEST_ASKED);
    for (;;) {
        uint32_t phase = __atomic_load_n(&checkpoint->phase, __ATOMIC_ACQUIRE);
        if (phase == REQUEST_ANSWERED) break;
        if (!is_alive(target)) return CUDA_ERROR_INVALID_VALUE;
        if (deadline && clock_now() >= deadline + CHECKPOINT_GRACE) {
            /* the process is stopped, before it saw the request or while it handles it; in the latter case it gives up
             * when it continues */
            checkpoint_advance(checkpoint, REQUEST_ASKED, REQUEST_NONE);
            return CUDA_ERROR_NOT_READY;
        }
        checkpoint_wait(checkpoint, (enum request_phase)phase, LOOK_AGAIN);
    }
    error = (CUresult)checkpoint->result;
    checkpoint_advance(checkpoint, REQUEST_ANSWERED, REQUEST_NONE);
    return error;
}

static CUresult ask(int pid, enum checkpoint_action action, unsigned timeout_ms) {
    struct target target;
    uint64_t deadline = timeout_ms ? clock_now() + timeout_ms * NS_PER_MS : 0;
    CUresult error = find(pid, &target);
    if (error) return error;
    if ((error = enter(&target, deadline))) return error;
    error = request(&target, action, deadline);
    leave(&target);
    return error;
}

static int is_zero(const void *bytes, size_t size) {
    for (size_t i = 0; i < size; i++)
        if (((const char *)bytes)[i]) return 0;
    return 1;
}

EXPORT CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args) {
    REQUIRE(!args || (args->reserved0 == 0 && is_zero(args->reserved1, sizeof args->reserved1)),
            CUDA_ERROR_INVALID_VALUE);
    return ask(pid, ACTION_LOCK, args ? args->timeout_ms : 0);
}

EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args) {
    REQUIRE(!args || is_zero(args, sizeof *args), CUDA_ERROR_INVALID_VALUE);
    return ask(pid, ACTION_CHECKPOINT, 0);
}

EXPORT CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args) {
    REQUIRE(!args || (!args->pairs == !args->pair_count && is_zero(args->reserved0, sizeof args->reserved0) &&
                      args->reserved1 == 0),
            CUDA_ERROR_INVALID_VALUE);
    /* memory returns to the GPU that it came from */
    for (unsigned i = 0; args && i < args->pair_count; i++)
        REQUIRE(memcmp(&args->pairs[i].before, &args->pairs[i].after, sizeof(CUuuid)) == 0, CUDA_ERROR_NOT_SUPPORTED);
    return ask(pid, ACTION_RESTORE, 0);
}

EXPORT CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args) {
    REQUIRE(!args || is_zero(args, sizeof *args), CUDA_ERROR_INVALID_VALUE);
    return ask(pid, ACTION_UNLOCK, 0);
}

EXPORT CUresult cuCheckpointProcessGetState(int pid, int *state) {
    struct target target;
    REQUIRE(state, CUDA_ERROR_INVALID_VALUE);
    CUresult error = find(pid, &target);
    if (!error) *state = (int)__atomic_load_n(&target.checkpoint->state, __ATOMIC_ACQUIRE);
    return error;
}

/* Return a thread of a process by its id in this process's pid namespace; 0 if there is none. */
static int thread_here(int pid, int thread) {
    char path[300], line[256];
    int found = 0;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *threads = opendir(path);
    if (!threads) return 0;
    for (struct dirent *entry; !found && (entry = readdir(threads));) {
        snprintf(path, sizeof path, "/proc/%d/task/%.20s/status", pid, entry->d_name);
        FILE *status = entry->d_name[0] == '.' ? NULL : fopen(path, "re");
        while (status && fgets(line, sizeof line, status)) {
            char *last = strncmp(line, "NSpid:", 6) == 0 ? strrchr(line, '\t') : NULL;
            /* the thread's own namespace comes last */
            if (last && strtol(last, NULL, 10) == thread) found = (int)strtol(entry->d_name, NULL, 10);
        }
        if (status) fclose(status);
    }
    closedir(threads);
    return found;
}

EXPORT CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *thread) {
    struct target target;
    REQUIRE(thread, CUDA_ERROR_INVALID_VALUE);
    CUresult error = find(pid, &target);
    if (error) return error;
    *thread = thread_here(pid, (int)target.checkpoint->thread);
    return *thread ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}
