/* C library functions against which this library is not linked: dlsym, which it exports itself, and functions of
   libpthread and libdl. Linking against those two would make the dynamic linker map both into every process, which
   would be half of this library's startup cost; and musl has some of these functions under other names. Also the
   registration of functions for forked children.

   Included by common.h, so that the functions are called by their usual names. */
#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <time.h>

typedef void *(*dlsym_function)(void *, const char *);

/* Return the first dlsym after this library, in load order. NULL: there is none (glibc before 2.34, in a program
   without libdl). Any thread; takes no lock of this library. */
dlsym_function libc_dlsym_next(void);

/* Return the result of that dlsym; RTLD_NEXT refers to the libraries after this library. NULL if there is no dlsym. */
void *libc_dlsym(void *handle, const char *name);

/* Whether the pointer points into this library. */
bool libc_is_own_address(const void *pointer);

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

/* Look up the functions. False: this C library lacks one of them, and the process cannot be shared. Cheap after the
   first call; takes no lock of this library, only the dynamic linker's. */
bool libc_load(void);

/* Loaded atomically, because another thread may be looking up the functions and storing the same addresses. */
#define LATE(function)          __atomic_load_n(&late.function, __ATOMIC_RELAXED)
#define dlopen                  LATE(open_library)
#define dlerror                 LATE(library_error)
#define pthread_create          LATE(create)
#define pthread_setname_np      LATE(name)
#define pthread_sigmask         LATE(signal_mask)
#define pthread_key_create      LATE(key_create)
#define pthread_setspecific     LATE(set_specific)
#define pthread_setcancelstate  LATE(cancel_state)
#define pthread_mutex_timedlock LATE(lock_until)

/* Register a file's function that each forked child calls before fork() returns. For the agent a child is another
   process, and it has no other threads: threads of the parent may have held locks, and contexts, memory and connections
   belong to the parent. The function resets the file's state to that of a new process: it initializes locks, closes
   descriptors and drops lists without freeing them (a fork copies memory on write, and most children exec immediately).
   It takes no lock, allocates nothing and does not call the driver. The functions run in no particular order.

   The macro precedes the function. It adds an entry to the section `gpushare_fork`. .ci/c_layers.py reports each
   variable that is neither named in such a function nor listed there as kept. The entry is an offset instead of a
   pointer, which the dynamic linker would have to relocate in every process. */
#define RESET_IN_CHILD(function)                                                                                       \
    void function(void) __attribute__((visibility("hidden"), used));                                                   \
    __asm__(".pushsection gpushare_fork, \"aR\"\n.balign 4\nreset_in_child_" #function ":\n.long " #function           \
            " - .\n.popsection\n")

/* Arrange for the registered functions to be called in each child that is forked from now on. Called after libc_load.
   Any thread; repeated calls are harmless. */
void libc_watch_forks(void);
