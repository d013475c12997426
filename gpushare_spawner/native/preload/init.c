/* cuInit begins everything: until then this library has no thread, no socket and no file. */
#include <pthread.h>
#include <stdatomic.h>

#include "fork.h"
#include "gate/gate.h"
#include "driver/gpus.h"
#include "driver/resolve.h"
#include "lease/worker.h"

static pthread_mutex_t beginning = PTHREAD_MUTEX_INITIALIZER;
static bool begun;

void session_forget(void) {
    begun = false;
    gpu_count = 0;
    pthread_mutex_init(&beginning, NULL);
}

CUresult wrapped_cuInit(unsigned flags) {
    driver_load();
    CUresult result = real.cuInit(flags);
    if (result != CUDA_SUCCESS || !sharing_wanted()) return result;
    pthread_mutex_lock(&beginning);
    if (!begun) {
        begun = true;
        log_prepare();
        fork_watch();
        gpus_find();
        gate_prepare();
        if (gpu_count) worker_start();
    }
    pthread_mutex_unlock(&beginning);
    return result;
}
EXPORTED(cuInit);
