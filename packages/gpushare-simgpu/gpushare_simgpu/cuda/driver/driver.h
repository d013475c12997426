/* The state of the driver in this process. */
#ifndef SIMGPU_DRIVER_H
#define SIMGPU_DRIVER_H

#include <string.h>

#include "common/mig.h"
#include "cuda/driver/driver_api.h"

enum { DRIVER_FRESH, DRIVER_READY, DRIVER_FORKED };

struct driver {
    int phase;
    struct state *state;
    uint32_t slot;              /* of this process */
    int devices;                /* visible ones */
    int gpu[MAX_GPUS];          /* the number of each device's GPU or MIG instance on the machine */
    uint8_t uuid[MAX_GPUS][16]; /* UUID of each device when the program began */
    int null_launch;            /* SIMGPU_NULL_LAUNCH: launches are checked and dropped */
};

extern struct driver driver;

/* As in CUDA, nothing works before cuInit, or in a fork of a process that has called it. */
#define REQUIRE_INIT()                                                                                                 \
    do {                                                                                                               \
        if (__builtin_expect(driver.phase != DRIVER_READY, 0)) return CUDA_ERROR_NOT_INITIALIZED;                      \
    } while (0)

#define REQUIRE(condition, error)                                                                                      \
    do {                                                                                                               \
        if (!(condition)) return error;                                                                                \
    } while (0)

static inline int device_exists(CUdevice device) {
    return device >= 0 && device < driver.devices;
}

/* False if the administrator has removed the MIG instance or has put the GPU into MIG mode. */
static inline int device_remains(CUdevice device) {
    int number = driver.gpu[device];
    int there =
        mig_is_instance(driver.state, number) ? mig_exists(driver.state, number) : !driver.state->gpus[number].mig;
    return there && memcmp(driver.uuid[device], driver.state->gpus[number].uuid, 16) == 0;
}

#endif
