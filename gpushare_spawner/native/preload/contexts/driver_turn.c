#include "contexts/driver_turn.h"

#include <stdatomic.h>
#include <time.h>

#include "contexts/contexts.h"
#include "driver/driver.h"
#include "driver/suspension.h"

static _Atomic bool stopped;

bool driver_turn_begin(void) {
    if (atomic_load(&stopped) || suspension_stops_background()) return false;
    pthread_mutex_lock(&contexts_lock);
    if (!atomic_load(&stopped)) return true;
    pthread_mutex_unlock(&contexts_lock);
    return false;
}

void driver_turn_end(void) {
    real.cuCtxSetCurrent(NULL);
    pthread_mutex_unlock(&contexts_lock);
}

void driver_turns_stop(void) {
    atomic_store(&stopped, true);
    /* an exit must not hang on a driver that does: half a second, then on */
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 500000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    if (pthread_mutex_timedlock(&contexts_lock, &until) == 0) pthread_mutex_unlock(&contexts_lock);
}

void driver_turns_allow(void) {
    atomic_store(&stopped, false);
}
