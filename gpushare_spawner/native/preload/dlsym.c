/* dlsym is exported at glibc's versions. Names that are no driver's are passed on by a tail jump, so that the real
   dlsym sees the program's return address: RTLD_NEXT then means next after the caller, not next after this library.
   Up to that jump nothing of the C library is called: see platform/libc_dlsym.c. */
#define _GNU_SOURCE
#include "nvml/nvml_table.h"
#include "platform/common.h"
#include "platform/libc_dlsym.h"
#include "wrapper_table.h"

#if defined __x86_64__
#define FIRST_VERSION "GLIBC_2.2.5"
#elif defined __aarch64__
#define FIRST_VERSION "GLIBC_2.17"
#else
#error "libgpushare.so is written for x86-64 and aarch64"
#endif

#if defined __clang__
#define TAIL_JUMP __attribute__((musttail)) return
#else
#define TAIL_JUMP return /* gcc at -O2 does it unasked; only clang promises it */
#endif

static void *driver_symbol(void *handle, const char *name) {
    void *pointer = libc_dlsym(handle, name);
    if (!pointer) return NULL;
    if (libc_dlsym_is_ours(pointer)) {
        /* found in the global scope because this library exports it: the answer must be what it would be without us */
        pointer = libc_dlsym(RTLD_NEXT, name);
        if (!pointer) return NULL;
    }
    return *name == 'n' ? nvml_table_find(pointer, name) : wrapper_table_find(pointer);
}

static void *dlsym_34(void *handle, const char *name) __attribute__((used));
static void *dlsym_first(void *handle, const char *name) __attribute__((used));

static void *dlsym_34(void *handle, const char *name) {
    dlsym_function next = libc_dlsym_next();
    if (unlikely(!next)) return NULL; /* before glibc 2.34, in a program without libdl */
    bool cuda = name && name[0] == 'c' && name[1] == 'u' && name[2] >= 'A' && name[2] <= 'Z';
    bool nvml = name && name[0] == 'n' && name[1] == 'v' && name[2] == 'm' && name[3] == 'l';
    if (likely(!cuda && !nvml) || handle == RTLD_NEXT) TAIL_JUMP next(handle, name);
    return driver_symbol(handle, name);
}

static void *dlsym_first(void *handle, const char *name) {
    TAIL_JUMP dlsym_34(handle, name);
}

extern __typeof__(dlsym_34) gpushare_dlsym_34 __attribute__((alias("dlsym_34"), visibility("default")));
extern __typeof__(dlsym_34) gpushare_dlsym_first __attribute__((alias("dlsym_first"), visibility("default")));
__asm__(".symver gpushare_dlsym_34, dlsym@@GLIBC_2.34, remove");
__asm__(".symver gpushare_dlsym_first, dlsym@" FIRST_VERSION ", remove");
