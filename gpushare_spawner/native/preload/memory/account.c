#include "memory/account.h"

#include <time.h>

#include "platform/engine.h"
#include "platform/wake.h"

_Atomic bool account_taken;

void account_lock_contended(void) {
    unsigned tries = 0;
    do {
        while (atomic_load_explicit(&account_taken, memory_order_relaxed)) {
            struct timespec moment = {0, 20000};
            if (++tries > 200) nanosleep(&moment, NULL);
        }
    } while (atomic_exchange_explicit(&account_taken, true, memory_order_acquire));
}

bool account_take_within(struct gpu *gpu, const struct memory_wanted *wanted, uint64_t most) {
    uint64_t held = driver_memory_bytes(gpu);
    size_t growth = account_growth(gpu, wanted);
    account_lock();
    bool fits = account_fits(gpu, growth, held, most ? most : atomic_load(&gpu->allowance));
    if (fits) account_add(gpu, wanted->bytes, wanted->account);
    account_unlock();
    return fits;
}

uint64_t account_used(const struct gpu *gpu) {
    return atomic_load(&gpu->managed) + atomic_load(&gpu->plain) + driver_memory_bytes(gpu);
}

struct account_figures account_told(const struct gpu *gpu) {
    uint64_t managed = atomic_load(&gpu->managed), plain = atomic_load(&gpu->plain) + driver_memory_bytes(gpu);
    if (engine_wanted() == ENGINE_MANAGED) return (struct account_figures){managed, plain, 0};
    uint64_t all = managed + plain, missing = atomic_load(&gpu->short_of);
    uint64_t needed = missing ? atomic_load(&gpu->short_above) + missing : 0;
    return all >= needed ? (struct account_figures){0, all, 0} : (struct account_figures){0, needed, needed - all};
}

void account_settle(void) {
    account_lock();
    account_unlock();
}

void account_cached(struct gpu *gpu, size_t bytes, bool begins) {
    if (begins)
        atomic_fetch_add(&gpu->cached, bytes);
    else
        atomic_fetch_sub(&gpu->cached, bytes);
}

void account_wake(struct gpu *gpu) {
    if (wake_listens() && !atomic_exchange(&gpu->changed, true)) wake_up();
}

void account_forget(void) {
    atomic_store(&account_taken, false);
}
