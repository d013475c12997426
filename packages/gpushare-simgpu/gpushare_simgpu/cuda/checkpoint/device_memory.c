#include "cuda/checkpoint/device_memory.h"

#include <sys/mman.h>

#include "common/clock.h"
#include "common/engines.h"
#include "common/frames.h"
#include "common/processes.h"
#include "cuda/memory/memory.h"
#include "cuda/streams/context_memory.h"

/* The approximate duration of one piece of a copy, short enough that other processes' copies can run in between. */
#define PIECE_NS (2 * NS_PER_MS)

/* The contexts that have left; none is created or destroyed until they return. */
static struct context *away[MAX_CONTEXTS];
static int away_count;

static void look_managed(struct allocation *allocation, void *found) {
    if (allocation->kind == KIND_MANAGED) *(int *)found = 1;
}

int device_memory_has_managed(void) {
    int found = 0;
    pthread_mutex_lock(&memory_lock);
    allocations_visit(look_managed, &found);
    pthread_mutex_unlock(&memory_lock);
    return found;
}

/* The process's memory on one GPU, without its contexts. */
struct share {
    int gpu;
    uint64_t pages;
    uint64_t evicted; /* other processes' pages that were evicted for it */
};

static void count_region(struct region *region, void *data) {
    struct share *share = data;
    if (region->gpu == share->gpu) share->pages += region->count;
}

static void release_region(struct region *region, void *data) {
    if (region->gpu == ((struct share *)data)->gpu) region_release(region);
}

static void claim_region(struct region *region, void *data) {
    struct share *share = data;
    if (region->gpu == share->gpu) share->evicted += region_claim(region);
}

static struct share share_of(int gpu) {
    struct share share = {gpu, 0, 0};
    pthread_mutex_lock(&memory_lock);
    regions_visit(count_region, &share);
    pthread_mutex_unlock(&memory_lock);
    return share;
}

/* Make an allocation's addresses accessible as the program has requested, or inaccessible: a host access to device
 * memory, which works here by chance, ends the program while its memory is not on the device. */
static void protect(struct allocation *allocation, void *data) {
    int open = *(int *)data, allowed = PROT_READ | PROT_WRITE;
    const struct span *span = &allocation->span;
    if (allocation->kind != KIND_MAPPED && allocation->kind != KIND_PLAIN) return;
    if (allocation->kind == KIND_MAPPED)
        allowed = (allocation->access & 1 ? PROT_READ : 0) | (allocation->access & 2 ? PROT_WRITE : 0);
    else
        span = &allocation->region->span; /* small allocations share a span */
    mprotect((void *)(uintptr_t)span->base, span->size, open ? allowed : PROT_NONE);
}

static void protect_all(int open) {
    pthread_mutex_lock(&memory_lock);
    allocations_visit(protect, &open);
    pthread_mutex_unlock(&memory_lock);
}

/* Reserve a copy engine of the GPU for `bytes`, piece by piece; returns at the end of the last piece. A checkpoint may
 * be slower than the bus; then the engine is free for other processes in between. */
static void copy(int number, uint64_t bytes, int out) {
    struct state *state = driver.state;
    struct gpu *gpu = &state->gpus[number];
    const struct settings *settings = &state->settings;
    uint64_t bandwidth = out ? settings->d2h : settings->h2d,
             own = out ? settings->checkpoint_d2h : settings->checkpoint_h2d, ready = clock_now();
    uint64_t piece = (uint64_t)((double)bandwidth * PIECE_NS / NS_PER_SECOND) + 1;
    while (bytes) {
        uint64_t size = bytes < piece ? bytes : piece, earliest = ready + clock_transfer_ns(size, own);
        gpu_lock(state, number);
        ready = engine_take(out ? &gpu->d2h : &gpu->h2d, ready, clock_transfer_ns(size, bandwidth));
        *(out ? &gpu->stats.checkpointed : &gpu->stats.restored) += size;
        gpu_unlock(state, number);
        if (ready < earliest) ready = earliest;
        clock_sleep_until(ready);
        bytes -= size;
    }
}

static int contexts_on(int gpu) {
    int count = 0;
    for (int i = 0; i < away_count; i++) count += away[i]->gpu == gpu;
    return count;
}

static void show(int gpu, int contexts) {
    gpu_lock(driver.state, gpu);
    driver.state->gpus[gpu].contexts[driver.slot] = (uint32_t)contexts;
    gpu_unlock(driver.state, gpu);
}

/* Release the process's memory on a GPU. */
static void release(int gpu) {
    struct share share = {gpu, 0, 0};
    pthread_mutex_lock(&memory_lock);
    regions_visit(release_region, &share);
    pthread_mutex_unlock(&memory_lock);
    for (int i = 0; i < away_count; i++)
        if (away[i]->gpu == gpu) context_memory_release(away[i]);
    show(gpu, 0);
}

static void collect(struct context *context, void *unused) {
    away[away_count++] = context;
}

void device_memory_leave(void) {
    away_count = 0;
    contexts_visit(collect, NULL);
    for (int device = 0; device < driver.devices; device++) {
        copy(driver.gpu[device], share_of(driver.gpu[device]).pages * driver.state->settings.page, 1);
        release(driver.gpu[device]);
    }
    protect_all(0);
}

/* Take all frames on one GPU, or none. Returns whether they were taken. */
static int claim(int gpu) {
    struct state *state = driver.state;
    uint64_t end = 0;
    struct share share = share_of(gpu);
    processes_reap(state, 1);
    pthread_mutex_lock(&memory_lock);
    gpu_lock(state, gpu);
    int fits = frames_fit(state, gpu, share.pages + (uint64_t)contexts_on(gpu) * context_memory_pages());
    if (fits) {
        regions_visit(claim_region, &share);
        for (int i = 0; i < away_count; i++)
            if (away[i]->gpu == gpu && away[i]->frames) share.evicted += context_memory_claim(away[i]);
        end = engine_evict(state, gpu, share.evicted);
    }
    gpu_unlock(state, gpu);
    pthread_mutex_unlock(&memory_lock);
    if (fits) show(gpu, contexts_on(gpu));
    clock_sleep_until(end);
    return fits;
}

CUresult device_memory_return(void) {
    for (int device = 0; device < driver.devices; device++) {
        if (claim(driver.gpu[device])) continue;
        while (device-- > 0) release(driver.gpu[device]);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    clock_sleep_until(clock_now() + driver.state->settings.restore_ns);
    for (int device = 0; device < driver.devices; device++)
        copy(driver.gpu[device], share_of(driver.gpu[device]).pages * driver.state->settings.page, 0);
    protect_all(1);
    return CUDA_SUCCESS;
}
