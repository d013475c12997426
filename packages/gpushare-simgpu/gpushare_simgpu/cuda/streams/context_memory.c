#include "cuda/streams/context_memory.h"

#include <stdlib.h>

#include "common/clock.h"
#include "common/engines.h"
#include "common/frames.h"
#include "common/processes.h"

/* Names of pages that no region uses: regions count from 1 in the same bits and never reach this value. */
#define OF_CONTEXT (1ull << 63)

uint32_t context_memory_pages(void) {
    uint64_t page = driver.state->settings.page;
    return (uint32_t)((driver.state->settings.context_memory + page - 1) / page);
}

uint64_t context_memory_claim(struct context *context) {
    uint64_t evicted = 0, name = OF_CONTEXT | context->id << 32;
    for (uint32_t i = 0; i < context_memory_pages(); i++)
        evicted += frames_claim(driver.state, context->gpu, driver.slot, name | i, FRAME_PLAIN, &context->frames[i]) ==
                   CLAIM_EVICTED;
    return evicted;
}

CUresult context_memory_take(struct context *context) {
    struct state *state = driver.state;
    uint64_t end = 0;
    uint32_t pages = context_memory_pages();
    if (!pages) return CUDA_SUCCESS;
    context->frames = malloc(pages * sizeof *context->frames);
    REQUIRE(context->frames, CUDA_ERROR_OUT_OF_MEMORY);
    processes_reap(state, 1);
    gpu_lock(state, context->gpu);
    int fits = frames_fit(state, context->gpu, pages);
    if (fits) end = engine_evict(state, context->gpu, context_memory_claim(context));
    gpu_unlock(state, context->gpu);
    if (!fits) {
        free(context->frames);
        context->frames = NULL;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    clock_sleep_until(end);
    return CUDA_SUCCESS;
}

void context_memory_release(struct context *context) {
    if (!context->frames) return;
    uint64_t name = OF_CONTEXT | context->id << 32;
    gpu_lock(driver.state, context->gpu);
    for (uint32_t i = 0; i < context_memory_pages(); i++)
        if (frames_holds(driver.state, context->gpu, context->frames[i], driver.slot, name | i))
            frames_release(driver.state, context->gpu, context->frames[i]);
    gpu_unlock(driver.state, context->gpu);
}

void context_memory_drop(struct context *context) {
    context_memory_release(context);
    free(context->frames);
    context->frames = NULL;
}
