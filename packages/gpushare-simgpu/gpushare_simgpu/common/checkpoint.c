#include "common/checkpoint.h"

#include "common/futex.h"

void checkpoint_reset(struct checkpoint *checkpoint) {
    __atomic_store_n(&checkpoint->thread, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&checkpoint->state, PROCESS_RUNNING, __ATOMIC_RELAXED);
    __atomic_store_n(&checkpoint->phase, REQUEST_NONE, __ATOMIC_RELEASE);
    futex_wake_all(&checkpoint->phase, 1);
}

int checkpoint_advance(struct checkpoint *checkpoint, enum request_phase from, enum request_phase to) {
    uint32_t expected = from;
    if (!__atomic_compare_exchange_n(&checkpoint->phase, &expected, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return 0;
    futex_wake_all(&checkpoint->phase, 1);
    return 1;
}

void checkpoint_wait(struct checkpoint *checkpoint, enum request_phase seen, uint64_t timeout_ns) {
    futex_wait(&checkpoint->phase, seen, timeout_ns, 1);
}
