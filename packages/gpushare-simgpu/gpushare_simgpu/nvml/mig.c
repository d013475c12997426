/* MIG: the existing and the possible instances of a GPU. Handles of instances refer to compute instances; here each GPU
 * instance has one, which uses all of it. */
#include <stdio.h>
#include <string.h>

#include "nvml/library.h"

#define VERSION(struct_value, number) (sizeof(struct_value) | (number##u) << 24)

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    REQUIRE_GPU(device, current && pending);
    REQUIRE(nvml_state()->settings.mig, NVML_ERROR_NOT_SUPPORTED);
    *current = *pending = nvml_divided(nvml_number(device)) ? 1 : 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is_mig) {
    REQUIRE_DEVICE(device, is_mig);
    *is_mig = mig_is_instance(nvml_state(), nvml_number(device)) ? 1 : 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
    REQUIRE_GPU(device, count);
    *count = nvml_divided(nvml_number(device)) ? MIG_INSTANCES : 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *instance) {
    REQUIRE_GPU(device, instance);
    REQUIRE(nvml_state()->settings.mig, NVML_ERROR_NOT_SUPPORTED);
    REQUIRE(index < MIG_INSTANCES, NVML_ERROR_INVALID_ARGUMENT);
    int number = mig_number(nvml_state(), nvml_number(device), (int)index);
    REQUIRE(mig_exists(nvml_state(), number), NVML_ERROR_NOT_FOUND);
    *instance = nvml_handle(number);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t instance, nvmlDevice_t *device) {
    REQUIRE_DEVICE(instance, device);
    REQUIRE(mig_is_instance(nvml_state(), nvml_number(instance)), NVML_ERROR_INVALID_ARGUMENT);
    *device = nvml_handle(mig_parent(nvml_state(), nvml_number(instance)));
    return NVML_SUCCESS;
}

/* Return the place of an instance; NVML_ERROR_NOT_SUPPORTED for a GPU. */
static nvmlReturn_t place_of(nvmlDevice_t device, const void *out, struct mig_place *place) {
    REQUIRE_DEVICE(device, out);
    int number = nvml_number(device);
    REQUIRE(mig_is_instance(nvml_state(), number), NVML_ERROR_NOT_SUPPORTED);
    *place = nvml_state()->gpus[number].place;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id) {
    struct mig_place place;
    nvmlReturn_t error = place_of(device, id, &place);
    REQUIRE(!error, error);
    *id = mig_profile_id(place);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id) {
    struct mig_place place;
    nvmlReturn_t error = place_of(device, id, &place);
    REQUIRE(!error, error);
    *id = 0;
    return NVML_SUCCESS;
}

static unsigned long long mib_of(int profile) {
    const struct state *state = nvml_state();
    return mig_profile_pages(profile, state->frames) * state->settings.page >> 20;
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) {
    struct mig_place place;
    nvmlReturn_t error = place_of(device, attributes, &place);
    REQUIRE(!error, error);
    const struct mig_profile *profile = &mig_profiles[place.profile];
    *attributes = (nvmlDeviceAttributes_t){
        .multiprocessors = profile->compute * MIG_MULTIPROCESSORS,
        .copy_engines = profile->copy_engines,
        .decoders = profile->decoders,
        .jpegs = profile->jpegs,
        .ofas = profile->ofas,
        .gpu_slices = profile->compute,
        .compute_slices = profile->compute,
        .memory_mib = mib_of(place.profile),
    };
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) {
    return nvmlDeviceGetAttributes_v2(device, attributes);
}

/* Find a profile's place in mig_profiles, by NVML's name for it (`kind`) or by its id on the GPU. */
static nvmlReturn_t find_profile(nvmlDevice_t device, const void *out, int by_id, unsigned wanted, int *profile) {
    REQUIRE_GPU(device, out);
    REQUIRE(nvml_state()->settings.mig, NVML_ERROR_NOT_SUPPORTED);
    for (*profile = 0; *profile < MIG_PROFILES; ++*profile)
        if ((by_id ? mig_profiles[*profile].id : mig_profiles[*profile].kind) == wanted) return NVML_SUCCESS;
    return by_id || wanted >= GPU_INSTANCE_PROFILES ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvml_profile_by_id(nvmlDevice_t device, const void *out, unsigned id, int *profile) {
    return find_profile(device, out, 1, id, profile);
}

static nvmlProfileParts_t parts_of(int profile) {
    const struct mig_profile *p = &mig_profiles[profile];
    return (nvmlProfileParts_t){
        .slices = p->compute,
        .instances = p->instances,
        .multiprocessors = p->compute * MIG_MULTIPROCESSORS,
        .copy_engines = p->copy_engines,
        .decoders = p->decoders,
        .jpegs = p->jpegs,
        .ofas = p->ofas,
    };
}

static void profile_name(int profile, char out[PROFILE_NAME_LENGTH]) {
    char name[MIG_PROFILE_NAME];
    mig_profile_name(profile, nvml_state()->settings.memory, name);
    snprintf(out, PROFILE_NAME_LENGTH, "MIG %s", name);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned kind,
                                                        nvmlGpuInstanceProfileInfo_t *info) {
    int profile;
    nvmlReturn_t error = find_profile(device, info, 0, kind, &profile);
    REQUIRE(!error, error);
    *info = (nvmlGpuInstanceProfileInfo_t){
        .id = mig_profiles[profile].id, .parts = parts_of(profile), .memory_mib = mib_of(profile)};
    return NVML_SUCCESS;
}

static nvmlReturn_t versioned_info(nvmlDevice_t device, int by_id, unsigned wanted, void *info) {
    int profile;
    nvmlReturn_t error = find_profile(device, info, by_id, wanted, &profile);
    REQUIRE(!error, error);
    REQUIRE(nvml_divided(nvml_number(device)), NVML_ERROR_NOT_SUPPORTED);
    nvmlGpuInstanceProfileInfo_v2_t *second = info;
    nvmlGpuInstanceProfileInfo_v3_t *third = info;
    if (second->version == VERSION(*second, 2)) {
        *second = (nvmlGpuInstanceProfileInfo_v2_t){.version = second->version,
                                                    .id = mig_profiles[profile].id,
                                                    .parts = parts_of(profile),
                                                    .memory_mib = mib_of(profile)};
        profile_name(profile, second->name);
        return NVML_SUCCESS;
    }
    REQUIRE(third->version == VERSION(*third, 3), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    *third = (nvmlGpuInstanceProfileInfo_v3_t){.version = third->version,
                                               .id = mig_profiles[profile].id,
                                               .parts = parts_of(profile),
                                               .memory_mib = mib_of(profile)};
    profile_name(profile, third->name);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned kind, void *info) {
    return versioned_info(device, 0, kind, info);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned id, void *info) {
    return versioned_info(device, 1, id, info);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned id, unsigned *count) {
    int profile;
    nvmlReturn_t error = find_profile(device, count, 1, id, &profile);
    REQUIRE(!error, error);
    int gpu = nvml_number(device);
    REQUIRE(nvml_divided(gpu), NVML_ERROR_NOT_SUPPORTED);
    *count = mig_capacity(nvml_state(), gpu, profile);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned id,
                                                                  nvmlGpuInstancePlacement_t *placements,
                                                                  unsigned *count) {
    int profile;
    nvmlReturn_t error = find_profile(device, count, 1, id, &profile);
    REQUIRE(!error, error);
    unsigned found = 0;
    for (unsigned start = 0; start < MIG_MEMORY_SLICES; start++) {
        if (!(mig_profiles[profile].starts >> start & 1)) continue;
        if (placements) placements[found] = (nvmlGpuInstancePlacement_t){start, mig_profiles[profile].memory};
        found++;
    }
    *count = found;
    return NVML_SUCCESS;
}
