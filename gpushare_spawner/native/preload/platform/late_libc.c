#define _GNU_SOURCE
#include <stdatomic.h>
#include <string.h>

#include "platform/common.h"
#include "platform/libc_dlsym.h"

struct late_libc late;

static const char functions[][24] = {
    "dlopen",
    "dlerror",
    "__register_atfork",
    "pthread_create",
    "pthread_setname_np",
    "pthread_sigmask",
    "pthread_key_create",
    "pthread_setspecific",
    "pthread_setcancelstate",
    "pthread_mutex_timedlock",
};
#define FUNCTIONS (sizeof functions / sizeof *functions)
_Static_assert(FUNCTIONS == sizeof late / sizeof(void *), "in the order of struct late_libc");

bool late_libc_load(void) {
    static _Atomic bool loaded;
    if (atomic_load_explicit(&loaded, memory_order_acquire)) return true;
    bool all = true;
    for (size_t i = 0; i < FUNCTIONS; i++) {
        /* several threads may do this at once: each writes the same */
        void *found = libc_dlsym(RTLD_DEFAULT, functions[i]);
        /* before glibc 2.34, in a program that is not linked against libpthread itself: the driver has brought it */
        if (!found && late.open_library) {
            void *library = late.open_library("libpthread.so.0", RTLD_LAZY | RTLD_NOLOAD);
            if (library) found = libc_dlsym(library, functions[i]);
        }
        all &= found != NULL;
        __atomic_store_n((void **)&late + i, found, __ATOMIC_RELAXED);
    }
    if (all)
        atomic_store_explicit(&loaded, true, memory_order_release);
    else if (late.library_error)
        late.library_error(); /* the program's next dlerror() is about its own calls */
    return all;
}

bool late_libc_at_fork(void (*in_child)(void)) {
    /* what pthread_atfork is in glibc, whose own name for it is not in the shared library everywhere */
    extern void *__dso_handle __attribute__((visibility("hidden")));
    return late.at_fork(NULL, NULL, in_child, &__dso_handle) == 0;
}
