#include "contexts/contexts.h"

#include <stdlib.h>

pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
struct context *contexts;
_Atomic int contexts_known;
_Atomic uint32_t contexts_epoch = 1;

static struct leaving *leaving;

void context_leaving_begins(struct leaving *entry, CUcontext handle) {
    entry->handle = handle;
    entry->next = leaving;
    leaving = entry;
}

void context_leaving_ends(struct leaving *entry) {
    struct leaving **link = &leaving;
    while (*link && *link != entry) link = &(*link)->next;
    if (*link) *link = entry->next; /* else: a child that was forked meanwhile */
}

bool context_leaves(CUcontext handle) {
    for (const struct leaving *entry = leaving; entry; entry = entry->next)
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
    bool found = real.cuCtxGetDevice(&device) == CUDA_SUCCESS;
    if (switched) real.cuCtxPopCurrent_v2(&current);
    struct gpu *gpu = found ? gpu_of_device(device) : NULL;
    struct context *context = gpu ? calloc(1, sizeof *context) : NULL;
    if (!context) return NULL;
    context->handle = handle;
    context->gpu = gpu;
    context->next = contexts;
    contexts = context;
    atomic_fetch_add(&contexts_known, 1);
    atomic_fetch_add(&contexts_epoch, 1); /* default streams are no longer certain */
    return context;
}

void context_gone(CUcontext handle) {
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
        atomic_fetch_sub(&contexts_known, 1);
        break;
    }
    atomic_fetch_add(&contexts_epoch, 1);
}

void contexts_forget(void) {
    /* the driver's objects are the parent's; the few records are left behind */
    contexts = NULL;
    leaving = NULL;
    atomic_store(&contexts_known, 0);
    atomic_fetch_add(&contexts_epoch, 1);
    pthread_mutex_init(&contexts_lock, NULL);
}
