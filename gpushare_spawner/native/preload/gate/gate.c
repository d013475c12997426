#define _GNU_SOURCE
#include "gate/gate.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "contexts/captures.h"
#include "platform/futex.h"
#include "platform/wake.h"

/* numbers of membarrier(2), Linux 4.14; glibc 2.17 has no name for them */
#define MEMBARRIER_PRIVATE_EXPEDITED          (1 << 3)
#define MEMBARRIER_REGISTER_PRIVATE_EXPEDITED (1 << 4)

bool gate_fences;

static pthread_mutex_t turning = PTHREAD_MUTEX_INITIALIZER; /* of `open` and `fast` together */
void gate_prepare(void) {
#ifdef GATE_ALWAYS_FENCES
    gate_fences = true;
    return;
#endif
    gate_fences = syscall(SYS_membarrier, MEMBARRIER_REGISTER_PRIVATE_EXPEDITED, 0, 0) != 0;
    if (gate_fences) log_line(LOG_INFO, "membarrier(2) is missing; each launch makes a memory fence");
}

static void refresh(struct gpu *gpu) {
    atomic_store(&gpu->fast,
                 atomic_load(&gpu->open) == GATE_OPEN && !atomic_load(&gpu->paced) && !captures_in_progress());
}

void gate_refresh(struct gpu *gpu) {
    pthread_mutex_lock(&turning);
    refresh(gpu);
    pthread_mutex_unlock(&turning);
}

void gate_open(struct gpu *gpu) {
    pthread_mutex_lock(&turning);
    atomic_store(&gpu->open, GATE_OPEN);
    refresh(gpu);
    pthread_mutex_unlock(&turning);
    futex_wake(&gpu->open);
}

/* Every launch from now on sees `state`, or is seen inside. */
static void leave_open_state(struct gpu *gpu, enum gate_state state) {
    pthread_mutex_lock(&turning);
    atomic_store(&gpu->open, state);
    refresh(gpu);
    pthread_mutex_unlock(&turning);
    if (gate_fences || syscall(SYS_membarrier, MEMBARRIER_PRIVATE_EXPEDITED, 0, 0) != 0)
        atomic_thread_fence(memory_order_seq_cst);
}

void gate_shut(struct gpu *gpu) {
    leave_open_state(gpu, GATE_SHUT);
}

void gate_rest(struct gpu *gpu) {
    leave_open_state(gpu, GATE_RESTING);
}

void gate_stir(struct gpu *gpu) {
    pthread_mutex_lock(&turning);
    if (atomic_load(&gpu->open) == GATE_RESTING) atomic_store(&gpu->open, GATE_OPEN);
    refresh(gpu);
    pthread_mutex_unlock(&turning);
    wake_up();
}

void gate_forget(void) {
    pthread_mutex_init(&turning, NULL);
}
