#include "lease/unseen.h"

#include <string.h>

#include "gate/launch.h"
#include "lease/marks.h"

#define STEP MILLISECOND
/* A mark without work before it has passed after this time, even where other processes use the GPU and all cores. */
#define MARK_PASSES (50 * MILLISECOND)

static struct unseen {
    bool maybe;
    bool marked;
    uint64_t marked_at;
} unseen[MAX_GPUS];

void unseen_begin(struct gpu *gpu) {
    unseen[gpu->index] = (struct unseen){.maybe = true};
}

bool unseen_found(struct gpu *gpu, uint64_t now, uint64_t *next) {
    struct unseen *work = &unseen[gpu->index];
    if (!work->maybe) return false;
    *next = now + STEP;
    if (!work->marked) {
        if (launch_inside(gpu) || !marks_record(gpu)) return false;
        work->marked = true;
        work->marked_at = now;
    }
    bool over = marks_passed(gpu);
    if (!over && now - work->marked_at < MARK_PASSES) return false;
    work->maybe = false;
    *next = UINT64_MAX;
    return !over;
}

void unseen_forget(void) {
    memset(unseen, 0, sizeof unseen);
}
