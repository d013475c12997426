#include "common/stats.h"

#include <string.h>

#include "common/processes.h"
#include "common/state.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT int simgpu_stats(int gpu, struct simgpu_stats *out, size_t size) {
    struct state *state = state_open();
    if (!state || gpu < 0 || gpu >= (int)state->settings.devices || !out) return -1;
    processes_reap(state, 1);
    gpu_lock(state, gpu);
    struct simgpu_stats stats = state->gpus[gpu].stats;
    stats.memory = state->settings.memory;
    stats.memory_free = state->gpus[gpu].free.count * state->settings.page;
    stats.memory_managed = state->gpus[gpu].managed.count * state->settings.page;
    gpu_unlock(state, gpu);
    memcpy(out, &stats, size < sizeof stats ? size : sizeof stats);
    return 0;
}

EXPORT int64_t simgpu_resident(int gpu, int32_t pid) {
    struct state *state = state_open();
    if (!state || gpu < 0 || gpu >= (int)state->settings.devices) return -1;
    processes_reap(state, 1);
    int64_t bytes = 0;
    for (uint32_t slot = 0; slot < MAX_PROCESSES; slot++)
        if (pid > 0 && state->processes[slot].pid && processes_pid(state, slot) == pid)
            bytes += (int64_t)(state->gpus[gpu].held[slot] * state->settings.page);
    return bytes;
}

EXPORT int64_t simgpu_gpu_time(int gpu, int32_t pid) {
    struct state *state = state_open();
    if (!state || gpu < 0 || gpu >= (int)state->settings.devices) return -1;
    int64_t ns = 0;
    for (uint32_t slot = 0; slot < MAX_PROCESSES; slot++)
        if (pid > 0 && processes_pid(state, slot) == pid) ns += (int64_t)state->gpus[gpu].usage[slot].total_ns;
    return ns;
}
