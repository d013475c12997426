#include "common/turns.h"

#include "common/clock.h"
#include "common/futex.h"
#include "common/processes.h"

/* How soon a waiting process notices that the owner was killed. */
#define LOOK_AGAIN (25 * NS_PER_MS)

static void give(struct gpu *gpu, uint32_t slot) {
    struct turns *turns = &gpu->turns;
    if (turns->ticket[slot]) {
        turns->ticket[slot] = 0;
        turns->waiting--;
    }
    turns->turn_began = gpu->compute.free_at;
    turns->owner = slot + 1;
}

void turns_wait(struct state *state, int number, uint32_t slot) {
    struct gpu *gpu = &state->gpus[number];
    struct turns *turns = &gpu->turns;
    gpu_lock(state, number);
    if (turns->owner == 0) give(gpu, slot);
    while (turns->owner != slot + 1) {
        if (!turns->ticket[slot]) {
            turns->ticket[slot] = ++turns->next_ticket;
            turns->waiting++;
        }
        uint32_t seen = turns->changed;
        gpu_unlock(state, number);
        futex_wait(&turns->changed, seen, LOOK_AGAIN, 1);
        processes_reap(state, 0);
        gpu_lock(state, number);
        if (turns->owner == 0) give(gpu, slot);
    }
    uint64_t now = clock_now();
    if (turns->turn_began + 5 * NS_PER_MS < now) turns->turn_began = now;
    gpu_unlock(state, number);
}

void turns_pass_on(struct state *state, int number) {
    struct gpu *gpu = &state->gpus[number];
    struct turns *turns = &gpu->turns;
    uint32_t next = MAX_PROCESSES;
    if (turns->waiting)
        for (uint32_t slot = 0; slot < MAX_PROCESSES; slot++)
            if (turns->ticket[slot] && (next == MAX_PROCESSES || turns->ticket[slot] < turns->ticket[next]))
                next = slot;
    turns->owner = 0;
    if (next == MAX_PROCESSES) {
        turns->waiting = 0;
        return;
    }
    give(gpu, next);
    turns->changed++;
    futex_wake_all(&turns->changed, 1);
}

int turns_over(struct state *state, int number, uint64_t now) {
    struct turns *turns = &state->gpus[number].turns;
    return turns->waiting && now >= turns->turn_began + state->settings.slice_ns;
}

void turns_forget(struct state *state, int number, uint32_t slot) {
    struct turns *turns = &state->gpus[number].turns;
    if (turns->ticket[slot]) {
        turns->ticket[slot] = 0;
        if (turns->waiting) turns->waiting--;
    }
    if (turns->owner == slot + 1) turns_pass_on(state, number);
}

void turns_rebuild(struct state *state, int number) {
    struct turns *turns = &state->gpus[number].turns;
    turns->waiting = 0;
    for (uint32_t slot = 0; slot < MAX_PROCESSES; slot++) turns->waiting += turns->ticket[slot] != 0;
}
