#include "common/engines.h"

#include "common/clock.h"

/* The maximum time that a simulation catches up after it has fallen behind on a loaded machine; without a limit it
 * would later run faster than the GPU for as long as it had been slower. */
#define CARRY_OVER (5 * NS_PER_MS)

uint64_t engine_take(struct engine *engine, uint64_t ready, uint64_t ns) {
    uint64_t earliest = clock_now() - CARRY_OVER;
    uint64_t start = engine->free_at > ready ? engine->free_at : ready;
    if (start < earliest) start = earliest;
    engine->free_at = start + ns;
    return engine->free_at;
}

uint64_t engine_evict(struct state *state, int gpu, uint64_t pages) {
    uint64_t bytes = pages * state->settings.page;
    if (!bytes) return 0;
    state->gpus[gpu].stats.plain_evicted += bytes;
    return engine_take(&state->gpus[gpu].d2h, clock_now(), clock_transfer_ns(bytes, state->settings.d2h));
}

static void count(struct busy *ring, uint64_t length, uint64_t bucket_ns, uint64_t from, uint64_t until) {
    while (from < until) {
        uint64_t bucket = from / bucket_ns, end = (bucket + 1) * bucket_ns;
        struct busy *busy = &ring[bucket % length];
        if (busy->bucket != bucket) *busy = (struct busy){.bucket = bucket};
        uint64_t stretch = (until < end ? until : end) - from;
        busy->ns += stretch;
        from += stretch;
    }
}

void engine_count_busy(struct gpu *gpu, uint32_t slot, uint64_t from, uint64_t until) {
    count(gpu->busy, BUSY_BUCKETS, BUSY_BUCKET_NS, from, until);
    count(gpu->usage[slot].periods, USAGE_PERIODS, USAGE_PERIOD_NS, from, until);
    gpu->usage[slot].total_ns += until - from;
}

uint64_t engine_recent_busy(const struct gpu *gpu, uint64_t now) {
    uint64_t last = now / BUSY_BUCKET_NS, first = last - NS_PER_SECOND / BUSY_BUCKET_NS, sum = 0;
    for (int i = 0; i < BUSY_BUCKETS; i++)
        if (gpu->busy[i].bucket >= first && gpu->busy[i].bucket < last) sum += gpu->busy[i].ns;
    return sum;
}

uint64_t engine_periods(uint64_t now, uint64_t *first) {
    /* the engine may still count time that is CARRY_OVER in the past */
    uint64_t end = (now - CARRY_OVER) / USAGE_PERIOD_NS;
    *first = end > USAGE_PERIODS - 1 ? end - (USAGE_PERIODS - 1) : 0;
    return end;
}

uint64_t engine_usage(const struct gpu *gpu, uint32_t slot, uint64_t first, uint64_t end, uint64_t *last) {
    uint64_t sum = 0;
    *last = 0;
    for (int i = 0; i < USAGE_PERIODS; i++) {
        const struct busy *period = &gpu->usage[slot].periods[i];
        if (period->bucket < first || period->bucket >= end || period->ns == 0) continue;
        sum += period->ns;
        if (period->bucket > *last) *last = period->bucket;
    }
    return sum;
}
