#include "lease/pager.h"

#include <stdlib.h>
#include <string.h>

#include "contexts/contexts.h"
#include "memory/allocations.h"

/* A part is the range of one driver call; a window is a range in progress. Two windows of this size keep a link of 200
   GB/s busy between two steps that are a millisecond apart; on PCIe a move can be cut short within about 10 ms. */
#define PART    (32ull << 20)
#define WINDOW  (128ull << 20)
#define WINDOWS 2

struct window {
    CUevent event;
    CUcontext context;
};

static struct move {
    bool active, cut, ended, to_device;
    bool again; /* to the host, second walk: parts that the table has on the host may be on the GPU since */
    uint64_t number, target, begun, walk, since;
    struct window windows[WINDOWS];
    int under_way;
    uint64_t in_window; /* bytes begun since the last window */
    struct context *context;
    struct gpu *gpu;
} moves[MAX_GPUS];

static uint64_t walks;

/* Parts that are on the host. A prefetch allocates pages for memory that never had any ("populated on the destination",
   according to CUDA's manual), so only these parts are prefetched: memory that a program reserved but never used
   remains without pages. Only for the background thread. */
static struct paged_out {
    uint64_t number; /* the allocation's number, because a later allocation may have the same address; 0: the slot is
                        free */
    uint64_t move;   /* the number of the move */
    CUdeviceptr at;
    size_t bytes;
} *paged_out;
static size_t paged_out_slots, paged_out_count; /* paged_out_slots is a power of two */

static size_t paged_out_slot(const struct paged_out *table, size_t slots, CUdeviceptr at) {
    size_t slot = (size_t)((at >> 16) * 0x9E3779B97F4A7C15ull >> 32) & (slots - 1);
    while (table[slot].number && table[slot].at != at) slot = (slot + 1) & (slots - 1);
    return slot;
}

static void paged_out_add(CUdeviceptr at, size_t bytes, uint64_t number, uint64_t move) {
    if (paged_out_count * 2 >= paged_out_slots) {
        size_t slots = paged_out_slots ? paged_out_slots * 2 : 256;
        struct paged_out *larger = calloc(slots, sizeof *larger);
        if (!larger) return; /* page faults then bring the part back */
        paged_out_count = 0;
        for (size_t i = 0; i < paged_out_slots; i++) {
            if (!paged_out[i].number || !paged_out[i].bytes) continue; /* the part is on the GPU again */
            larger[paged_out_slot(larger, slots, paged_out[i].at)] = paged_out[i];
            paged_out_count++;
        }
        free(paged_out);
        paged_out = larger;
        paged_out_slots = slots;
    }
    size_t slot = paged_out_slot(paged_out, paged_out_slots, at);
    paged_out_count += !paged_out[slot].number;
    paged_out[slot] = (struct paged_out){number, move, at, bytes};
}

static struct paged_out *paged_out_find(CUdeviceptr at, uint64_t number) {
    if (!paged_out_count) return NULL;
    struct paged_out *part = &paged_out[paged_out_slot(paged_out, paged_out_slots, at)];
    return part->number == number && part->bytes ? part : NULL;
}

/* Remove all parts: the program's memory is on the GPU, and the parts belong to freed memory. */
static void paged_out_clear(void) {
    free(paged_out);
    paged_out = NULL;
    paged_out_slots = paged_out_count = 0;
}

void pager_start(struct gpu *gpu, bool to_device, uint64_t bytes) {
    struct move *move = &moves[gpu->index];
    move->active = true;
    move->cut = move->ended = move->again = false;
    move->to_device = to_device;
    move->target = bytes;
    move->begun = 0;
    move->number = move->walk = ++walks;
    move->since = clock_now();
    move->gpu = gpu;
}

void pager_extend(struct gpu *gpu, uint64_t bytes) {
    struct move *move = &moves[gpu->index];
    move->cut = move->ended = false;
    move->target += bytes;
    move->walk = ++walks;
}

void pager_cut(struct gpu *gpu) {
    moves[gpu->index].cut = true;
}

static CUresult prefetch(const struct move *move, CUdeviceptr at, size_t bytes) {
    CUdevice to = move->to_device ? move->gpu->device : CU_DEVICE_CPU;
    if (driver_has(cuMemPrefetchAsync)) return real.cuMemPrefetchAsync(at, bytes, to, move->context->moving);
    CUmemLocation location = {move->to_device ? CU_MEM_LOCATION_TYPE_DEVICE : 2 /* host */, move->to_device ? to : 0};
    return real.cuMemPrefetchAsync_v2(at, bytes, location, 0, move->context->moving);
}

/* Make the memory's context current to this thread, with a stream for moves. NULL: the context is being destroyed. */
static struct context *enter_context(CUcontext handle) {
    for (struct context *context = contexts; context; context = context->next) {
        if (context->handle != handle) continue;
        if (context_in_destruction(handle)) return NULL;
        if (real.cuCtxSetCurrent(handle) != CUDA_SUCCESS) return NULL;
        if (!context->moving && real.cuStreamCreate(&context->moving, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
            context->moving = NULL;
        return context->moving ? context : NULL;
    }
    return NULL;
}

/* Whether a window's moves are done. If its context was destroyed, its event no longer exists. */
static bool window_passed(const struct window *window) {
    struct context *context = contexts;
    while (context && context->handle != window->context) context = context->next;
    if (!context) return true;
    if (context_in_destruction(context->handle)) return false;
    if (real.cuEventQuery(window->event) == CUDA_ERROR_NOT_READY) return false;
    real.cuEventDestroy_v2(window->event);
    return true;
}

static void close_window(struct move *move) {
    struct window *window = &move->windows[move->under_way];
    if (!move->context || !move->in_window) return;
    window->context = move->context->handle;
    if (real.cuEventCreate(&window->event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS) {
        real.cuEventRecord(window->event, move->context->moving);
        move->under_way++;
    }
    move->in_window = 0;
}

static bool visit(void *closure, CUcontext handle, CUdeviceptr at, size_t bytes, uint64_t number) {
    struct move *move = closure;
    if (move->begun >= move->target || move->in_window >= WINDOW) return false;
    struct paged_out *part = paged_out_find(at, number);
    if (move->to_device && !part) return true; /* never moved out: the memory is on the GPU or was never used */
    if (!move->to_device && (part != NULL) != move->again) return true;
    if (!move->to_device && part && part->move == move->number) return true;
    if (move->to_device && bytes > part->bytes) bytes = part->bytes;
    if (!move->context || move->context->handle != handle) {
        /* another context's memory: its parts belong to another window */
        close_window(move);
        if (move->under_way == WINDOWS) return false;
        if (!(move->context = enter_context(handle))) return true; /* the context is being destroyed with its memory */
    }
    uint64_t left = move->target - move->begun;
    if (bytes > left) bytes = left;
    if (move->to_device) at += part->bytes - bytes; /* of a part that does not fit, the end: the table keeps the rest */
    if (prefetch(move, at, bytes) == CUDA_SUCCESS) {
        move->begun += bytes;
        move->in_window += bytes;
        if (move->to_device)
            part->bytes -= bytes;
        else
            paged_out_add(at, bytes, number, move->number);
    }
    return true;
}

bool pager_step(struct gpu *gpu, struct pager_result *result) {
    struct move *move = &moves[gpu->index];
    if (!move->active) {
        *result = (struct pager_result){0, 0};
        return true;
    }
    if (contexts_turn_begin()) {
        /* windows end in the order in which they began */
        while (move->under_way && window_passed(&move->windows[0])) {
            for (int i = 1; i < move->under_way; i++) move->windows[i - 1] = move->windows[i];
            move->under_way--;
        }
        move->context = NULL;
        while (!move->cut && !move->ended && move->begun < move->target && move->under_way < WINDOWS) {
            move->ended = allocations_walk(gpu, move->walk, move->to_device, PART, visit, move);
            close_window(move);
            if (move->ended && !move->to_device && !move->again) {
                move->again = true;
                move->ended = false;
                move->walk = ++walks;
            }
        }
        contexts_turn_end();
    } else {
        move->cut = true; /* the program is exiting */
        move->under_way = 0;
    }
    if (move->under_way || !(move->cut || move->ended || move->begun >= move->target)) return false;
    move->active = false;
    if (move->to_device && move->ended && !move->cut && gpu_count == 1) paged_out_clear();
    *result = (struct pager_result){move->begun, clock_now() - move->since};
    return true;
}

RESET_IN_CHILD(pager_reset);
void pager_reset(void) {
    memset(moves, 0, sizeof moves);
    paged_out = NULL;
    paged_out_slots = paged_out_count = 0;
}
