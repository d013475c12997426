/* cuInit: finds the GPUs, takes the process' slot, applies CUDA_VISIBLE_DEVICES. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/processes.h"
#include "common/uuid.h"
#include "cuda/checkpoint/restore_thread.h"
#include "cuda/driver/driver.h"
#include "cuda/streams/call_lock.h"

static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

static void after_fork_in_child(void) {
    /* the worker threads are not here, and the slot is the parent's */
    if (driver.phase == DRIVER_READY) {
        driver.phase = DRIVER_FORKED;
        processes_forked();
        call_lock_forked();
    }
}

static int named_gpu(struct state *state, const char *name, size_t length) {
    char *end;
    if (length >= 4 && strncasecmp(name, "GPU-", 4) == 0) {
        /* a beginning of a UUID is enough when it fits one GPU only */
        int found = -1;
        for (int gpu = 0; gpu < (int)state->settings.devices; gpu++) {
            char text[UUID_TEXT];
            uuid_text("GPU", state->gpus[gpu].uuid, text);
            if (strncasecmp(text, name, length) == 0) {
                if (found >= 0) return -1;
                found = gpu;
            }
        }
        return found;
    }
    long number = strtol(name, &end, 10);
    return end == name + length && length > 0 && number >= 0 && number < (long)state->settings.devices ? (int)number
                                                                                                       : -1;
}

/* As CUDA does it: the list ends at the first name that is no GPU, and a GPU named twice leaves none. */
static void choose_devices(struct state *state) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    driver.devices = 0;
    if (!list) {
        for (int gpu = 0; gpu < (int)state->settings.devices; gpu++) driver.gpu[driver.devices++] = gpu;
        return;
    }
    while (*list) {
        while (*list == ' ') list++;
        size_t length = strcspn(list, ","), trimmed = length;
        while (trimmed && list[trimmed - 1] == ' ') trimmed--;
        int gpu = named_gpu(state, list, trimmed);
        if (gpu < 0) return;
        for (int i = 0; i < driver.devices; i++) {
            if (driver.gpu[i] == gpu) {
                driver.devices = 0;
                return;
            }
        }
        driver.gpu[driver.devices++] = gpu;
        list += length;
        if (*list == ',') list++;
    }
}

static CUresult start(void) {
    static int watching_forks;
    struct state *state = state_open();
    REQUIRE(state, CUDA_ERROR_SYSTEM_NOT_READY);
    choose_devices(state);
    REQUIRE(driver.devices > 0, CUDA_ERROR_NO_DEVICE);
    int slot = processes_join(state);
    REQUIRE(slot >= 0, CUDA_ERROR_OUT_OF_MEMORY);
    const char *null_launch = getenv("SIMGPU_NULL_LAUNCH");
    driver.null_launch = null_launch && strcmp(null_launch, "1") == 0;
    driver.state = state;
    driver.slot = (uint32_t)slot;
    if (!watching_forks) {
        pthread_atfork(NULL, NULL, after_fork_in_child);
        watching_forks = 1;
    }
    restore_thread_start();
    __atomic_store_n(&driver.phase, DRIVER_READY, __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuInit(unsigned flags) {
    REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
    if (driver.phase == DRIVER_READY) return CUDA_SUCCESS;
    REQUIRE(driver.phase != DRIVER_FORKED, CUDA_ERROR_NOT_INITIALIZED);
    pthread_mutex_lock(&starting);
    CUresult result = driver.phase == DRIVER_READY ? CUDA_SUCCESS : start();
    pthread_mutex_unlock(&starting);
    return result;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    REQUIRE(version, CUDA_ERROR_INVALID_VALUE);
    *version = DRIVER_VERSION;
    return CUDA_SUCCESS;
}
