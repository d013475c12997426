#include "common/mig_profiles.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GIB (1ull << 30)
/* Below this size a profile's name would contain 0 GB. */
#define SMALLEST_MEMORY (8 * GIB)
/* With fewer pages in a slice, sizes would be indistinguishable. */
#define FEWEST_PAGES (4 * MIG_MEMORY_SLICES)

/* Ids, engines and places of an A100 (NVIDIA's MIG user guide, "Supported MIG profiles"; go-nvml's mock of an A100). */
const struct mig_profile mig_profiles[MIG_PROFILES] = {
    {.id = 19, .kind = 0, .compute = 1, .memory = 1, .instances = 7, .starts = 0x7f, 1, 0, 0, 0, ""},
    {.id = 20, .kind = 7, .compute = 1, .memory = 1, .instances = 1, .starts = 0x7f, 1, 1, 1, 1, "+me"},
    {.id = 15, .kind = 9, .compute = 1, .memory = 2, .instances = 4, .starts = 0x55, 1, 1, 0, 0, ""},
    {.id = 14, .kind = 1, .compute = 2, .memory = 2, .instances = 3, .starts = 0x15, 2, 1, 0, 0, ""},
    {.id = 9, .kind = 2, .compute = 3, .memory = 4, .instances = 2, .starts = 0x11, 3, 2, 0, 0, ""},
    {.id = 5, .kind = 3, .compute = 4, .memory = 4, .instances = 1, .starts = 0x01, 4, 2, 0, 0, ""},
    {.id = 0, .kind = 4, .compute = 7, .memory = 8, .instances = 1, .starts = 0x01, 7, 5, 1, 1, ""},
};

uint32_t mig_profile_id(struct mig_place place) {
    /* 0 the whole GPU; 1 and 2 its halves; 3 to 6 its quarters; 7 to 13 its eighths */
    uint32_t size = mig_profiles[place.profile].memory;
    return MIG_MEMORY_SLICES / size - 1 + place.start / size;
}

uint32_t mig_profile_slices(struct mig_place place) {
    return ((1u << mig_profiles[place.profile].memory) - 1) << place.start;
}

void mig_profile_name(int profile, uint64_t memory, char name[MIG_PROFILE_NAME]) {
    const struct mig_profile *p = &mig_profiles[profile];
    uint64_t gib = (memory + GIB - 1) / GIB;
    unsigned size = (unsigned)((2 * gib * p->memory + MIG_MEMORY_SLICES) / (2 * MIG_MEMORY_SLICES));
    snprintf(name, MIG_PROFILE_NAME, "%ug.%ugb%s", (unsigned)p->compute, size, p->suffix);
}

uint64_t mig_profile_pages(int profile, uint64_t gpu_pages) {
    uint64_t slice = gpu_pages / MIG_MEMORY_SLICES;
    /* 1/20 of one slice: an A100 of 80 GiB shows 9728 MiB for 1g.10gb and 19968 MiB for 2g.20gb */
    return slice * mig_profiles[profile].memory - slice / 20;
}

int mig_profile_start(int profile, uint32_t taken) {
    for (int start = MIG_MEMORY_SLICES - 1; start >= 0; start--) {
        struct mig_place place = {(uint8_t)profile, (uint8_t)start};
        if ((mig_profiles[profile].starts >> start & 1) && !(mig_profile_slices(place) & taken)) return start;
    }
    return -1;
}

uint32_t mig_profile_capacity(int profile, uint32_t taken) {
    uint32_t count = 0;
    for (int start; count < mig_profiles[profile].instances && (start = mig_profile_start(profile, taken)) >= 0;
         count++)
        taken |= mig_profile_slices((struct mig_place){(uint8_t)profile, (uint8_t)start});
    return count;
}

/* Find places for the layout's instances from number `next` on. Earlier instances are placed as high as the others
 * allow. */
static int place_all(struct mig_layout *layout, int next, uint32_t taken) {
    if (next == layout->count) return 1;
    struct mig_place *place = &layout->places[next];
    uint32_t same = 0;
    for (int i = 0; i < next; i++) same += layout->places[i].profile == place->profile;
    if (same == mig_profiles[place->profile].instances) return 0;
    for (int start = MIG_MEMORY_SLICES - 1; start >= 0; start--) {
        place->start = (uint8_t)start;
        if (!(mig_profiles[place->profile].starts >> start & 1) || (mig_profile_slices(*place) & taken)) continue;
        if (place_all(layout, next + 1, taken | mig_profile_slices(*place))) return 1;
    }
    return 0;
}

static int by_id(const void *left, const void *right) {
    return (int)mig_profile_id(*(const struct mig_place *)left) - (int)mig_profile_id(*(const struct mig_place *)right);
}

static int complain(const char *text, const char *why) {
    fprintf(stderr, "simgpu: SIMGPU_MIG=%s: %s\n", text, why);
    return -1;
}

static int find_profile(const char *name, size_t length, uint64_t memory) {
    char known[MIG_PROFILE_NAME];
    for (int i = 0; i < MIG_PROFILES; i++) {
        mig_profile_name(i, memory, known);
        if (strlen(known) == length && strncmp(known, name, length) == 0) return i;
    }
    return -1;
}

static int unknown_profile(const char *text, const char *name, size_t length, uint64_t memory) {
    char why[512], known[MIG_PROFILE_NAME];
    int at =
        snprintf(why, sizeof why, "there is no profile %.*s; with this SIMGPU_MEMORY there are", (int)length, name);
    for (int i = 0; i < MIG_PROFILES && at < (int)sizeof why; i++) {
        mig_profile_name(i, memory, known);
        at += snprintf(why + at, sizeof why - (size_t)at, " %s", known);
    }
    return complain(text, why);
}

/* Read the profiles of one GPU, separated by commas, up to `end`. */
static int read_profiles(struct mig_layout *layout, const char *text, const char *at, const char *end,
                         uint64_t memory) {
    while (at < end) {
        size_t length = strcspn(at, ",;");
        int profile = find_profile(at, length, memory);
        if (profile < 0) return unknown_profile(text, at, length < 40 ? length : 40, memory);
        if (layout->count == MIG_INSTANCES) return complain(text, "a GPU has at most seven instances");
        layout->places[layout->count++].profile = (uint8_t)profile;
        at += length;
        if (at < end && ++at == end) return complain(text, "a profile is missing after a comma");
    }
    if (!place_all(layout, 0, 0)) return complain(text, "these instances do not fit on one GPU together");
    qsort(layout->places, layout->count, sizeof *layout->places, by_id);
    return 0;
}

int mig_profiles_read(struct mig_layout *layouts, uint64_t gpus, uint64_t memory, uint64_t page) {
    const char *text = getenv("SIMGPU_MIG");
    if (!text || !*text) return 0;
    if (memory < SMALLEST_MEMORY || memory / page < FEWEST_PAGES)
        return complain(text, "SIMGPU_MEMORY must be at least 8GiB and hold at least 32 pages");
    if (strcmp(text, "off") == 0) return 1;
    for (const char *at = text; *at;) {
        char *after;
        unsigned long gpu = strtoul(at, &after, 10);
        if (after == at || *after != ':')
            return complain(text, "it has to be \"off\" or like 0:1g.10gb,3g.40gb;1: (GPU, colon, profiles)");
        if (gpu >= gpus) return complain(text, "there are not as many GPUs (SIMGPU_DEVICES)");
        if (layouts[gpu].on) return complain(text, "it names a GPU twice");
        const char *end = after + strcspn(after, ";");
        layouts[gpu].on = 1;
        if (read_profiles(&layouts[gpu], text, after + 1, end, memory)) return -1;
        at = *end ? end + 1 : end;
    }
    return 1;
}
