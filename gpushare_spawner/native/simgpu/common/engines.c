#include "engines.h"

#include "clock.h"

/* A simulation that falls behind (a loaded machine) catches up at most this much; without a limit it would later run
 * faster than the GPU for as long as it had been slower. */
#define CARRY_OVER (5 * NS_PER_MS)

uint64_t engine_take(struct engine *engine, uint64_t ready, uint64_t ns) {
    uint64_t earliest = clock_now() - CARRY_OVER;
    uint64_t start = engine->free_at > ready ? engine->free_at : ready;
    if (start < earliest) start = earliest;
    engine->free_at = start + ns;
    return engine->free_at;
}

void engine_count_busy(struct gpu *gpu, uint64_t from, uint64_t until) {
    while (from < until) {
        uint64_t bucket = from / BUSY_BUCKET_NS, end = (bucket + 1) * BUSY_BUCKET_NS;
        struct busy *busy = &gpu->busy[bucket % BUSY_BUCKETS];
        if (busy->bucket != bucket) *busy = (struct busy){.bucket = bucket};
        uint64_t stretch = (until < end ? until : end) - from;
        busy->ns += stretch;
        from += stretch;
    }
}

uint64_t engine_recent_busy(const struct gpu *gpu, uint64_t now) {
    uint64_t last = now / BUSY_BUCKET_NS, first = last - NS_PER_SECOND / BUSY_BUCKET_NS, sum = 0;
    for (int i = 0; i < BUSY_BUCKETS; i++)
        if (gpu->busy[i].bucket >= first && gpu->busy[i].bucket < last) sum += gpu->busy[i].ns;
    return sum;
}
