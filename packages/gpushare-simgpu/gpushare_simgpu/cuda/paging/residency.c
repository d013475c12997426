#include "cuda/paging/residency.h"

#include <sys/mman.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/engines.h"
#include "common/frames.h"
#include "common/processes.h"

/* Whether a host access has written to a page that was never on a GPU, so that there is content to move. The simulator
 * does not trap host accesses; the kernel's information on committed memory is equivalent. */
static int touched_by_host(uint64_t base, uint64_t size) {
    enum { STEP = 2 << 20, SMALLEST_HOST_PAGE = 4096 };
    unsigned char present[STEP / SMALLEST_HOST_PAGE];
    uint64_t host_page = (uint64_t)sysconf(_SC_PAGESIZE);
    for (uint64_t offset = 0; offset < size; offset += STEP) {
        uint64_t length = size - offset < STEP ? size - offset : STEP;
        if (mincore((void *)(uintptr_t)(base + offset), length, present)) return 1;
        for (uint64_t i = 0; i < (length + host_page - 1) / host_page; i++)
            if (present[i] & 1) return 1;
    }
    return 0;
}

static void leave_other_gpu(struct page *page, uint64_t name, int here) {
    int there = page->gpu;
    gpu_unlock(driver.state, here);
    gpu_lock(driver.state, there);
    if (frames_holds(driver.state, there, page->frame, driver.slot, name))
        frames_release(driver.state, there, page->frame);
    gpu_unlock(driver.state, there);
    gpu_lock(driver.state, here);
    page->gpu = -1;
}

void residency_bring(uint64_t address, int gpu, int prefetch, struct moved *moved) {
    struct state *state = driver.state;
    struct region *region = region_find(address);
    if (!region) return;
    uint64_t size = state->settings.page;
    uint32_t index = (uint32_t)((address - region->span.base) / size);
    uint64_t name = (uint64_t)region->id << 32 | index;
    struct page *page = &region->pages[index];
    if (region->kind != KIND_MANAGED) return; /* plain memory is resident, or on a peer that is read over the bus */
    if (page->gpu == gpu && frames_holds(state, gpu, page->frame, driver.slot, name)) {
        if (prefetch) frames_use(state, gpu, page->frame);
        return;
    }
    if (page->gpu >= 0 && page->gpu != gpu) leave_other_gpu(page, name, gpu);
    if (!page->populated)
        page->populated = touched_by_host(region->span.base + index * size, size) ? 1 : 2; /* 2: created by this
                                                                                            * access */
    switch (frames_claim(state, gpu, driver.slot, name, FRAME_MANAGED, &page->frame)) {
    case CLAIM_NONE:
        moved->remote += size;
        page->gpu = -1;
        page->populated = 1;
        return;
    case CLAIM_EVICTED: moved->evicted += size; break;
    case CLAIM_FREE: break;
    }
    if (page->populated == 2)
        moved->first_touched += size;
    else
        moved->in += size;
    page->populated = 1;
    page->gpu = (int8_t)gpu;
}

int residency_send_home(struct region *region, uint32_t index) {
    struct page *page = &region->pages[index];
    int gpu = page->gpu, was_there = 0;
    if (gpu < 0) return 0;
    gpu_lock(driver.state, gpu);
    if (frames_holds(driver.state, gpu, page->frame, driver.slot, (uint64_t)region->id << 32 | index)) {
        frames_release(driver.state, gpu, page->frame);
        was_there = page->populated;
    }
    gpu_unlock(driver.state, gpu);
    page->gpu = -1;
    return was_there;
}

uint64_t residency_fault_ns(const struct moved *moved) {
    const struct settings *settings = &driver.state->settings;
    return clock_transfer_ns(moved->in + moved->remote, settings->fault) +
           clock_transfer_ns(moved->evicted, settings->fault_evict);
}

uint64_t residency_fault_range(uint64_t address, uint64_t size, int number, uint64_t ready) {
    struct state *state = driver.state;
    struct gpu *gpu = &state->gpus[number];
    uint64_t page = state->settings.page, at = address / page * page, end = address + size;
    processes_reap(state, 0);
    while (at < end) {
        struct moved moved = {0};
        pthread_mutex_lock(&memory_lock);
        gpu_lock(state, number);
        while (at < end && moved.in + moved.evicted + moved.remote < 4 * page) {
            residency_bring(at < address ? address : at, number, 0, &moved);
            at += page;
        }
        uint64_t ns = residency_fault_ns(&moved);
        if (ns) ready = engine_take(&gpu->h2d, ready, ns);
        gpu->stats.faulted_in += moved.in;
        gpu->stats.fault_evicted += moved.evicted;
        gpu->stats.first_touched += moved.first_touched;
        gpu->stats.remote += moved.remote;
        gpu_unlock(state, number);
        pthread_mutex_unlock(&memory_lock);
        if (ns) clock_sleep_until(ready);
    }
    return ready;
}
