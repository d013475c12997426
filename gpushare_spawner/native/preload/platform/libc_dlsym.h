/* The C library's own dlsym; this library exports one too. */
#pragma once

#include <stdbool.h>

typedef void *(*dlsym_function)(void *, const char *);

/* The first after this library, in the order in which libraries were loaded. NULL: there is none (glibc before 2.34, in
   a program without libdl). Any thread; takes no lock of this library. */
dlsym_function libc_dlsym_next(void);

/* What it answers; RTLD_NEXT is meant for this library. */
void *libc_dlsym(void *handle, const char *name);

/* Whether the pointer is into this library. */
bool libc_dlsym_is_ours(const void *pointer);
