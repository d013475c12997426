#include "common/turns.h"

#include "common/clock.h"
#include "common/engines.h"
#include "common/futex.h"
#include "common/processes.h"

/* Time within which a waiting process notices that the owner was killed. */
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

/* With the lock held: count device time of a stopped process's kernels. */
static void run_for(struct gpu *gpu, uint32_t slot, uint64_t ns) {
    if (!ns) return;
    uint64_t begin = gpu->compute.free_at;
    gpu->compute.free_at = begin + ns;
    engine_count_busy(gpu, slot, begin, begin + ns);
    gpu->stats.busy_ns += ns;
    gpu->ahead_ns[slot] += ns;
    __atomic_sub_fetch(&gpu->queued_ns[slot], ns, __ATOMIC_RELAXED);
}

static uint64_t left_of(const struct gpu *gpu, uint32_t slot, uint64_t most) {
    uint64_t queued = __atomic_load_n(&gpu->queued_ns[slot], __ATOMIC_RELAXED);
    return queued < most ? queued : most;
}

static int is_stopped(const struct state *state, uint32_t slot) {
    return state->processes[slot].pid && state->processes[slot].stopped;
}

static void drop_ticket(struct turns *turns, uint32_t slot) {
    if (!turns->ticket[slot]) return;
    turns->ticket[slot] = 0;
    if (turns->waiting) turns->waiting--;
}

void turns_settle(struct state *state, int number, uint64_t now) {
    struct gpu *gpu = &state->gpus[number];
    struct turns *turns = &gpu->turns;
    uint32_t owner = turns->owner;
    int lost = owner && is_stopped(state, owner - 1);
    for (uint32_t slot = 0; slot < MAX_PROCESSES; slot++) {
        if (!is_stopped(state, slot) || !left_of(gpu, slot, 1)) continue;
        if ((!owner || lost) && gpu->compute.free_at && now > gpu->compute.free_at)
            run_for(gpu, slot, left_of(gpu, slot, now - gpu->compute.free_at));
        if (!turns->ticket[slot] && owner != slot + 1 && left_of(gpu, slot, 1)) {
            turns->ticket[slot] = ++turns->next_ticket;
            turns->waiting++;
        }
    }
    if (!lost) return;
    run_for(gpu, owner - 1, left_of(gpu, owner - 1, state->settings.slice_ns));
    turns_pass_on(state, number);
}

int turns_owned(const struct state *state, int number, uint32_t slot) {
    return state->gpus[number].turns.owner == slot + 1;
}

void turns_wait(struct state *state, int number, uint32_t slot) {
    struct gpu *gpu = &state->gpus[number];
    struct turns *turns = &gpu->turns;
    gpu_lock(state, number);
    turns_settle(state, number, clock_now());
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
        turns_settle(state, number, clock_now());
        if (turns->owner == 0) give(gpu, slot);
    }
    uint64_t now = clock_now();
    if (turns->turn_began + 5 * NS_PER_MS < now) turns->turn_began = now;
    gpu_unlock(state, number);
}

void turns_pass_on(struct state *state, int number) {
    struct gpu *gpu = &state->gpus[number];
    struct turns *turns = &gpu->turns;
    uint32_t next;
    for (;;) {
        next = MAX_PROCESSES;
        if (turns->waiting)
            for (uint32_t slot = 0; slot < MAX_PROCESSES; slot++)
                if (turns->ticket[slot] && (next == MAX_PROCESSES || turns->ticket[slot] < turns->ticket[next]))
                    next = slot;
        if (next == MAX_PROCESSES || !is_stopped(state, next)) break;
        drop_ticket(turns, next);
        if (gpu->compute.free_at) run_for(gpu, next, left_of(gpu, next, state->settings.slice_ns));
    }
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
    drop_ticket(turns, slot);
    if (turns->owner == slot + 1) turns_pass_on(state, number);
}

void turns_rebuild(struct state *state, int number) {
    struct turns *turns = &state->gpus[number].turns;
    turns->waiting = 0;
    for (uint32_t slot = 0; slot < MAX_PROCESSES; slot++) turns->waiting += turns->ticket[slot] != 0;
}
