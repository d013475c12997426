#include "common/processes.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/frames.h"
#include "common/turns.h"

#define REAP_EVERY (20 * NS_PER_MS)

/* old glibc headers lack open file description locks, which Linux has had since 3.15 */
#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif

/* Larger than any pid in any namespace (Linux's PID_MAX_LIMIT). */
#define BEYOND_PIDS 4194304

static int own_slot = -1;
static pthread_mutex_t looking = PTHREAD_MUTEX_INITIALIZER;

static size_t read_text(const char *path, char *text, size_t size) {
    FILE *file = fopen(path, "re");
    size_t length = file ? fread(text, 1, size - 1, file) : 0;
    if (file) fclose(file);
    text[length] = 0;
    return length;
}

/* Return the start time of a process in this /proc ("self" or a number) in clock ticks since boot; 0 if there is none.
 * Field 22 of proc(5) stat. */
static uint64_t start_time(const char *process) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%.20s/stat", process);
    read_text(path, text, sizeof text);
    /* the name in parentheses may contain any characters, so start at its end */
    char *at = strrchr(text, ')');
    if (!at || at[1] != ' ') return 0;
    at += 2;
    for (int field = 3; field < 22; field++) {
        at = strchr(at, ' ');
        if (!at) return 0;
        at++;
    }
    uint64_t start = strtoull(at, NULL, 10);
    return start ? start : 1;
}

/* Return the number of a process's pid namespace; 0 if this process may not read it. */
static uint64_t pid_namespace(const char *process) {
    char path[64];
    struct stat status;
    snprintf(path, sizeof path, "/proc/%.20s/ns/pid", process);
    return stat(path, &status) ? 0 : (uint64_t)status.st_ino;
}

static int is_that(const char *entry, const struct process *process) {
    uint64_t space = pid_namespace(entry);
    /* another user's namespace cannot be read; processes of two pods that start within one clock tick are then not
     * distinguished */
    return (!space || space == process->pid_namespace) && start_time(entry) == process->start;
}

/* Whether another open file description holds the slot's lock. */
static int locked(uint32_t slot) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};
    int file = state_file();
    /* if the file cannot be queried, no process is declared dead */
    return file < 0 || fcntl(file, F_OFD_GETLK, &lock) || lock.l_type != F_UNLCK;
}

static int take_lock(uint32_t slot) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};
    return state_file() >= 0 && fcntl(state_file(), F_OFD_SETLK, &lock) == 0;
}

/* Whether a process of this pid namespace is stopped. Unknown for a process of another namespace. */
static uint32_t is_stopped(const struct process *process) {
    static uint64_t here;
    char path[64], text[1024];
    if (!here) here = pid_namespace("self");
    if (process->pid_namespace != here) return 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)process->pid);
    read_text(path, text, sizeof text);
    const char *at = strrchr(text, ')');
    return at && at[1] == ' ' && (at[2] == 'T' || at[2] == 't');
}

static int slot_alive(struct state *state, uint32_t slot) {
    return state->processes[slot].pid != 0 && ((int)slot == own_slot || locked(slot));
}

/* Return the pid of a process in a namespace below this namespace; 0 if it is not below. The process's status has a pid
 * for each level, its own last, and its start time is the same in all namespaces. */
static int32_t pid_from_outside(const struct process *process) {
    int32_t found = 0;
    DIR *all = opendir("/proc");
    if (!all) return 0;
    for (struct dirent *entry; !found && (entry = readdir(all));) {
        char path[300], text[8192], *line;
        if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
        snprintf(path, sizeof path, "/proc/%.20s/status", entry->d_name);
        read_text(path, text, sizeof text);
        if (!(line = strstr(text, "\nNSpid:"))) continue;
        line += strlen("\nNSpid:");
        line[strcspn(line, "\n")] = 0;
        char *last = strrchr(line, '\t');
        if (last && strtol(last, NULL, 10) == process->pid && is_that(entry->d_name, process))
            found = (int32_t)strtol(entry->d_name, NULL, 10);
    }
    closedir(all);
    return found;
}

int32_t processes_pid(struct state *state, uint32_t slot) {
    static uint64_t here;
    static struct {
        uint64_t serial;
        int32_t pid;
    } known[MAX_PROCESSES];
    pthread_mutex_lock(&looking);
    struct process process = state->processes[slot];
    if (!here) here = pid_namespace("self");
    if (process.last_pid && known[slot].serial != process.serial) {
        int32_t pid = process.last_pid;
        if (process.pid_namespace != here) pid = process.pid ? pid_from_outside(&process) : 0;
        known[slot].pid = pid ? pid : (int32_t)(BEYOND_PIDS + process.serial % 1000000000);
        known[slot].serial = process.serial;
    }
    int32_t pid = process.last_pid ? known[slot].pid : 0;
    pthread_mutex_unlock(&looking);
    return pid;
}

void processes_forked(void) {
    own_slot = -1;
    pthread_mutex_init(&looking, NULL);
    state_forked();
}

/* With the lock held. Returns the number of live processes. */
static int reap(struct state *state) {
    int alive = 0, stopped = 0;
    for (uint32_t slot = 0; slot < MAX_PROCESSES; slot++) {
        struct process *process = &state->processes[slot];
        if (process->pid == 0) continue;
        if (slot_alive(state, slot)) {
            alive++;
            process->stopped = (int)slot != own_slot && is_stopped(process);
            stopped |= process->stopped != 0;
            continue;
        }
        for (int gpu = 0; gpu < (int)state->numbers; gpu++) {
            gpu_lock(state, gpu);
            frames_release_all(state, gpu, slot);
            state->gpus[gpu].contexts[slot] = 0;
            turns_forget(state, gpu, slot);
            gpu_unlock(state, gpu);
        }
        /* last, so that if the reaper dies before this point, the next reaper handles the slot */
        process->pid = 0;
    }
    for (int gpu = 0; stopped && gpu < (int)state->numbers; gpu++) {
        gpu_lock(state, gpu);
        turns_settle(state, gpu, clock_now());
        gpu_unlock(state, gpu);
    }
    state->reaped_at = clock_now();
    return alive;
}

void processes_reap(struct state *state, int now) {
    uint64_t since = clock_now() - __atomic_load_n(&state->reaped_at, __ATOMIC_RELAXED);
    /* an instant of an earlier boot makes `since` huge, so that reaping is due */
    if (!now && since < REAP_EVERY) return;
    state_lock(state);
    reap(state);
    state_unlock(state);
}

int processes_alive(struct state *state, uint32_t slot, uint64_t serial) {
    processes_reap(state, 0);
    return __atomic_load_n(&state->processes[slot].pid, __ATOMIC_ACQUIRE) && state->processes[slot].serial == serial;
}

int processes_join(struct state *state) {
    state_lock(state);
    if (reap(state) == 0) {
        /* instants may be of an earlier boot */
        for (int gpu = 0; gpu < (int)state->numbers; gpu++) {
            gpu_lock(state, gpu);
            state->gpus[gpu].compute.free_at = state->gpus[gpu].h2d.free_at = state->gpus[gpu].d2h.free_at = 0;
            gpu_unlock(state, gpu);
        }
    }
    int found = -1;
    for (uint32_t i = 0; i < MAX_PROCESSES && found < 0; i++) {
        uint32_t slot = (state->next_slot + i) % MAX_PROCESSES;
        if (state->processes[slot].pid == 0 && take_lock(slot)) found = (int)slot;
    }
    if (found >= 0) {
        struct process *process = &state->processes[found];
        state->next_slot = (uint32_t)found + 1;
        for (int gpu = 0; gpu < (int)state->numbers; gpu++) {
            gpu_lock(state, gpu);
            memset(&state->gpus[gpu].usage[found], 0, sizeof state->gpus[gpu].usage[found]);
            state->gpus[gpu].queued_ns[found] = state->gpus[gpu].ahead_ns[found] = 0;
            gpu_unlock(state, gpu);
        }
        *process = (struct process){.last_pid = getpid(),
                                    .start = start_time("self"),
                                    .pid_namespace = pid_namespace("self"),
                                    .serial = ++state->next_serial};
        checkpoint_reset(&state->checkpoints[found]);
        own_slot = found;
        __atomic_store_n(&process->pid, getpid(), __ATOMIC_RELEASE);
    }
    state_unlock(state);
    return found;
}
