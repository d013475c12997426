#include "contexts/contexts.h"

#include <stdlib.h>
#include <time.h>

pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
struct context *contexts;
_Atomic int contexts_count;
_Atomic uint32_t contexts_epoch = 1;

static struct destruction *destructions;

void context_destruction_begins(struct destruction *entry, CUcontext handle) {
    entry->handle = handle;
    entry->next = destructions;
    destructions = entry;
}

void context_destruction_ends(struct destruction *entry) {
    struct destruction **link = &destructions;
    while (*link && *link != entry) link = &(*link)->next;
    if (*link) *link = entry->next; /* it is not in the list in a child forked in between */
}

bool context_in_destruction(CUcontext handle) {
    for (const struct destruction *entry = destructions; entry; entry = entry->next)
        if (entry->handle == handle) return true;
    return false;
}

struct context *context_entry(CUcontext handle) {
    for (struct context *context = contexts; context; context = context->next)
        if (context->handle == handle) return context;

    CUcontext current = NULL;
    CUdevice device;
    real.cuCtxGetCurrent(&current);
    bool switched = current != handle;
    if (switched && real.cuCtxPushCurrent_v2(handle) != CUDA_SUCCESS) return NULL;
    bool has_device = real.cuCtxGetDevice(&device) == CUDA_SUCCESS;
    if (switched) real.cuCtxPopCurrent_v2(&current);
    struct gpu *gpu = has_device ? gpu_of_device(device) : NULL;
    struct context *context = gpu ? calloc(1, sizeof *context) : NULL;
    if (!context) return NULL;
    context->handle = handle;
    context->gpu = gpu;
    context->next = contexts;
    contexts = context;
    atomic_fetch_add(&contexts_count, 1);
    atomic_fetch_add(&contexts_epoch, 1); /* a default stream may now belong to another context */
    return context;
}

void context_remove(CUcontext handle) {
    for (struct context **link = &contexts; *link; link = &(*link)->next) {
        struct context *context = *link;
        if (context->handle != handle) continue;
        while (context->orphans) {
            struct orphan *orphan = context->orphans;
            context->orphans = orphan->next;
            free(orphan);
        }
        *link = context->next;
        free(context);
        atomic_fetch_sub(&contexts_count, 1);
        break;
    }
    atomic_fetch_add(&contexts_epoch, 1);
}

static _Atomic bool stopped;

bool contexts_turn_begin(void) {
    if (atomic_load(&stopped) || driver_background_suspended()) return false;
    pthread_mutex_lock(&contexts_lock);
    if (!atomic_load(&stopped)) return true;
    pthread_mutex_unlock(&contexts_lock);
    return false;
}

void contexts_turn_end(void) {
    real.cuCtxSetCurrent(NULL);
    pthread_mutex_unlock(&contexts_lock);
}

void contexts_turns_stop(void) {
    atomic_store(&stopped, true);
    /* a driver that hangs must not delay the exit by more than half a second */
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 500000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    if (pthread_mutex_timedlock(&contexts_lock, &until) == 0) pthread_mutex_unlock(&contexts_lock);
}

void contexts_turns_allow(void) {
    atomic_store(&stopped, false);
}

RESET_IN_CHILD(contexts_reset);
void contexts_reset(void) {
    contexts = NULL;
    destructions = NULL;
    atomic_store(&contexts_count, 0);
    atomic_fetch_add(&contexts_epoch, 1);
    pthread_mutex_init(&contexts_lock, NULL);
    atomic_store(&stopped, false);
}
