#include "common/settings.h"

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The minimum of all rates, in bytes/s. */
#define SLOWEST 1e5
#define FASTEST 1e14

static const struct {
    const char *name;
    double factor;
} UNITS[] = {
    {"", 1},
    {"B", 1},
    {"k", 1e3},
    {"kB", 1e3},
    {"M", 1e6},
    {"MB", 1e6},
    {"G", 1e9},
    {"GB", 1e9},
    {"T", 1e12},
    {"TB", 1e12},
    {"KiB", 1024},
    {"MiB", 1024 * 1024.0},
    {"GiB", 1024 * 1024 * 1024.0},
    {"TiB", 1024 * 1024 * 1024 * 1024.0},
};

/* Parse a number with an optional unit; -1 if it is invalid. */
static double parse(const char *text) {
    char *end;
    double value = strtod(text, &end);
    if (end == text || !isfinite(value)) return -1;
    while (*end == ' ') end++;
    for (size_t i = 0; i < sizeof UNITS / sizeof *UNITS; i++)
        if (strcmp(end, UNITS[i].name) == 0) return value * UNITS[i].factor;
    return -1;
}

/* Parse an octal number, as chmod does. Root creates the file for other users: the notebooks' users must be able to
 * open it. */
static int mode(uint64_t *out) {
    const char *text = getenv("SIMGPU_STATE_MODE");
    char *end;
    *out = geteuid() == 0 ? 0666 : 0600;
    if (!text || !*text) return 0;
    unsigned long value = strtoul(text, &end, 8);
    if (*end || value > 0777 || (value & 0600) != 0600) {
        fprintf(stderr,
                "simgpu: SIMGPU_STATE_MODE=%s is not an octal number from 0600 to 0777 that lets its owner read and "
                "write\n",
                text);
        return -1;
    }
    *out = value;
    return 0;
}

static int number(const char *name, uint64_t *out, double standard, double least, double most) {
    const char *text = getenv(name);
    double value = text && *text ? parse(text) : standard;
    if (!(value >= least && value <= most)) {
        fprintf(stderr, "simgpu: %s=%s is not a number from %.0f to %.0f (units such as GiB or MB are allowed)\n", name,
                text, least, most);
        return -1;
    }
    *out = (uint64_t)value;
    return 0;
}

/* Find the variable's word in `words`, which ends with NULL; the first word if the variable is not set. */
static int choice(const char *name, int *out, const char *const *words) {
    const char *text = getenv(name);
    *out = 0;
    if (!text || !*text) return 0;
    for (; words[*out]; ++*out)
        if (strcmp(text, words[*out]) == 0) return 0;
    fprintf(stderr, "simgpu: %s=%s is none of:", name, text);
    for (int i = 0; words[i]; i++) fprintf(stderr, " %s", words[i]);
    fprintf(stderr, "\n");
    return -1;
}

static int read_checkpoint(struct settings *s) {
    static const char *const SUPPORT[] = {"supported", "absent", "unsupported", NULL};
    static const char *const MANAGED[] = {"fail", "refuse", NULL};
    static const char *const RETRY[] = {"no", "yes", NULL};
    int support;
    uint64_t restore_ms;
    if (choice("SIMGPU_CHECKPOINT", &support, SUPPORT) ||
        choice("SIMGPU_CHECKPOINT_MANAGED", &s->checkpoint_refuses_managed, MANAGED) ||
        choice("SIMGPU_CHECKPOINT_RETRY", &s->checkpoint_retries, RETRY) ||
        number("SIMGPU_CHECKPOINT_D2H", &s->checkpoint_d2h, (double)s->d2h, SLOWEST, FASTEST) ||
        number("SIMGPU_CHECKPOINT_H2D", &s->checkpoint_h2d, (double)s->h2d, SLOWEST, FASTEST) ||
        number("SIMGPU_RESTORE_MS", &restore_ms, 0, 0, 1e6))
        return -1;
    s->checkpoint = (enum checkpoint_support)support;
    s->restore_ns = restore_ms * 1000000;
    return 0;
}

static int read_all(struct settings *s) {
    const double gib = 1024.0 * 1024 * 1024;
    uint64_t slice_us;
    memset(s, 0, sizeof *s);
    if (number("SIMGPU_DEVICES", &s->devices, 1, 1, MAX_GPUS) || number("SIMGPU_PAGE", &s->page, 2 << 20, 65536, gib) ||
        number("SIMGPU_MEMORY", &s->memory, 16 * gib, 1 << 20, 1024 * gib) ||
        number("SIMGPU_H2D", &s->h2d, 12e9, SLOWEST, FASTEST) ||
        number("SIMGPU_D2H", &s->d2h, 12e9, SLOWEST, FASTEST) ||
        number("SIMGPU_FAULT", &s->fault, 3e9, SLOWEST, FASTEST) ||
        number("SIMGPU_FAULT_EVICT", &s->fault_evict, (double)s->fault, SLOWEST, FASTEST) ||
        number("SIMGPU_HBM", &s->hbm, 700e9, SLOWEST, FASTEST) ||
        number("SIMGPU_LAUNCH_NS", &s->launch_ns, 2000, 0, 1e9) ||
        number("SIMGPU_SLICE_US", &slice_us, 2000, 50, 1e7) ||
        number("SIMGPU_CONTEXT_MEMORY", &s->context_memory, 0, 0, 1024 * gib) || read_checkpoint(s))
        return -1;
    if (mode(&s->mode)) return -1;
    s->slice_ns = slice_us * 1000;
    if (s->page & (s->page - 1)) {
        fprintf(stderr, "simgpu: SIMGPU_PAGE=%llu is not a power of two\n", (unsigned long long)s->page);
        return -1;
    }
    if (s->memory < 4 * s->page) {
        fprintf(stderr, "simgpu: SIMGPU_MEMORY must hold at least four pages of %llu bytes\n",
                (unsigned long long)s->page);
        return -1;
    }
    s->memory -= s->memory % s->page;
    s->mig = mig_profiles_read(s->mig_layouts, s->devices, s->memory, s->page);
    if (s->mig < 0) return -1;
    const char *model = getenv("SIMGPU_MODEL");
    if (model && *model)
        snprintf(s->model, sizeof s->model, "%s", model);
    else
        snprintf(s->model, sizeof s->model, "Simulated GPU %.3g GiB", (double)s->memory / gib);
    return 0;
}

int settings_read(struct settings *s) {
    /* a program may have set a German locale, in which "0.5GiB" is parsed as 0 followed by ".5GiB" */
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    locale_t before = plain ? uselocale(plain) : (locale_t)0;
    int result = read_all(s);
    if (plain) {
        uselocale(before);
        freelocale(plain);
    }
    return result;
}
