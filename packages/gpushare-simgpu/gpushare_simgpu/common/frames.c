#include "common/frames.h"

#include <stdlib.h>
#include <string.h>

static void append(struct frame *frames, struct frame_list *list, uint32_t number) {
    frames[number].before = list->last;
    frames[number].after = NO_FRAME;
    if (list->last == NO_FRAME)
        list->first = number;
    else
        frames[list->last].after = number;
    list->last = number;
    list->count++;
}

static void detach(struct frame *frames, struct frame_list *list, uint32_t number) {
    uint32_t before = frames[number].before, after = frames[number].after;
    if (before == NO_FRAME)
        list->first = after;
    else
        frames[before].after = after;
    if (after == NO_FRAME)
        list->last = before;
    else
        frames[after].before = before;
    list->count--;
}

enum claim frames_claim(struct state *state, int number_of_gpu, uint32_t slot, uint64_t page, enum frame_kind kind,
                        uint32_t *number) {
    struct gpu *gpu = &state->gpus[number_of_gpu];
    struct frame *frames = gpu_frames(state, number_of_gpu);
    enum claim claim = CLAIM_FREE;
    uint32_t taken = gpu->free.first;
    if (taken == NO_FRAME) {
        taken = gpu->managed.first;
        if (taken == NO_FRAME) return CLAIM_NONE;
        frames_release(state, number_of_gpu, taken);
        claim = CLAIM_EVICTED;
        taken = gpu->free.first;
    }
    struct frame *frame = &frames[taken];
    detach(frames, &gpu->free, taken);
    frame->page = page;
    frame->stamp = ++gpu->stamp;
    frame->owner = slot + 1;
    frame->kind = kind;
    gpu->held[slot]++;
    if (kind == FRAME_MANAGED) append(frames, &gpu->managed, taken);
    *number = taken;
    return claim;
}

int frames_fit(struct state *state, int gpu, uint64_t count) {
    return (uint64_t)state->gpus[gpu].free.count + state->gpus[gpu].managed.count >= count;
}

int frames_holds(struct state *state, int gpu, uint32_t number, uint32_t slot, uint64_t page) {
    if (number >= state->gpus[gpu].frame_count) return 0;
    struct frame *frame = &gpu_frames(state, gpu)[number];
    return frame->owner == slot + 1 && frame->page == page && frame->kind != FRAME_FREE;
}

void frames_use(struct state *state, int number_of_gpu, uint32_t number) {
    struct gpu *gpu = &state->gpus[number_of_gpu];
    struct frame *frames = gpu_frames(state, number_of_gpu);
    frames[number].stamp = ++gpu->stamp;
    if (frames[number].kind != FRAME_MANAGED || gpu->managed.last == number) return;
    detach(frames, &gpu->managed, number);
    append(frames, &gpu->managed, number);
}

void frames_release(struct state *state, int number_of_gpu, uint32_t number) {
    struct gpu *gpu = &state->gpus[number_of_gpu];
    struct frame *frames = gpu_frames(state, number_of_gpu);
    struct frame *frame = &frames[number];
    if (frame->kind == FRAME_FREE) return;
    if (frame->kind == FRAME_MANAGED) detach(frames, &gpu->managed, number);
    gpu->held[frame->owner - 1]--;
    frame->kind = FRAME_FREE;
    frame->owner = 0;
    append(frames, &gpu->free, number);
}

void frames_release_all(struct state *state, int gpu, uint32_t slot) {
    struct frame *frames = gpu_frames(state, gpu);
    for (uint32_t i = 0; i < state->gpus[gpu].frame_count && state->gpus[gpu].held[slot] > 0; i++)
        if (frames[i].owner == slot + 1) frames_release(state, gpu, i);
}

static struct frame *ordering;

static int by_stamp(const void *left, const void *right) {
    uint64_t a = ordering[*(const uint32_t *)left].stamp, b = ordering[*(const uint32_t *)right].stamp;
    return (a > b) - (a < b);
}

void frames_rebuild(struct state *state, int number_of_gpu) {
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER; /* for `ordering` */
    struct gpu *gpu = &state->gpus[number_of_gpu];
    struct frame *frames = gpu_frames(state, number_of_gpu);
    uint32_t *managed = malloc((gpu->frame_count + 1) * sizeof *managed), count = 0;
    gpu->free = gpu->managed = (struct frame_list){NO_FRAME, NO_FRAME, 0};
    memset(gpu->held, 0, sizeof gpu->held);
    for (uint32_t i = 0; i < gpu->frame_count; i++) {
        struct frame *frame = &frames[i];
        if (frame->kind == FRAME_FREE || frame->owner == 0 || frame->owner > MAX_PROCESSES) {
            frame->kind = FRAME_FREE;
            frame->owner = 0;
            append(frames, &gpu->free, i);
            continue;
        }
        gpu->held[frame->owner - 1]++;
        if (frame->kind == FRAME_MANAGED && managed)
            managed[count++] = i;
        else if (frame->kind == FRAME_MANAGED)
            append(frames, &gpu->managed, i); /* no memory for sorting: only the order is lost */
    }
    pthread_mutex_lock(&one_at_a_time);
    ordering = frames;
    if (count) qsort(managed, count, sizeof *managed, by_stamp);
    pthread_mutex_unlock(&one_at_a_time);
    for (uint32_t i = 0; i < count; i++) append(frames, &gpu->managed, managed[i]);
    free(managed);
}
