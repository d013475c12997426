/* Initialization and shutdown of NVML, and its information about itself. */
#include "nvml/library.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "common/engines.h"
#include "common/processes.h"

static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
static struct state *state;
static unsigned users;

struct state *nvml_state(void) {
    return __atomic_load_n(&state, __ATOMIC_ACQUIRE);
}

/* Handles are the addresses of these bytes, which are unused. */
static char handles[MAX_NUMBERS];

int nvml_number(nvmlDevice_t device) {
    for (int number = 0; number < (int)nvml_state()->numbers; number++)
        if ((void *)device == (void *)&handles[number])
            return !mig_is_instance(nvml_state(), number) || mig_exists(nvml_state(), number) ? number : -1;
    return -1;
}

nvmlDevice_t nvml_handle(int number) {
    return (nvmlDevice_t)(void *)&handles[number];
}

int nvml_divided(int number) {
    return !mig_is_instance(nvml_state(), number) && nvml_state()->gpus[number].mig;
}

void nvml_visit(int number, void (*visit)(int number, void *data), void *data) {
    if (!nvml_divided(number)) {
        visit(number, data);
        return;
    }
    for (int i = 0; i < MIG_INSTANCES; i++) {
        int instance = mig_number(nvml_state(), number, i);
        if (mig_exists(nvml_state(), instance)) visit(instance, data);
    }
}

/* Add the busy time of the last second, multiplied by the busy compute slices. */
static void add_busy(int number, void *data) {
    processes_reap(state, 0);
    gpu_lock(state, number);
    uint64_t busy = engine_recent_busy(&state->gpus[number], clock_now());
    gpu_unlock(state, number);
    uint32_t all = mig_profiles[MIG_PROFILES - 1].compute;
    uint32_t slices = mig_is_instance(state, number) ? mig_profiles[state->gpus[number].place.profile].compute : all;
    *(uint64_t *)data += busy * slices / all;
}

unsigned nvml_busy_percent(int gpu) {
    uint64_t busy = 0;
    nvml_visit(gpu, add_busy, &busy);
    uint64_t percent = (busy * 100 + NS_PER_SECOND / 2) / NS_PER_SECOND;
    return percent > 100 ? 100 : (unsigned)percent;
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    pthread_mutex_lock(&starting);
    struct state *found = state ? state : state_open();
    if (found) {
        __atomic_store_n(&state, found, __ATOMIC_RELEASE);
        users++;
    }
    pthread_mutex_unlock(&starting);
    return found ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
}

EXPORT nvmlReturn_t nvmlInit_v2(void) {
    return nvmlInitWithFlags(0);
}

EXPORT nvmlReturn_t nvmlInit(void) {
    return nvmlInitWithFlags(0);
}

EXPORT nvmlReturn_t nvmlShutdown(void) {
    pthread_mutex_lock(&starting);
    nvmlReturn_t result = users ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    if (users && --users == 0) __atomic_store_n(&state, NULL, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&starting);
    return result;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t error) {
    switch (error) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_ERROR_FUNCTION_NOT_FOUND: return "Function Not Found";
    case NVML_ERROR_IN_USE: return "In use by another client";
    case NVML_ERROR_INSUFFICIENT_RESOURCES: return "Insufficient Resources";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    case NVML_ERROR_UNKNOWN: break;
    }
    return "Unknown Error";
}

static nvmlReturn_t answer(char *out, unsigned length, const char *text) {
    REQUIRE(nvml_state(), NVML_ERROR_UNINITIALIZED);
    REQUIRE(out, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(length > strlen(text), NVML_ERROR_INSUFFICIENT_SIZE);
    snprintf(out, length, "%s", text);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    return answer(version, length, DRIVER_TEXT);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    return answer(version, length, "13." DRIVER_TEXT);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    REQUIRE(nvml_state(), NVML_ERROR_UNINITIALIZED);
    REQUIRE(version, NVML_ERROR_INVALID_ARGUMENT);
    *version = CUDA_VERSION;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    char path[64], line[4096];
    REQUIRE(nvml_state(), NVML_ERROR_UNINITIALIZED);
    REQUIRE(name && length, NVML_ERROR_INVALID_ARGUMENT);
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "re");
    REQUIRE(file, NVML_ERROR_NOT_FOUND);
    size_t size = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    line[size] = 0; /* the arguments are separated by zeros, so only the program's name remains */
    snprintf(name, length, "%s", line);
    return NVML_SUCCESS;
}
