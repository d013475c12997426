#include "pager.h"

#include "allocations.h"
#include "capture.h"
#include "contexts.h"
#include "driver_turn.h"
#include "resolve.h"

/* A part is one call of the driver, a window what is under way at a time. Two windows of this size keep a link of 200
   GB/s busy between two steps a millisecond apart; on PCIe a move can be cut short within some 10 ms. */
#define PART    (32ull << 20)
#define WINDOW  (128ull << 20)
#define WINDOWS 2

struct window {
    CUevent event;
    CUcontext context;
};

static struct move {
    bool active, cut, ended, to_device;
    uint64_t wanted, begun, walk, since;
    struct window windows[WINDOWS];
    int under_way;
    uint64_t in_window; /* bytes begun since the last window was closed */
    struct context *context;
    struct gpu *gpu;
} moves[MAX_GPUS];

static uint64_t walks;

void pager_forget(void) {
    __builtin_memset(moves, 0, sizeof moves);
}

void pager_start(struct gpu *gpu, bool to_device, uint64_t bytes) {
    struct move *move = &moves[gpu->index];
    move->active = true;
    move->cut = move->ended = false;
    move->to_device = to_device;
    move->wanted = bytes;
    move->begun = 0;
    move->walk = ++walks;
    move->since = now_ns();
    move->gpu = gpu;
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

/* The context of the memory, current to this thread, with its stream for moving. */
static struct context *entered(CUcontext handle) {
    for (struct context *context = contexts; context; context = context->next) {
        if (context->handle != handle) continue;
        if (context_leaves(handle)) return NULL;
        if (real.cuCtxSetCurrent(handle) != CUDA_SUCCESS) return NULL;
        if (!context->moving && real.cuStreamCreate(&context->moving, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
            context->moving = NULL;
        return context->moving ? context : NULL;
    }
    return NULL;
}

/* An event goes with its context, and must not be touched afterwards. */
static bool window_passed(const struct window *window) {
    struct context *context = contexts;
    while (context && context->handle != window->context) context = context->next;
    if (!context) return true;
    if (context_leaves(context->handle)) return false;
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

static bool visit(void *closure, CUcontext handle, CUdeviceptr at, size_t bytes) {
    struct move *move = closure;
    if (move->begun >= move->wanted || move->in_window >= WINDOW) return false;
    if (!move->context || move->context->handle != handle) {
        /* another context's memory: its parts go into another window */
        close_window(move);
        if (move->under_way == WINDOWS) return false;
        if (!(move->context = entered(handle))) return true; /* the context is going: so is its memory */
    }
    uint64_t left = move->wanted - move->begun;
    if (bytes > left) bytes = left;
    if (prefetch(move, at, bytes) == CUDA_SUCCESS) {
        move->begun += bytes;
        move->in_window += bytes;
    }
    return true;
}

bool pager_step(struct gpu *gpu, struct pager_result *result) {
    struct move *move = &moves[gpu->index];
    if (!move->active) {
        *result = (struct pager_result){0, 0};
        return true;
    }
    if (driver_turn_begin()) {
        /* windows end in the order in which they began */
        while (move->under_way && window_passed(&move->windows[0])) {
            for (int i = 1; i < move->under_way; i++) move->windows[i - 1] = move->windows[i];
            move->under_way--;
        }
        move->context = NULL;
        while (!move->cut && !move->ended && move->begun < move->wanted && move->under_way < WINDOWS) {
            move->ended = allocations_walk(gpu, move->walk, move->to_device, PART, visit, move);
            close_window(move);
        }
        driver_turn_end();
    } else {
        move->cut = true; /* the program is exiting */
        move->under_way = 0;
    }
    if (move->under_way || !(move->cut || move->ended || move->begun >= move->wanted)) return false;
    move->active = false;
    *result = (struct pager_result){move->begun, now_ns() - move->since};
    return true;
}
