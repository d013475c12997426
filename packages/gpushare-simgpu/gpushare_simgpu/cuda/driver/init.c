/* cuInit: finds the GPUs, takes a slot for the process, and applies CUDA_VISIBLE_DEVICES. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "common/processes.h"
#include "cuda/checkpoint/restore_thread.h"
#include "cuda/driver/driver.h"
#include "cuda/driver/visible.h"
#include "cuda/streams/call_lock.h"

static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

static void after_fork_in_child(void) {
    /* the worker threads do not exist in the child, and the slot belongs to the parent */
    if (driver.phase == DRIVER_READY) {
        driver.phase = DRIVER_FORKED;
        processes_forked();
        call_lock_forked();
    }
}

static CUresult start(void) {
    static int watching_forks;
    struct state *state = state_open();
    REQUIRE(state, CUDA_ERROR_SYSTEM_NOT_READY);
    driver.devices = visible_numbers(state, driver.gpu);
    for (int i = 0; i < driver.devices; i++) memcpy(driver.uuid[i], state->gpus[driver.gpu[i]].uuid, 16);
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
