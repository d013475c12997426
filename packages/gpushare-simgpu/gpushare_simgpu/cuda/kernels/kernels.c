#include "cuda/kernels/kernels.h"

#include <string.h>

#include "cuda/kernels/module.h"

/* Kernel parameters are laid out as in PTX: each is aligned to its own size. */
struct over_u32 {
    uint32_t *p;
    uint64_t n;
    uint32_t value;
};

struct saxpy {
    uint64_t n;
    float a;
    const float *x;
    float *y;
};

struct checksum {
    const uint32_t *p;
    uint64_t n;
    uint64_t *out;
};

struct touch {
    uint8_t *p;
    uint64_t bytes, ns;
};

static struct range over(const void *p, uint64_t bytes, int written) {
    return (struct range){(uint64_t)(uintptr_t)p, bytes, written};
}

static void fill(const void *argument) {
    const struct over_u32 *a = argument;
    for (uint64_t i = 0; i < a->n; i++) a->p[i] = a->value;
}

static void plan_fill(const unsigned char *arguments, struct work *work) {
    const struct over_u32 *a = (const void *)arguments;
    work->ranges[0] = over(a->p, a->n * 4, 1);
    work->range_count = 1;
    work->passed = a->n * 4;
    work->compute = fill;
}

static void add(const void *argument) {
    const struct over_u32 *a = argument;
    for (uint64_t i = 0; i < a->n; i++) a->p[i] += a->value;
}

static void plan_add(const unsigned char *arguments, struct work *work) {
    const struct over_u32 *a = (const void *)arguments;
    work->ranges[0] = over(a->p, a->n * 4, 1);
    work->range_count = 1;
    work->passed = a->n * 8;
    work->compute = add;
}

static void saxpy(const void *argument) {
    /* kernels.ptx multiplies and adds with two roundings */
#pragma STDC FP_CONTRACT OFF
    const struct saxpy *a = argument;
    for (uint64_t i = 0; i < a->n; i++) a->y[i] = a->a * a->x[i] + a->y[i];
}

static void plan_saxpy(const unsigned char *arguments, struct work *work) {
    const struct saxpy *a = (const void *)arguments;
    work->ranges[0] = over(a->x, a->n * 4, 0);
    work->ranges[1] = over(a->y, a->n * 4, 1);
    work->range_count = 2;
    work->passed = a->n * 12;
    work->compute = saxpy;
}

static void checksum(const void *argument) {
    const struct checksum *a = argument;
    uint64_t sum = 0;
    for (uint64_t i = 0; i < a->n; i++) sum += (uint64_t)a->p[i] * (2 * i + 1);
    *a->out += sum;
}

static void plan_checksum(const unsigned char *arguments, struct work *work) {
    const struct checksum *a = (const void *)arguments;
    work->ranges[0] = over(a->p, a->n * 4, 0);
    work->ranges[1] = over(a->out, 8, 1);
    work->range_count = 2;
    work->passed = a->n * 4;
    work->compute = checksum;
}

static void plan_spin(const unsigned char *arguments, struct work *work) {
    uint64_t ns;
    memcpy(&ns, arguments, sizeof ns);
    work->device_ns = ns;
}

static void plan_touch(const unsigned char *arguments, struct work *work) {
    const struct touch *a = (const void *)arguments;
    work->ranges[0] = over(a->p, a->bytes, 1);
    work->range_count = 1;
    work->device_ns = a->ns;
    /* no computation, because it changes nothing and reading would only commit host memory */
}

static const struct kernel KERNELS[] = {
    {"fill_u32", 3, {{0, 8}, {8, 8}, {16, 4}}, plan_fill},
    {"add_u32", 3, {{0, 8}, {8, 8}, {16, 4}}, plan_add},
    {"saxpy_f32", 4, {{0, 8}, {8, 4}, {16, 8}, {24, 8}}, plan_saxpy},
    {"checksum_u32", 3, {{0, 8}, {8, 8}, {16, 8}}, plan_checksum},
    {"spin", 1, {{0, 8}}, plan_spin},
    {"touch", 3, {{0, 8}, {8, 8}, {16, 8}}, plan_touch},
};

const struct kernel *kernel_find(const char *name) {
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++)
        if (strcmp(KERNELS[i].name, name) == 0) return &KERNELS[i];
    return NULL;
}

uint64_t kernel_device_ns(int gpu, const struct kernel_launch *launch) {
    struct work work = {0};
    unsigned char arguments[KERNEL_ARGUMENTS] __attribute__((aligned(16)));
    memcpy(arguments, launch->arguments, sizeof arguments);
    launch->function->kernel->plan(arguments, &work);
    return compute_device_ns(gpu, &work);
}

uint64_t kernel_run(struct stream *stream, const struct kernel_launch *launch, uint64_t ready) {
    /* the arguments, aligned for the structs above */
    unsigned char arguments[KERNEL_ARGUMENTS] __attribute__((aligned(16)));
    memcpy(arguments, launch->arguments, sizeof arguments);
    struct work work = {.kernel = 1, .argument = arguments, .queued_ns = launch->queued_ns};
    launch->function->kernel->plan(arguments, &work);
    return compute_run(stream, &work, ready);
}
