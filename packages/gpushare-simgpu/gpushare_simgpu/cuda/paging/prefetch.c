/* Bulk migration: cuMemPrefetchAsync. Pages move in chunks, and the eviction for one chunk runs while the previous
 * chunk is transferred, so that both directions of the bus are used. */
#include "common/clock.h"
#include "common/engines.h"
#include "common/frames.h"
#include "common/processes.h"
#include "cuda/streams/execute.h"
#include "cuda/paging/residency.h"

/* The approximate duration of a chunk: short enough that other transfers run in between, long enough that a sleep is
 * exact. */
#define CHUNK_NS (2 * NS_PER_MS)

static uint64_t chunk_pages(uint64_t bandwidth) {
    uint64_t pages = (uint64_t)((double)bandwidth * CHUNK_NS / NS_PER_SECOND / (double)driver.state->settings.page);
    return pages ? pages : 1;
}

static uint64_t to_device(uint64_t address, uint64_t size, int number, int device, uint64_t ready) {
    struct state *state = driver.state;
    struct gpu *gpu = &state->gpus[number];
    uint64_t page = state->settings.page, at = address / page * page, end = address + size;
    uint64_t chunk = chunk_pages(state->settings.h2d) * page, evict_from = ready;
    processes_reap(state, 0);
    while (at < end) {
        struct moved moved = {0};
        uint64_t room_at = evict_from;
        pthread_mutex_lock(&memory_lock);
        gpu_lock(state, number);
        while (at < end && moved.in < chunk && moved.evicted < chunk) {
            residency_bring(at < address ? address : at, number, 1, &moved);
            struct region *region = region_find(at < address ? address : at);
            if (region && region->kind == KIND_MANAGED)
                region->pages[(at - region->span.base) / page].prefetched = (int8_t)device;
            at += page;
        }
        if (moved.evicted)
            room_at = engine_take(&gpu->d2h, evict_from, clock_transfer_ns(moved.evicted, state->settings.d2h));
        uint64_t ns = clock_transfer_ns(moved.in, state->settings.h2d);
        if (moved.in)
            ready = engine_take(&gpu->h2d, room_at > ready ? room_at : ready, ns);
        else if (room_at > ready)
            ready = room_at;
        evict_from = ready - ns;
        gpu->stats.prefetched_in += moved.in;
        gpu->stats.prefetch_evicted += moved.evicted;
        gpu->stats.first_touched += moved.first_touched;
        gpu_unlock(state, number);
        pthread_mutex_unlock(&memory_lock);
        clock_sleep_until(ready);
    }
    return ready;
}

static uint64_t to_host(uint64_t address, uint64_t size, uint64_t ready) {
    struct state *state = driver.state;
    uint64_t page = state->settings.page, at = address / page * page, end = address + size;
    uint64_t chunk = chunk_pages(state->settings.d2h) * page;
    while (at < end) {
        uint64_t moved = 0;
        int from = -1;
        pthread_mutex_lock(&memory_lock);
        while (at < end && moved < chunk) {
            struct region *region = region_find(at < address ? address : at);
            if (region && region->kind == KIND_MANAGED) {
                uint32_t index = (uint32_t)((at - region->span.base) / page);
                int gpu = region->pages[index].gpu;
                if (from >= 0 && gpu >= 0 && gpu != from) break; /* the rest uses another GPU's engine */
                if (residency_send_home(region, index)) {
                    from = gpu;
                    moved += page;
                }
                region->pages[index].prefetched = CU_DEVICE_CPU;
            }
            at += page;
        }
        pthread_mutex_unlock(&memory_lock);
        if (!moved) continue;
        gpu_lock(state, from);
        ready = engine_take(&state->gpus[from].d2h, ready, clock_transfer_ns(moved, state->settings.d2h));
        state->gpus[from].stats.prefetched_out += moved;
        gpu_unlock(state, from);
        clock_sleep_until(ready);
    }
    return ready;
}

uint64_t execute_prefetch(struct stream *stream, uint64_t address, uint64_t size, int device, uint64_t ready) {
    if (device == CU_DEVICE_CPU) return to_host(address, size, ready);
    return to_device(address, size, driver.gpu[device], device, ready);
}
