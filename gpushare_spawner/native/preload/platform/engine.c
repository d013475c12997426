#include "platform/engine.h"

#include <stdlib.h>
#include <string.h>

_Atomic int engine_read;

enum engine engine_wanted(void) {
    int known = atomic_load_explicit(&engine_read, memory_order_relaxed);
    if (!known) {
        const char *setting = getenv("GPUSHARE_ENGINE");
        known = setting && strcmp(setting, "suspend") == 0   ? ENGINE_SUSPEND
                : setting && strcmp(setting, "observe") == 0 ? ENGINE_OBSERVE
                                                             : ENGINE_MANAGED;
        atomic_store_explicit(&engine_read, known, memory_order_relaxed);
    }
    return (enum engine)known;
}
