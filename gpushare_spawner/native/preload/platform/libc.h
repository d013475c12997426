/* Functions of the C library that this library is not linked against: dlsym, which it exports itself, and functions of
   libpthread and libdl. Linked against those two, it would make the dynamic linker map both into every process, which
   is half of the cost of its start; and musl's programs have some of these functions under other names. Also the
   registration of functions for forked children.

   Included by common.h: the functions are called by their usual names. */
#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <time.h>

typedef void *(*dlsym_function)(void *, const char *);

/* The first dlsym after this library, in the order in which libraries were loaded. NULL: there is none (glibc before
   2.34, in a program without libdl). Any thread; takes no lock of this library. */
dlsym_function libc_dlsym_next(void);

/* The answer of that dlsym; RTLD_NEXT means the libraries after this one. NULL where there is no dlsym. */
void *libc_dlsym(void *handle, const char *name);

/* Whether the pointer is into this library. */
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

/* Look the functions up. False: this C library lacks one of them, and the process cannot be shared. Cheap after the
   first time; takes no lock of this library, but the dynamic linker's. */
bool libc_load(void);

/* Loaded atomically: another thread may be looking the functions up, and store the same addresses. */
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

/* Register a file's function that each forked child calls before fork() returns. A child is another process to the
   agent, and has no other thread: locks may have been held by threads of the parent, and contexts, memory and
   connections are the parent's. The function sets the file's state to that of a new process: it initialises locks,
   closes descriptors and forgets lists, without freeing them (a fork copies memory on write, and most children exec at
   once). It takes no lock, allocates nothing and calls no driver. The functions run in no particular order.

   The macro stands before the function. Registration is an entry of the section `gpushare_fork`. .ci/c_layers.py
   reports each variable that is neither named in such a function nor listed there as kept. The entry is an offset, not
   a pointer: the dynamic linker would have to relocate each pointer in every process. */
#define RESET_IN_CHILD(function)                                                                                       \
    void function(void) __attribute__((visibility("hidden"), used));                                                   \
    __asm__(".pushsection gpushare_fork, \"aR\"\n.balign 4\nreset_in_child_" #function ":\n.long " #function           \
            " - .\n.popsection\n")

/* Have the registered functions called in each child that is forked from now on. After libc_load. Any thread; repeated
   calls do no harm. */
void libc_watch_forks(void);
