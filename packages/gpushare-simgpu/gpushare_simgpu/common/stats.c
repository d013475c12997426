#include "common/stats.h"

#include <string.h>

#include "common/mig.h"
#include "common/processes.h"

#define EXPORT __attribute__((visibility("default")))

/* Add two sets of counters; the struct has no other members. */
static void add(struct simgpu_stats *sum, const struct simgpu_stats *more) {
    for (size_t i = 0; i < sizeof *sum / sizeof(uint64_t); i++) ((uint64_t *)sum)[i] += ((const uint64_t *)more)[i];
}

/* Iterate over a GPU and its MIG instances, including removed ones: from -1 to the next number, and to -1 after the
 * last. */
static int next_of(const struct state *state, int gpu, int number) {
    if (number < 0) return gpu;
    int next = number == gpu ? mig_number(state, gpu, 0) : number + 1;
    return next < (int)state->numbers && mig_parent(state, next) == gpu ? next : -1;
}

EXPORT int simgpu_stats(int gpu, struct simgpu_stats *out, size_t size) {
    struct state *state = state_open();
    if (!state || gpu < 0 || gpu >= (int)state->settings.devices || !out) return -1;
    processes_reap(state, 1);
    struct simgpu_stats stats = {0};
    for (int number = next_of(state, gpu, -1); number >= 0; number = next_of(state, gpu, number)) {
        gpu_lock(state, number);
        add(&stats, &state->gpus[number].stats);
        stats.memory_free += state->gpus[number].free.count * state->settings.page;
        stats.memory_managed += state->gpus[number].managed.count * state->settings.page;
        gpu_unlock(state, number);
    }
    stats.memory = state->settings.memory;
    memcpy(out, &stats, size < sizeof stats ? size : sizeof stats);
    return 0;
}

EXPORT int64_t simgpu_resident(int gpu, int32_t pid) {
    struct state *state = state_open();
    if (!state || gpu < 0 || gpu >= (int)state->settings.devices) return -1;
    processes_reap(state, 1);
    int64_t bytes = 0;
    for (uint32_t slot = 0; slot < MAX_PROCESSES; slot++) {
        if (pid <= 0 || !state->processes[slot].pid || processes_pid(state, slot) != pid) continue;
        for (int number = next_of(state, gpu, -1); number >= 0; number = next_of(state, gpu, number))
            bytes += (int64_t)(state->gpus[number].held[slot] * state->settings.page);
    }
    return bytes;
}

EXPORT int64_t simgpu_gpu_time(int gpu, int32_t pid) {
    struct state *state = state_open();
    if (!state || gpu < 0 || gpu >= (int)state->settings.devices) return -1;
    int64_t ns = 0;
    processes_reap(state, 0);
    for (uint32_t slot = 0; slot < MAX_PROCESSES; slot++) {
        if (pid <= 0 || processes_pid(state, slot) != pid) continue;
        for (int number = next_of(state, gpu, -1); number >= 0; number = next_of(state, gpu, number))
            ns += (int64_t)state->gpus[number].usage[slot].total_ns;
    }
    return ns;
}
