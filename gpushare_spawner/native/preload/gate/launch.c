#define _GNU_SOURCE
#include "gate/launch.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "contexts/captures.h"
#include "platform/wake.h"

static struct passage *_Atomic passages;
static struct gpu nowhere; /* never open; the GPU of a thread's lane before its first launch */
static struct lane no_lane = {.gpu = &nowhere};
static pthread_key_t thread_end;

static void thread_ended(void *value) {
    struct passage *passage = value;
    lanes_passage = NULL;
    atomic_store_explicit(&passage->depth, 0, memory_order_relaxed);
    atomic_store_explicit(&passage->used, false, memory_order_release);
}

void launch_prepare(void) {
    static bool keyed;
    if (!keyed) keyed = pthread_key_create(&thread_end, thread_ended) == 0;
}

static __attribute__((noinline, cold)) struct passage *passage_of_new_thread(void) {
    struct passage *passage;
    for (passage = atomic_load(&passages); passage; passage = passage->next) {
        bool free = false;
        if (atomic_compare_exchange_strong(&passage->used, &free, true)) break;
    }
    if (!passage) {
        void *memory;
        if (posix_memalign(&memory, _Alignof(struct passage), sizeof *passage)) return NULL;
        passage = memory;
        __builtin_memset(passage, 0, sizeof *passage);
        passage->used = true;
        passage->lane = &no_lane;
        passage->next = atomic_load(&passages);
        while (!atomic_compare_exchange_weak(&passages, &passage->next, passage)) {
        }
    }
    passage->epoch = 0; /* the lanes in it are another thread's */
    passage->paced = NULL;
    pthread_setspecific(thread_end, passage);
    return lanes_passage = passage;
}

/* Return the record of the calling thread, created if necessary; NULL: no memory, or no background thread. */
static struct passage *own_passage(void) {
    struct passage *passage = lanes_passage;
    if (likely(passage)) return passage;
    int kept = errno;
    passage = wake_listens() ? passage_of_new_thread() : NULL;
    errno = kept;
    return passage;
}

/* Whether the driver makes this call within another call of this thread that has passed the gate. Counts the call if
   so. */
static bool goes_deeper(struct passage *passage) {
    uint32_t depth = atomic_load_explicit(&passage->depth, memory_order_relaxed);
    if (likely(!depth)) return false;
    atomic_store_explicit(&passage->depth, depth + 1, memory_order_relaxed);
    return true;
}

struct passage *launch_enter_slowly(CUstream stream) {
    struct passage *passage = own_passage();
    if (unlikely(!passage) || goes_deeper(passage)) return passage;
    return launch_pass_slowly(passage, NULL, stream);
}

/* Mark the thread as outside while it waits, so that other threads do not wait for it. */
static void stand_aside(struct passage *passage) {
    atomic_store_explicit(&passage->depth, 0, memory_order_release);
}

struct gpu *launch_gpu_to_ask_for(void) {
    struct gpu *gpu = NULL;
    CUcontext current = NULL;
    if (gpu_count > 1 && real.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current) {
        pthread_mutex_lock(&contexts_lock);
        for (const struct context *context = contexts; context && !gpu; context = context->next)
            if (context->handle == current && atomic_load(&context->gpu->shared)) gpu = context->gpu;
        pthread_mutex_unlock(&contexts_lock);
    }
    for (int i = 0; i < gpu_count && !gpu; i++)
        if (atomic_load(&gpus[i].shared)) gpu = &gpus[i];
    return gpu ? gpu : &gpus[0];
}

void launch_step_inside(struct passage *passage) {
    launch_mark_inside(passage, &no_lane);
    while (driver_threads_suspended()) {
        stand_aside(passage);
        enum gate_wait_end end = gate_wait(&driver_suspension, SUSPENSION_ACTIVE, launch_gpu_to_ask_for(), passage);
        launch_mark_inside(passage, &no_lane);
        if (end == GATE_WAIT_UNANSWERED) return;
    }
}

void launch_step_back(struct passage *passage) {
    launch_mark_inside(passage, &no_lane);
}

bool launch_step_outside(struct passage *passage) {
    if (atomic_load_explicit(&passage->depth, memory_order_relaxed) != 1) return false;
    stand_aside(passage);
    return true;
}

struct passage *launch_enter_call(void) {
    struct passage *passage = own_passage();
    if (unlikely(!passage) || goes_deeper(passage)) return passage;
    launch_step_inside(passage);
    passage->counted = 0;
    return passage;
}

/* Whether the launch is recorded instead of executed. Queries the driver once per lane and captures_version. */
static bool is_recorded(struct lane *lane, CUstream stream) {
    uint32_t version = atomic_load(&captures_version);
    if (atomic_load_explicit(&lane->uncaptured, memory_order_relaxed) == version) return false;
    if (capture_records(stream)) return true;
    atomic_store_explicit(&lane->uncaptured, version, memory_order_relaxed);
    return false;
}

struct passage *launch_pass_slowly(struct passage *passage, struct lane *lane, CUstream stream) {
    for (;; lane = NULL) {
        bool capturing = captures_in_progress();
        if (!lane || capturing) {
            launch_step_inside(passage); /* the process must not be suspended during the following driver calls */
            if (!lane) lane = lane_of(passage, stream);
            /* no current context, a GPU that is not arbitrated, or a call that is only recorded */
            if (!lane || (capturing && is_recorded(lane, stream))) return passage;
        }
        launch_mark_inside(passage, lane);
        struct gpu *gpu = atomic_load_explicit(&lane->gpu, memory_order_relaxed);
        uint32_t state = atomic_load_explicit(&gpu->gate_state, memory_order_relaxed);
        if (likely(state != GATE_SHUT)) {
            if (unlikely(state == GATE_RESTING)) gate_stir(gpu);
            bool through = passage->let_through && gate_lets_through(passage);
            if (likely(pace_admits(passage, lane, through))) {
                launch_count(passage, lane);
                return passage;
            }
            launch_mark_inside(passage, &no_lane); /* pace_wait calls the driver, and must be seen inside */
            if (pace_wait(gpu, lane)) gate_interrupted(passage);
            continue;
        }
        if (!gate_lets_through(passage)) {
            stand_aside(passage);
            if (gate_wait(&gpu->gate_state, GATE_SHUT, gpu, passage) != GATE_WAIT_UNANSWERED) continue;
            launch_mark_inside(passage, lane);
        }
        launch_count(passage, lane);
        return passage;
    }
}

bool launch_inside(const struct gpu *gpu) {
    for (struct passage *passage = atomic_load(&passages); passage; passage = passage->next) {
        if (!atomic_load_explicit(&passage->depth, memory_order_acquire)) continue;
        if (!gpu) return true;
        struct lane *lane = atomic_load(&passage->lane);
        if (lane->gpu == gpu) return true;
    }
    return false;
}

uint64_t launches_on(const struct gpu *gpu) {
    uint64_t sum = 0;
    for (struct passage *passage = atomic_load(&passages); passage; passage = passage->next)
        sum += atomic_load_explicit(&passage->launches[gpu->index], memory_order_relaxed);
    return sum;
}

RESET_IN_CHILD(launch_reset);
void launch_reset(void) {
    atomic_store(&passages, NULL);
}
