#include "platform/settings.h"

#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>

bool settings_share(void) {
    static _Atomic int read; /* 0: not read yet, 1: yes, 2: no */
    int share = atomic_load_explicit(&read, memory_order_relaxed);
    if (!share) {
        const char *socket = getenv("GPUSHARE_SOCKET"), *disabled = getenv("GPUSHARE_DISABLE");
        bool off = disabled && *disabled && strcmp(disabled, "0") != 0;
        /* a setuid program can get this library from /etc/ld.so.preload, and its environment is the caller's */
        share = socket && *socket && !off && !getauxval(AT_SECURE) ? 1 : 2;
        atomic_store_explicit(&read, share, memory_order_relaxed);
    }
    return share == 1;
}

_Atomic int settings_engine_read;

enum engine settings_engine(void) {
    int engine = atomic_load_explicit(&settings_engine_read, memory_order_relaxed);
    if (!engine) {
        const char *setting = getenv("GPUSHARE_ENGINE");
        engine = setting && strcmp(setting, "suspend") == 0   ? ENGINE_SUSPEND
                 : setting && strcmp(setting, "observe") == 0 ? ENGINE_OBSERVE
                                                              : ENGINE_MANAGED;
        atomic_store_explicit(&settings_engine_read, engine, memory_order_relaxed);
    }
    return (enum engine)engine;
}
