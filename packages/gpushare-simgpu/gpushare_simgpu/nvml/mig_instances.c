/* Creation and removal of MIG instances, as with `nvidia-smi mig`. A GPU instance (its memory) and its compute instance
 * (its multiprocessors) are created one after the other; only both together are a MIG device. */
#include <pthread.h>

#include "common/processes.h"
#include "nvml/library.h"

/* Handles are the addresses of these bytes, one for each number; the bytes are unused. */
static char gpu_instances[MAX_NUMBERS], compute_instances[MAX_NUMBERS];

/* Return the number for a handle; -1 if it does not exist. */
static int number_of(const void *handle, const char *handles, enum mig_stage least) {
    for (int number = 0; number < (int)nvml_state()->numbers; number++)
        if (handle == &handles[number] && mig_is_instance(nvml_state(), number))
            return mig_stage(nvml_state(), number) >= least ? number : -1;
    return -1;
}

#define REQUIRE_GPU_INSTANCE(handle, out)                                                                              \
    do {                                                                                                               \
        REQUIRE(nvml_state(), NVML_ERROR_UNINITIALIZED);                                                               \
        REQUIRE(number_of(handle, gpu_instances, MIG_GPU_INSTANCE) >= 0 && (out), NVML_ERROR_INVALID_ARGUMENT);        \
    } while (0)

#define REQUIRE_COMPUTE_INSTANCE(handle, out)                                                                          \
    do {                                                                                                               \
        REQUIRE(nvml_state(), NVML_ERROR_UNINITIALIZED);                                                               \
        REQUIRE(number_of(handle, compute_instances, MIG_DEVICE) >= 0 && (out), NVML_ERROR_INVALID_ARGUMENT);          \
    } while (0)

/* Return NVML's number for the compute instance profile that uses all of a GPU instance. */
static unsigned compute_profile(int number) {
    static const unsigned BY_SLICES[] = {[1] = 0, [2] = 1, [3] = 2, [4] = 3, [7] = 4};
    return BY_SLICES[mig_profiles[nvml_state()->gpus[number].place.profile].compute];
}

/* Whether a process has a context there. With the locks of the state and of the number held. */
static int is_used(int number) {
    struct state *state = nvml_state();
    for (int slot = 0; slot < MAX_PROCESSES; slot++)
        if (state->processes[slot].pid && state->gpus[number].contexts[slot]) return 1;
    return 0;
}

/* Change the stage of a number, unless a process uses it. */
static nvmlReturn_t change(int number, void (*to)(struct state *state, int number)) {
    struct state *state = nvml_state();
    nvmlReturn_t result = NVML_ERROR_IN_USE;
    processes_reap(state, 1);
    state_lock(state);
    gpu_lock(state, number);
    if (!is_used(number)) {
        to(state, number);
        result = NVML_SUCCESS;
    }
    gpu_unlock(state, number);
    state_unlock(state);
    return result;
}

EXPORT nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned mode, nvmlReturn_t *activation) {
    REQUIRE_GPU(device, activation && mode <= 1);
    REQUIRE(nvml_state()->settings.mig, NVML_ERROR_NOT_SUPPORTED);
    int gpu = nvml_number(device);
    *activation = mig_taken(nvml_state(), gpu) ? NVML_ERROR_IN_USE : change(gpu, mode ? mig_enable : mig_disable);
    return NVML_SUCCESS;
}

/* Create an instance at `start`; -1: at any free place. */
static nvmlReturn_t create(nvmlDevice_t device, unsigned id, int start, nvmlGpuInstance_t *instance) {
    int profile;
    nvmlReturn_t error = nvml_profile_by_id(device, instance, id, &profile);
    REQUIRE(!error, error);
    struct state *state = nvml_state();
    int gpu = nvml_number(device);
    REQUIRE(nvml_divided(gpu), NVML_ERROR_NOT_SUPPORTED);
    REQUIRE(start < 0 || (start < MIG_MEMORY_SLICES && (mig_profiles[profile].starts >> start & 1)),
            NVML_ERROR_INVALID_ARGUMENT);
    state_lock(state);
    uint32_t taken = mig_taken(state, gpu);
    if (start < 0) start = mig_profile_start(profile, taken);
    struct mig_place place = {(uint8_t)profile, (uint8_t)start};
    int fits = mig_capacity(state, gpu, profile) > 0 && start >= 0 && !(mig_profile_slices(place) & taken);
    if (fits) {
        int number = mig_free_number(state, gpu);
        gpu_lock(state, number);
        mig_make(state, number, place);
        gpu_unlock(state, number);
        *instance = &gpu_instances[number];
    }
    state_unlock(state);
    return fits ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_RESOURCES;
}

EXPORT nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance) {
    return create(device, id, -1, instance);
}

EXPORT nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned id,
                                                             const nvmlGpuInstancePlacement_t *placement,
                                                             nvmlGpuInstance_t *instance) {
    REQUIRE(placement && placement->start < MIG_MEMORY_SLICES, NVML_ERROR_INVALID_ARGUMENT);
    return create(device, id, (int)placement->start, instance);
}

EXPORT nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t instance) {
    REQUIRE_GPU_INSTANCE(instance, 1);
    int number = number_of(instance, gpu_instances, MIG_GPU_INSTANCE);
    REQUIRE(mig_stage(nvml_state(), number) == MIG_GPU_INSTANCE, NVML_ERROR_IN_USE);
    return change(number, mig_remove);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instances,
                                              unsigned *count) {
    int profile;
    nvmlReturn_t error = nvml_profile_by_id(device, instances && count ? instances : NULL, id, &profile);
    REQUIRE(!error, error);
    const struct state *state = nvml_state();
    REQUIRE(nvml_divided(nvml_number(device)), NVML_ERROR_NOT_SUPPORTED);
    *count = 0;
    for (int i = 0; i < MIG_INSTANCES; i++) {
        int number = mig_number(state, nvml_number(device), i);
        if (mig_stage(state, number) >= MIG_GPU_INSTANCE && state->gpus[number].place.profile == profile)
            instances[(*count)++] = &gpu_instances[number];
    }
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance) {
    REQUIRE_GPU(device, instance);
    const struct state *state = nvml_state();
    REQUIRE(nvml_divided(nvml_number(device)), NVML_ERROR_NOT_SUPPORTED);
    for (int i = 0; i < MIG_INSTANCES; i++) {
        int number = mig_number(state, nvml_number(device), i);
        if (mig_stage(state, number) < MIG_GPU_INSTANCE || mig_profile_id(state->gpus[number].place) != id) continue;
        *instance = &gpu_instances[number];
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info) {
    REQUIRE_GPU_INSTANCE(instance, info);
    const struct state *state = nvml_state();
    int number = number_of(instance, gpu_instances, MIG_GPU_INSTANCE);
    struct mig_place place = state->gpus[number].place;
    *info = (nvmlGpuInstanceInfo_t){.device = nvml_handle(mig_parent(state, number)),
                                    .id = mig_profile_id(place),
                                    .profile_id = mig_profiles[place.profile].id,
                                    .placement = {place.start, mig_profiles[place.profile].memory}};
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t instance, unsigned id,
                                                         nvmlComputeInstance_t *compute) {
    REQUIRE_GPU_INSTANCE(instance, compute);
    int number = number_of(instance, gpu_instances, MIG_GPU_INSTANCE);
    /* smaller compute instances, which share the memory of their GPU instance, are not simulated */
    REQUIRE(id == compute_profile(number), NVML_ERROR_NOT_SUPPORTED);
    REQUIRE(mig_stage(nvml_state(), number) == MIG_GPU_INSTANCE, NVML_ERROR_INSUFFICIENT_RESOURCES);
    nvmlReturn_t error = change(number, mig_add_compute);
    *compute = &compute_instances[number];
    return error;
}

EXPORT nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t compute) {
    REQUIRE_COMPUTE_INSTANCE(compute, 1);
    return change(number_of(compute, compute_instances, MIG_DEVICE), mig_remove_compute);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned id,
                                                          nvmlComputeInstance_t *compute) {
    REQUIRE_GPU_INSTANCE(instance, compute);
    int number = number_of(instance, gpu_instances, MIG_GPU_INSTANCE);
    REQUIRE(id == 0 && mig_stage(nvml_state(), number) == MIG_DEVICE, NVML_ERROR_NOT_FOUND);
    *compute = &compute_instances[number];
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t compute, nvmlComputeInstanceInfo_t *info) {
    REQUIRE_COMPUTE_INSTANCE(compute, info);
    const struct state *state = nvml_state();
    int number = number_of(compute, compute_instances, MIG_DEVICE);
    *info = (nvmlComputeInstanceInfo_t){.device = nvml_handle(mig_parent(state, number)),
                                        .gpu_instance = &gpu_instances[number],
                                        .profile_id = compute_profile(number),
                                        .placement = {0, mig_profiles[state->gpus[number].place.profile].compute}};
    return NVML_SUCCESS;
}
