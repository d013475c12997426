/* What the benchmarks' C programs share: functions of the driver by name, errors, and a clock. */
#pragma once

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static void *driver;

static void *find(const char *name) {
    void *call = dlsym(driver, name);
    if (!call) {
        fprintf(stderr, "no %s in the driver\n", name);
        exit(1);
    }
    return call;
}

static void must(const char *what, int code) {
    if (!code) return;
    fprintf(stderr, "%s: CUDA error %d\n", what, code);
    exit(1);
}

/* Nanoseconds of the monotonic clock. */
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}
