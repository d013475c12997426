/* Execution of copies: the engines that they use, and their duration. */
#include <string.h>

#include "common/clock.h"
#include "common/engines.h"
#include "cuda/kernels/compute.h"
#include "cuda/streams/execute.h"
#include "cuda/paging/residency.h"

/* Copies reserve the engine piece by piece, so that other processes' copies can run in between. */
#define PIECE (8ull << 20)

/* The location of one side of a copy. */
struct side {
    int gpu; /* -1: host memory */
    int managed;
};

static struct side side_of(uint64_t address, struct stream *stream) {
    struct side side = {-1, 0};
    pthread_mutex_lock(&memory_lock);
    struct allocation *allocation = allocation_find(address);
    if (allocation && (allocation->kind == KIND_PLAIN || allocation->kind == KIND_MAPPED))
        side.gpu = driver.gpu[allocation->device];
    if (allocation && allocation->kind == KIND_MANAGED) side = (struct side){stream->context->gpu, 1};
    pthread_mutex_unlock(&memory_lock);
    return side;
}

static void move(uint64_t dst, uint64_t src, uint64_t size) {
    memmove((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, size);
}

static uint64_t extent(uint64_t width, uint64_t height, uint64_t depth, uint64_t pitch, uint64_t slice) {
    return width + (height - 1) * pitch + (depth - 1) * slice;
}

static void move_rectangle(const void *argument) {
    const struct rectangle *r = argument;
    for (uint64_t z = 0; z < r->depth; z++)
        for (uint64_t y = 0; y < r->height; y++)
            move(r->dst + z * r->dst_slice + y * r->dst_pitch, r->src + z * r->src_slice + y * r->src_pitch, r->width);
}

static uint64_t on_device(struct stream *stream, const struct rectangle *r, uint64_t ready) {
    uint64_t bytes = r->width * r->height * r->depth;
    struct work work = {
        .ranges = {{r->src, extent(r->width, r->height, r->depth, r->src_pitch, r->src_slice), 0},
                   {r->dst, extent(r->width, r->height, r->depth, r->dst_pitch, r->dst_slice), 1}},
        .range_count = 2,
        .passed = 2 * bytes,
        .compute = move_rectangle,
        .argument = r,
    };
    return compute_run(stream, &work, ready);
}

/* Reserve the engines of a transfer for one piece. */
static uint64_t transfer(int from, int to, uint64_t bytes, uint64_t ready) {
    struct state *state = driver.state;
    if (from >= 0) {
        gpu_lock(state, from);
        ready = engine_take(&state->gpus[from].d2h, ready, clock_transfer_ns(bytes, state->settings.d2h));
        state->gpus[from].stats.copied_out += bytes;
        gpu_unlock(state, from);
    }
    if (to >= 0) {
        gpu_lock(state, to);
        ready = engine_take(&state->gpus[to].h2d, ready, clock_transfer_ns(bytes, state->settings.h2d));
        state->gpus[to].stats.copied_in += bytes;
        gpu_unlock(state, to);
    }
    return ready;
}

uint64_t execute_copy(struct stream *stream, const struct rectangle *r, uint64_t ready) {
    if (r->width == 0 || r->height == 0 || r->depth == 0) return ready;
    struct side src = side_of(r->src, stream), dst = side_of(r->dst, stream);
    if (src.gpu >= 0 && src.gpu == dst.gpu) return on_device(stream, r, ready);
    if (src.managed)
        ready = residency_fault_range(r->src, extent(r->width, r->height, r->depth, r->src_pitch, r->src_slice),
                                      src.gpu, ready);
    if (dst.managed)
        ready = residency_fault_range(r->dst, extent(r->width, r->height, r->depth, r->dst_pitch, r->dst_slice),
                                      dst.gpu, ready);
    uint64_t pending = 0;
    for (uint64_t z = 0; z < r->depth; z++) {
        for (uint64_t y = 0; y < r->height; y++) {
            uint64_t to = r->dst + z * r->dst_slice + y * r->dst_pitch,
                     from = r->src + z * r->src_slice + y * r->src_pitch;
            for (uint64_t done = 0; done < r->width;) {
                uint64_t size = r->width - done < PIECE ? r->width - done : PIECE;
                move(to + done, from + done, size);
                done += size;
                pending += size;
                if (pending < PIECE) continue;
                ready = transfer(src.gpu, dst.gpu, pending, ready);
                pending = 0;
                clock_sleep_until(ready);
            }
        }
    }
    if (pending) {
        ready = transfer(src.gpu, dst.gpu, pending, ready);
        clock_sleep_until(ready);
    }
    return ready;
}
