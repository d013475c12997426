#include "common/mig.h"

#include <stdio.h>

#include "common/frames.h"
#include "common/uuid.h"

static int gpus(const struct state *state) {
    return (int)state->settings.devices;
}

int mig_number(const struct state *state, int gpu, int index) {
    return gpus(state) + gpu * MIG_INSTANCES + index;
}

int mig_is_instance(const struct state *state, int number) {
    return number >= gpus(state);
}

int mig_parent(const struct state *state, int number) {
    return mig_is_instance(state, number) ? (number - gpus(state)) / MIG_INSTANCES : number;
}

int mig_index(const struct state *state, int number) {
    return (number - gpus(state)) % MIG_INSTANCES;
}

enum mig_stage mig_stage(const struct state *state, int number) {
    if (number >= (int)state->numbers || !mig_is_instance(state, number)) return MIG_NOTHING;
    return (enum mig_stage)__atomic_load_n(&state->gpus[number].mig, __ATOMIC_ACQUIRE);
}

int mig_exists(const struct state *state, int number) {
    return mig_stage(state, number) == MIG_DEVICE;
}

uint64_t mig_memory(const struct state *state, int number) {
    if (!mig_is_instance(state, number)) return state->settings.memory;
    return state->gpus[number].frame_count * state->settings.page;
}

struct mig_parts mig_parts(const struct state *state, int number) {
    if (!mig_is_instance(state, number)) return (struct mig_parts){GPU_MULTIPROCESSORS, MIG_MEMORY_SLICES};
    const struct mig_profile *profile = &mig_profiles[state->gpus[number].place.profile];
    return (struct mig_parts){profile->compute * MIG_MULTIPROCESSORS, profile->memory};
}

uint64_t mig_hbm(const struct state *state, int number) {
    return state->settings.hbm * mig_parts(state, number).memory_slices / MIG_MEMORY_SLICES;
}

void mig_name(const struct state *state, int number, char name[MIG_NAME]) {
    char profile[MIG_PROFILE_NAME];
    if (mig_is_instance(state, number)) {
        mig_profile_name(state->gpus[number].place.profile, state->settings.memory, profile);
        snprintf(name, MIG_NAME, "%s MIG %s", state->settings.model, profile);
    } else {
        snprintf(name, MIG_NAME, "%s", state->settings.model);
    }
}

uint32_t mig_taken(const struct state *state, int gpu) {
    uint32_t taken = 0;
    for (int i = 0; i < MIG_INSTANCES; i++) {
        int number = mig_number(state, gpu, i);
        if (mig_stage(state, number)) taken |= mig_profile_slices(state->gpus[number].place);
    }
    return taken;
}

int mig_first(const struct state *state, int gpu) {
    for (int i = 0; i < MIG_INSTANCES; i++)
        if (mig_exists(state, mig_number(state, gpu, i))) return mig_number(state, gpu, i);
    return -1;
}

static void give_frames(struct state *state, int number, uint64_t first, uint64_t count) {
    struct gpu *gpu = &state->gpus[number];
    gpu->first_frame = first;
    gpu->frame_count = (uint32_t)count;
    frames_rebuild(state, number);
}

uint32_t mig_capacity(const struct state *state, int gpu, int profile) {
    uint32_t left = mig_profiles[profile].instances, fit = mig_profile_capacity(profile, mig_taken(state, gpu));
    for (int i = 0; i < MIG_INSTANCES; i++) {
        int number = mig_number(state, gpu, i);
        if (mig_stage(state, number) && state->gpus[number].place.profile == profile) left--;
    }
    return fit < left ? fit : left;
}

int mig_free_number(const struct state *state, int gpu) {
    for (int i = 0; i < MIG_INSTANCES; i++)
        if (!mig_stage(state, mig_number(state, gpu, i))) return mig_number(state, gpu, i);
    return -1;
}

void mig_enable(struct state *state, int gpu) {
    state->gpus[gpu].mig = 1;
    give_frames(state, gpu, (uint64_t)gpu * state->frames, 0);
}

void mig_disable(struct state *state, int gpu) {
    state->gpus[gpu].mig = 0;
    give_frames(state, gpu, (uint64_t)gpu * state->frames, state->frames);
}

static void set_stage(struct state *state, int number, enum mig_stage stage) {
    __atomic_store_n(&state->gpus[number].mig, stage, __ATOMIC_RELEASE);
}

/* Create an instance. Its UUID is the same whenever the same GPU is divided in the same way. */
void mig_make(struct state *state, int number, struct mig_place place) {
    int gpu = mig_parent(state, number);
    struct gpu *instance = &state->gpus[number];
    char text[UUID_TEXT], name[UUID_TEXT + 24];
    uuid_text("GPU", state->gpus[gpu].uuid, text);
    snprintf(name, sizeof name, "%s/%u/%u", text, (unsigned)mig_profiles[place.profile].id,
             (unsigned)mig_profile_id(place));
    uuid_make(instance->uuid, name);
    instance->place = place;
    give_frames(state, number, (uint64_t)gpu * state->frames + state->frames / MIG_MEMORY_SLICES * place.start,
                mig_profile_pages(place.profile, state->frames));
    set_stage(state, number, MIG_GPU_INSTANCE);
}

void mig_add_compute(struct state *state, int number) {
    set_stage(state, number, MIG_DEVICE);
}

void mig_remove_compute(struct state *state, int number) {
    set_stage(state, number, MIG_GPU_INSTANCE);
}

void mig_remove(struct state *state, int number) {
    set_stage(state, number, MIG_NOTHING);
    give_frames(state, number, state->gpus[number].first_frame, 0);
}

void mig_divide(struct state *state, int gpu, const struct mig_layout *layout) {
    (layout->on ? mig_enable : mig_disable)(state, gpu);
    for (int i = 0; i < layout->count; i++) {
        mig_make(state, mig_number(state, gpu, i), layout->places[i]);
        mig_add_compute(state, mig_number(state, gpu, i));
    }
}
