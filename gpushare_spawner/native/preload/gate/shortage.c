#define _GNU_SOURCE
#include "gate/shortage.h"

#include "contexts/captures.h"
#include "gate/launch.h"
#include "memory/account.h"
#include "platform/wake.h"

#define MOST_TRIES 3
/* The request for a call whose need is unknown, such as the creation of a context, module or graph. A real driver's
   context takes 250 to 600 MiB. */
#define UNKNOWN_BYTES (512ull << 20)

_Atomic bool shortage_answered;

/* Return the bytes that the call needs; 0: it does not lack device memory. */
static uint64_t missing(const struct passage *passage) {
    if (passage->counted) return passage->counted != LANES_REFUSED ? passage->counted : 0;
    size_t available = 0, total = 0;
    /* without a context, there is no memory for the context itself */
    bool answered = real.cuMemGetInfo_v2(&available, &total) == CUDA_SUCCESS;
    return answered && available >= UNKNOWN_BYTES ? 0 : UNKNOWN_BYTES;
}

bool shortage_waited(struct passage *passage, unsigned tries) {
    if (!passage || tries + 1 >= MOST_TRIES || !atomic_load(&shortage_answered) || captures_in_progress()) return false;
    uint64_t bytes = missing(passage);
    struct gpu *gpu = launch_gpu_to_ask_for();
    uint64_t used = account_used(gpu);
    if (!bytes || !atomic_load(&gpu->shared) || !launch_step_outside(passage)) return false;
    uint32_t seen = atomic_load(&gpu->grants), refusals = atomic_load(&gpu->refusals);
    if (!passage->short_of) { /* at a later attempt the call is already counted */
        if (atomic_fetch_add(&gpu->short_of, bytes) == 0) atomic_store(&gpu->short_above, used);
        passage->short_of = gpu;
        passage->short_bytes = bytes;
    }
    atomic_fetch_add(&gpu->shortages, 1);
    account_changed(gpu); /* the last REQUEST may not include this need */
    enum gate_wait_end end;
    bool refused;
    do {
        end = gate_wait(&gpu->grants, seen, gpu, passage);
        seen = atomic_load(&gpu->grants);
        refused = atomic_load(&gpu->refusals) != refusals;
    } while (end == GATE_WAIT_OVER && !refused && driver_threads_suspended());
    if (end == GATE_WAIT_OVER && !refused) {
        launch_step_inside(passage);
        return true;
    }
    launch_step_back(passage);
    return false;
}

void shortage_ended(struct passage *passage) {
    struct gpu *gpu = passage ? passage->short_of : NULL;
    if (!gpu) return;
    passage->short_of = NULL;
    atomic_fetch_sub(&gpu->short_of, passage->short_bytes);
    passage->short_bytes = 0;
    /* the last MEMORY included this need, so send the account without it */
    atomic_store(&gpu->restate, true);
    account_changed(gpu);
}

void shortage_refused(struct gpu *gpu) {
    atomic_fetch_add(&gpu->refusals, 1);
    shortage_over(gpu);
}

void shortage_over(struct gpu *gpu) {
    atomic_fetch_add(&gpu->grants, 1);
    futex_wake(&gpu->grants);
}

RESET_IN_CHILD(shortage_reset);
void shortage_reset(void) {
    atomic_store(&shortage_answered, false);
}
