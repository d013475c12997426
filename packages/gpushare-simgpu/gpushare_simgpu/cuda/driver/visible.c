#include "cuda/driver/visible.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/mig.h"
#include "common/uuid.h"

/* The devices that CUDA counts if none are named: the GPUs without MIG, then the first instance of each GPU in MIG
 * mode. DataDog's agent found this order on hardware (its pull request 36377); NVIDIA's manuals do not specify it. */
static int countable(const struct state *state, int numbers[MAX_GPUS]) {
    int count = 0, gpus = (int)state->settings.devices;
    for (int gpu = 0; gpu < gpus; gpu++)
        if (!state->gpus[gpu].mig) numbers[count++] = gpu;
    for (int gpu = 0; gpu < gpus; gpu++)
        if (state->gpus[gpu].mig && mig_first(state, gpu) >= 0) numbers[count++] = mig_first(state, gpu);
    return count;
}

/* A prefix of a GPU's UUID is sufficient if it matches only one GPU. For a GPU in MIG mode, the first instance is
 * returned. */
static int named_gpu(const struct state *state, const char *name, size_t length) {
    int found = -1;
    for (int gpu = 0; gpu < (int)state->settings.devices; gpu++) {
        char text[UUID_TEXT];
        uuid_text("GPU", state->gpus[gpu].uuid, text);
        if (strncasecmp(text, name, length) != 0) continue;
        if (found >= 0) return -1;
        found = gpu;
    }
    return found >= 0 && state->gpus[found].mig ? mig_first(state, found) : found;
}

/* MIG-<UUID>, or MIG-GPU-<UUID of the GPU>/<id of the GPU instance>/<id of the compute instance>. */
static int named_instance(const struct state *state, const char *name, size_t length) {
    for (int number = (int)state->settings.devices; number < (int)state->numbers; number++) {
        char uuid[UUID_TEXT], gpu[UUID_TEXT], by_ids[UUID_TEXT + 24];
        if (!mig_exists(state, number)) continue;
        uuid_text("MIG", state->gpus[number].uuid, uuid);
        uuid_text("GPU", state->gpus[mig_parent(state, number)].uuid, gpu);
        snprintf(by_ids, sizeof by_ids, "MIG-%s/%u/0", gpu, (unsigned)mig_profile_id(state->gpus[number].place));
        if ((strlen(uuid) == length && strncasecmp(uuid, name, length) == 0) ||
            (strlen(by_ids) == length && strncasecmp(by_ids, name, length) == 0))
            return number;
    }
    return -1;
}

static int named(const struct state *state, const char *name, size_t length) {
    char *end;
    if (length >= 4 && strncasecmp(name, "GPU-", 4) == 0) return named_gpu(state, name, length);
    if (length >= 4 && strncasecmp(name, "MIG-", 4) == 0) return named_instance(state, name, length);
    int all[MAX_GPUS], count = countable(state, all);
    long number = strtol(name, &end, 10);
    return end == name + length && length > 0 && number >= 0 && number < count ? all[number] : -1;
}

/* As in CUDA, the list ends at the first name that is not a GPU, and a list that names a GPU twice leaves no
 * devices. */
static int listed(const struct state *state, const char *list, int numbers[MAX_GPUS]) {
    int count = 0;
    while (*list) {
        while (*list == ' ') list++;
        size_t length = strcspn(list, ","), trimmed = length;
        while (trimmed && list[trimmed - 1] == ' ') trimmed--;
        int number = named(state, list, trimmed);
        if (number < 0 || count == MAX_GPUS) return count;
        for (int i = 0; i < count; i++)
            if (numbers[i] == number) return 0;
        numbers[count++] = number;
        list += length;
        if (*list == ',') list++;
    }
    return count;
}

int visible_numbers(const struct state *state, int numbers[MAX_GPUS]) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    int count = list ? listed(state, list, numbers) : countable(state, numbers);
    /* a process sees at most one instance, and then no whole GPU (NVIDIA's MIG user guide, "Device Enumeration") */
    for (int i = 0; i < count; i++) {
        if (!mig_is_instance(state, numbers[i])) continue;
        numbers[0] = numbers[i];
        return 1;
    }
    return count;
}
