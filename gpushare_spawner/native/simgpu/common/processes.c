#include "processes.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "frames.h"
#include "turns.h"

#define REAP_EVERY (20 * NS_PER_MS)

/* Start time of a process in clock ticks since boot; 0 when there is none, or only a zombie. Field 22 of proc(5) stat.
 */
static uint64_t start_time(int32_t pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    /* the name in parentheses may hold anything, so from its end */
    char *at = strrchr(text, ')');
    if (!at || at[1] != ' ' || at[2] == 'Z' || at[2] == 'X') return 0;
    at += 2;
    for (int field = 3; field < 22; field++) {
        at = strchr(at, ' ');
        if (!at) return 0;
        at++;
    }
    uint64_t start = strtoull(at, NULL, 10);
    return start ? start : 1;
}

int processes_alive(const struct process *process) {
    return process->pid != 0 && start_time(process->pid) == process->start;
}

static void lock(struct state *state) {
    /* a slot is whole or free whatever happened to the one who held the lock */
    if (pthread_mutex_lock(&state->lock) == EOWNERDEAD) pthread_mutex_consistent(&state->lock);
}

/* With the lock held. The number of processes left alive. */
static int reap(struct state *state) {
    int alive = 0;
    for (uint32_t slot = 0; slot < MAX_PROCESSES; slot++) {
        struct process *process = &state->processes[slot];
        if (process->pid == 0) continue;
        if (processes_alive(process)) {
            alive++;
            continue;
        }
        for (int gpu = 0; gpu < (int)state->settings.devices; gpu++) {
            gpu_lock(state, gpu);
            frames_release_all(state, gpu, slot);
            state->gpus[gpu].contexts[slot] = 0;
            turns_forget(state, gpu, slot);
            gpu_unlock(state, gpu);
        }
        /* last: until here a reaper that dies leaves the slot to the next one */
        process->pid = 0;
    }
    state->reaped_at = clock_now();
    return alive;
}

void processes_reap(struct state *state, int now) {
    uint64_t since = clock_now() - __atomic_load_n(&state->reaped_at, __ATOMIC_RELAXED);
    /* an instant of an earlier boot makes `since` huge: then it is time */
    if (!now && since < REAP_EVERY) return;
    lock(state);
    reap(state);
    pthread_mutex_unlock(&state->lock);
}

int processes_join(struct state *state) {
    lock(state);
    if (reap(state) == 0) {
        /* instants may be of an earlier boot */
        for (int gpu = 0; gpu < (int)state->settings.devices; gpu++) {
            gpu_lock(state, gpu);
            state->gpus[gpu].compute.free_at = state->gpus[gpu].h2d.free_at = state->gpus[gpu].d2h.free_at = 0;
            gpu_unlock(state, gpu);
        }
    }
    int found = -1;
    for (uint32_t i = 0; i < MAX_PROCESSES && found < 0; i++) {
        uint32_t slot = (state->next_slot + i) % MAX_PROCESSES;
        if (state->processes[slot].pid == 0) found = (int)slot;
    }
    if (found >= 0) {
        struct process *process = &state->processes[found];
        state->next_slot = (uint32_t)found + 1;
        for (int gpu = 0; gpu < (int)state->settings.devices; gpu++) {
            gpu_lock(state, gpu);
            memset(&state->gpus[gpu].usage[found], 0, sizeof state->gpus[gpu].usage[found]);
            gpu_unlock(state, gpu);
        }
        process->start = start_time(getpid());
        process->last_pid = getpid();
        __atomic_store_n(&process->pid, getpid(), __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&state->lock);
    return found;
}
