/* Allocations and regions, and the address space under them. */
#include "cuda/memory/memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/clock.h"
#include "common/engines.h"
#include "common/frames.h"
#include "common/mig.h"
#include "common/processes.h"
#include "cuda/memory/slots.h"
#include "cuda/memory/spans.h"

pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;

static struct spans allocations, regions;
static uint64_t last_allocation;
static uint32_t last_region;
static struct region *shared_regions; /* those with slots */

struct allocation *allocation_find(uint64_t address) {
    return (struct allocation *)spans_find(&allocations, address);
}

struct region *region_find(uint64_t address) {
    return (struct region *)spans_find(&regions, address);
}

uint64_t page_up(uint64_t size) {
    uint64_t page = driver.state->settings.page;
    return (size + page - 1) / page * page;
}

void *space_reserve(uint64_t size, int usable) {
    uint64_t page = driver.state->settings.page, length = page_up(size);
    if (length < size || length > (1ull << 46)) return NULL;
    int protection = usable ? PROT_READ | PROT_WRITE : PROT_NONE;
    char *memory = mmap(NULL, length + page, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    uint64_t start = page_up((uint64_t)(uintptr_t)memory), skipped = start - (uint64_t)(uintptr_t)memory;
    if (skipped) munmap(memory, skipped);
    if (page - skipped) munmap((void *)(uintptr_t)(start + length), page - skipped);
    return (void *)(uintptr_t)start;
}

void space_release(uint64_t base, uint64_t size) {
    munmap((void *)(uintptr_t)base, page_up(size));
}

struct region *region_add(uint64_t base, uint64_t size, enum memory_kind kind, int gpu) {
    struct region *region = calloc(1, sizeof *region);
    uint32_t count = (uint32_t)(size / driver.state->settings.page);
    struct page *pages = malloc((count ? count : 1) * sizeof *pages);
    if (!region || !pages) {
        free(region);
        free(pages);
        return NULL;
    }
    *region = (struct region){
        .span = {base, size}, .id = ++last_region, .kind = kind, .gpu = gpu, .count = count, .pages = pages};
    for (uint32_t i = 0; i < count; i++)
        pages[i] = (struct page){
            .frame = NO_FRAME, .gpu = -1, .preferred = CU_DEVICE_INVALID, .prefetched = CU_DEVICE_INVALID};
    if (spans_insert(&regions, &region->span)) {
        free(pages);
        free(region);
        return NULL;
    }
    return region;
}

void region_release(struct region *region) {
    for (int device = 0; device < driver.devices; device++) {
        int gpu = driver.gpu[device], locked = 0;
        for (uint32_t i = 0; i < region->count; i++) {
            struct page *page = &region->pages[i];
            if (page->gpu != gpu) continue;
            if (!locked) gpu_lock(driver.state, gpu);
            locked = 1;
            if (frames_holds(driver.state, gpu, page->frame, driver.slot, (uint64_t)region->id << 32 | i))
                frames_release(driver.state, gpu, page->frame);
            page->gpu = -1;
        }
        if (locked) gpu_unlock(driver.state, gpu);
    }
}

void region_drop(struct region *region) {
    region_release(region);
    spans_remove(&regions, &region->span);
    free(region->pages);
    free(region);
}

uint64_t region_claim(struct region *region) {
    uint64_t evicted = 0;
    for (uint32_t i = 0; i < region->count; i++) {
        uint64_t name = (uint64_t)region->id << 32 | i;
        evicted += frames_claim(driver.state, region->gpu, driver.slot, name, FRAME_PLAIN, &region->pages[i].frame) ==
                   CLAIM_EVICTED;
        region->pages[i].gpu = (int8_t)region->gpu;
    }
    return evicted;
}

CUresult region_commit(struct region *region) {
    struct state *state = driver.state;
    uint64_t end = 0;
    processes_reap(state, state->gpus[region->gpu].free.count < region->count);
    gpu_lock(state, region->gpu);
    int fits = frames_fit(state, region->gpu, region->count);
    if (fits) end = engine_evict(state, region->gpu, region_claim(region));
    gpu_unlock(state, region->gpu);
    REQUIRE(fits, CUDA_ERROR_OUT_OF_MEMORY);
    clock_sleep_until(end);
    return CUDA_SUCCESS;
}

void regions_visit(void (*visit)(struct region *, void *), void *data) {
    for (size_t i = 0; i < regions.count; i++) visit((struct region *)regions.items[i], data);
}

struct allocation *allocation_add(uint64_t base, uint64_t size, enum memory_kind kind, struct context *context) {
    struct allocation *allocation = calloc(1, sizeof *allocation);
    if (!allocation) return NULL;
    *allocation = (struct allocation){.span = {base, size},
                                      .requested = size,
                                      .id = ++last_allocation,
                                      .kind = kind,
                                      .context = context,
                                      .device = context ? context->device : 0};
    if (spans_insert(&allocations, &allocation->span)) {
        free(allocation);
        return NULL;
    }
    return allocation;
}

void allocation_drop(struct allocation *allocation) {
    spans_remove(&allocations, &allocation->span);
    free(allocation);
}

void allocations_visit(void (*visit)(struct allocation *, void *), void *data) {
    /* backwards, because a visitor may remove the current allocation */
    for (size_t i = allocations.count; i-- > 0;) visit((struct allocation *)allocations.items[i], data);
}

static struct region *make_region(enum memory_kind kind, int gpu, uint64_t size) {
    void *memory = space_reserve(size, 1);
    if (!memory) return NULL;
    struct region *region = region_add((uint64_t)(uintptr_t)memory, page_up(size), kind, gpu);
    if (!region) space_release((uint64_t)(uintptr_t)memory, size);
    return region;
}

static void unmake_region(struct region *region) {
    struct span span = region->span;
    if (region->slots) {
        struct region **at = &shared_regions;
        while (*at && *at != region) at = &(*at)->next;
        if (*at) *at = region->next;
        slots_drop(region->slots);
    }
    region_drop(region);
    space_release(span.base, span.size);
}

/* Create a separate region; *error is the reason if there is none. */
static struct region *fresh_region(enum memory_kind kind, int gpu, uint64_t size, CUresult *error) {
    struct region *region = make_region(kind, gpu, size);
    *error = CUDA_ERROR_OUT_OF_MEMORY;
    if (!region) return NULL;
    if (kind == KIND_PLAIN && (*error = region_commit(region)) != CUDA_SUCCESS) {
        unmake_region(region);
        return NULL;
    }
    return region;
}

static struct region *place_small(enum memory_kind kind, int gpu, uint64_t size, int64_t *offset, CUresult *error) {
    for (struct region *region = shared_regions; region; region = region->next)
        if (region->kind == kind && region->gpu == gpu && (*offset = slots_take(region->slots, size)) >= 0)
            return region;
    struct region *region = fresh_region(kind, gpu, driver.state->settings.page, error);
    if (!region) return NULL;
    region->slots = slots_make(region->span.size);
    if (!region->slots) {
        unmake_region(region);
        return NULL;
    }
    region->next = shared_regions;
    shared_regions = region;
    *offset = slots_take(region->slots, size);
    return region;
}

static void leave_region(struct allocation *allocation) {
    struct region *region = allocation->region;
    if (region->slots) {
        slots_give_back(region->slots, allocation->span.base - region->span.base, allocation->span.size);
        if (!slots_empty(region->slots)) return;
    }
    unmake_region(region);
}

CUresult memory_allocate(struct context *context, int device, enum memory_kind kind, uint64_t size, unsigned flags,
                         struct pool *pool, CUdeviceptr *address) {
    int gpu = driver.gpu[device], small = size <= driver.state->settings.page / 4;
    int64_t offset = 0;
    CUresult error = CUDA_ERROR_OUT_OF_MEMORY;
    REQUIRE(size > 0, CUDA_ERROR_INVALID_VALUE);
    /* plain memory larger than all of VRAM cannot fit */
    REQUIRE(kind != KIND_PLAIN || size <= mig_memory(driver.state, gpu), CUDA_ERROR_OUT_OF_MEMORY);
    pthread_mutex_lock(&memory_lock);
    struct region *region =
        small ? place_small(kind, gpu, size, &offset, &error) : fresh_region(kind, gpu, size, &error);
    if (region) {
        uint64_t length = region->slots ? (size + SLOT - 1) / SLOT * SLOT : region->span.size;
        struct allocation *allocation = allocation_add(region->span.base + (uint64_t)offset, length, kind, context);
        if (allocation) {
            allocation->requested = size;
            allocation->region = region;
            allocation->device = device;
            allocation->flags = flags;
            allocation->pool = pool;
            *address = allocation->span.base;
            error = CUDA_SUCCESS;
        } else if (!region->slots || slots_empty(region->slots)) {
            unmake_region(region);
        }
    }
    pthread_mutex_unlock(&memory_lock);
    return error;
}

CUresult memory_free(CUdeviceptr address) {
    CUresult error = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find(address);
    if (allocation && allocation->span.base == address && allocation->region && allocation->kind != KIND_MAPPED) {
        leave_region(allocation);
        allocation_drop(allocation);
        error = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&memory_lock);
    return error;
}

static void free_if_of(struct allocation *allocation, void *context) {
    if (allocation->context != context || allocation->kind == KIND_MAPPED) return;
    if (allocation->region)
        leave_region(allocation);
    else if (allocation->kind == KIND_HOST)
        space_release(allocation->span.base, allocation->span.size);
    allocation_drop(allocation);
}

void memory_free_context(struct context *context) {
    pthread_mutex_lock(&memory_lock);
    allocations_visit(free_if_of, context);
    pthread_mutex_unlock(&memory_lock);
}

int memory_accessible(uint64_t address, uint64_t size, int device, int writing) {
    int fine = 0;
    if (size == 0) return 1;
    pthread_mutex_lock(&memory_lock);
    /* a buffer that consists of several mappings is one range for the program */
    while (size) {
        struct allocation *allocation = allocation_find(address);
        if (!allocation || (allocation->kind == KIND_MAPPED && !(allocation->access & (writing ? 2 : 1)))) break;
        uint64_t rest = allocation->span.base + allocation->span.size - address;
        if (size <= rest) {
            fine = 1;
            break;
        }
        if (allocation->kind != KIND_MAPPED) break;
        address += rest;
        size -= rest;
    }
    pthread_mutex_unlock(&memory_lock);
    return fine;
}
