/* Dies with a GPU's lock held and its lists in ruins; then sees whether the state is whole again. Built by test_simgpu_state.py
 * with the simulator's common/ sources. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/frames.h"
#include "common/processes.h"
#include "common/turns.h"

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("line %d: %s\n", __LINE__, #condition);                                                             \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static void ruin(struct state *state)
{
    uint32_t mine, number;
    processes_forked();
    int slot = processes_join(state);
    CHECK(slot >= 0);
    turns_wait(state, 0, (uint32_t)slot); /* dies as the owner of the engine too */
    gpu_lock(state, 0);
    for (uint64_t page = 0; page < 10; page++)
        CHECK(frames_claim(state, 0, (uint32_t)slot, page, FRAME_MANAGED, &mine) == CLAIM_FREE);
    for (number = 0; number < state->frames; number++)
        gpu_frames(state, 0)[number].before = gpu_frames(state, 0)[number].after = number * 7919;
    state->gpus[0].free.first = state->gpus[0].managed.last = 123456789;
    state->gpus[0].managed.count = 77;
    state->gpus[0].turns.waiting = 99;
    _exit(0);
}

int main(void)
{
    struct state *state = state_open();
    int status;
    CHECK(state);
    uint32_t frames = (uint32_t)state->frames, number, first = NO_FRAME;
    uint32_t slot = (uint32_t)processes_join(state);

    /* three managed pages of our own, in this order */
    gpu_lock(state, 0);
    for (uint64_t page = 100; page < 103; page++) {
        CHECK(frames_claim(state, 0, slot, page, FRAME_MANAGED, &number) == CLAIM_FREE);
        if (first == NO_FRAME)
            first = number;
    }
    gpu_unlock(state, 0);

    pid_t child = fork();
    if (child == 0)
        ruin(state);
    CHECK(waitpid(child, &status, 0) == child && status == 0);

    /* the dead one's frames and its turn go back; ours stay, in their order */
    processes_reap(state, 1);
    gpu_lock(state, 0);
    CHECK(state->gpus[0].free.count == frames - 3 && state->gpus[0].managed.count == 3);
    CHECK(state->gpus[0].turns.owner == 0 && state->gpus[0].turns.waiting == 0);
    CHECK(state->gpus[0].held[slot] == 3);
    CHECK(state->gpus[0].managed.first == first && frames_holds(state, 0, first, slot, 100));
    for (uint64_t page = 0; page < frames - 3; page++)
        CHECK(frames_claim(state, 0, slot, page, FRAME_PLAIN, &number) == CLAIM_FREE);
    CHECK(frames_claim(state, 0, slot, 500, FRAME_PLAIN, &number) == CLAIM_EVICTED && number == first);
    gpu_unlock(state, 0);
    printf("whole\n");
    return 0;
}
