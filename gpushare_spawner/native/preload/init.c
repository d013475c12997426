/* Connects the layers. cuInit starts everything; before that this library has no thread, no socket and no file.
   A forked child starts again: RESET_IN_CHILD in platform/libc.h. */
#include <pthread.h>

#include "contexts/captures.h"
#include "driver/gpus.h"
#include "gate/gate.h"
#include "gate/launch.h"
#include "lease/worker.h"
#include "platform/settings.h"

static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
static bool started;

CUresult wrapped_cuInit(unsigned flags);
CUresult wrapped_cuInit(unsigned flags) {
    driver_load();
    struct passage *passage = settings_engine_suspends() ? launch_enter_call() : NULL;
    CUresult result = real.cuInit(flags);
    launch_leave(passage);
    if (result != CUDA_SUCCESS || !settings_share()) return result;
    libc_watch_forks(); /* before a lock is taken, so that it is not locked in a child */
    pthread_mutex_lock(&starting);
    if (!started) {
        started = true;
        log_prepare();
        settings_engine();
        gpus_read();
        captures_on_change(gate_refresh);
        gate_prepare();
        launch_prepare();
        if (gpu_count) worker_start();
    }
    pthread_mutex_unlock(&starting);
    return result;
}
EXPORTED(cuInit);

RESET_IN_CHILD(init_reset);
void init_reset(void) {
    started = false; /* the child's cuInit starts everything again */
    pthread_mutex_init(&starting, NULL);
}
