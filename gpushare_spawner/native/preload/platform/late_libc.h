/* Functions of libpthread and libdl, looked up when they are first needed. A library that names them as
   needed makes the dynamic linker map them into every process, which is half of what its start would cost; and musl's
   programs have some of these functions under no such name.

   Included through common.h: the functions are called by their usual names. */
#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <time.h>

struct late_libc {
    void *(*open_library)(const char *, int);
    char *(*library_error)(void);
    int (*at_fork)(void (*)(void), void (*)(void), void (*)(void), void *);
    int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    int (*name)(pthread_t, const char *);
    int (*signal_mask)(int, const sigset_t *, sigset_t *);
    int (*key_create)(pthread_key_t *, void (*)(void *));
    int (*set_specific)(pthread_key_t, const void *);
    int (*cancel_state)(int, int *);
    int (*lock_until)(pthread_mutex_t *, const struct timespec *);
};
extern struct late_libc late __attribute__((visibility("hidden")));

/* Look them up. False: this C library lacks them, and the process cannot be shared. Cheap after the first time; takes
   no lock of this library, but the dynamic linker's. */
bool late_libc_load(void);

/* Have it called in each forked child from now on. Once they are looked up. False: no memory. */
bool late_libc_at_fork(void (*in_child)(void));

#define dlopen                  late.open_library
#define dlerror                 late.library_error
#define pthread_create          late.create
#define pthread_setname_np      late.name
#define pthread_sigmask         late.signal_mask
#define pthread_key_create      late.key_create
#define pthread_setspecific     late.set_specific
#define pthread_setcancelstate  late.cancel_state
#define pthread_mutex_timedlock late.lock_until
