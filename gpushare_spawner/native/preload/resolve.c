/* Maps the driver's functions to their wrappers when a program looks them up: with dlsym, which this library exports,
   and with cuGetProcAddress. Also contains the function that AddressSanitizer looks up.

   This file calls no C library function by name: sanitizers call dlsym before they are ready for calls to functions
   that they replace. .ci/c_layers.py checks this rule. */
#define _GNU_SOURCE
#include "driver/driver.h"
#include "nvml/nvml.h"
#include "platform/settings.h"

#define SINGLE(name, symbol, version, parameters, arguments, stream) CUresult wrapped_##name parameters;
#define STREAMED(name, symbol, version, twin, parameters, arguments, stream)                                           \
    CUresult wrapped_##name parameters;                                                                                \
    CUresult wrapped_##name##_ptsz parameters;
#define IMPLICIT(name, symbol, version, twin, parameters, arguments)                                                   \
    CUresult wrapped_##name parameters;                                                                                \
    CUresult wrapped_##name##_ptds parameters;
#define WRAPPED(name, symbol, version, per_thread, parameters) CUresult wrapped_##name parameters;
#define WATCHED(name, symbol, version, per_thread, parameters, arguments)                                              \
    CUresult wrapped_##name parameters;                                                                                \
    CUresult suspendable_##name parameters;
#define SUSPENDABLE(name, symbol, version, per_thread, parameters, arguments) CUresult suspendable_##name parameters;
#define CALLED(name, parameters)
#include "driver/driver_calls.h"

/* The offset of each wrapper from its entry in this table, by the number of the driver's function in struct
   real_driver; 0: not wrapped. There are two tables: for engine `suspend`, and for the other engines. */
#define OFFSET(wrapper, name) ".long " #wrapper "_" #name " - .\n"
#define NO_OFFSET             ".long 0\n"
/* clang-format off */
__asm__(".section .rodata\n.balign 4\n.globl resolve_offsets\n.hidden resolve_offsets\nresolve_offsets:\n"
#define SINGLE(name, symbol, version, parameters, arguments, stream)          OFFSET(wrapped, name)
#define STREAMED(name, symbol, version, twin, parameters, arguments, stream)  OFFSET(wrapped, name) OFFSET(wrapped, name##_ptsz)
#define IMPLICIT(name, symbol, version, twin, parameters, arguments)          OFFSET(wrapped, name) OFFSET(wrapped, name##_ptds)
#define WRAPPED(name, symbol, version, per_thread, parameters)                OFFSET(wrapped, name)
#define SUSPENDABLE(name, symbol, version, per_thread, parameters, arguments) NO_OFFSET
#define CALLED(name, parameters)                                              NO_OFFSET
#include "driver/driver_calls.h"
        ".globl resolve_offsets_suspend\n.hidden resolve_offsets_suspend\nresolve_offsets_suspend:\n"
#define SINGLE(name, symbol, version, parameters, arguments, stream)          OFFSET(wrapped, name)
#define STREAMED(name, symbol, version, twin, parameters, arguments, stream)  OFFSET(wrapped, name) OFFSET(wrapped, name##_ptsz)
#define IMPLICIT(name, symbol, version, twin, parameters, arguments)          OFFSET(wrapped, name) OFFSET(wrapped, name##_ptds)
#define WRAPPED(name, symbol, version, per_thread, parameters)                OFFSET(wrapped, name)
#define WATCHED(name, symbol, version, per_thread, parameters, arguments)     OFFSET(suspendable, name)
#define SUSPENDABLE(name, symbol, version, per_thread, parameters, arguments) OFFSET(suspendable, name)
#define CALLED(name, parameters)                                              NO_OFFSET
#include "driver/driver_calls.h"
        ".text\n");
/* clang-format on */
extern const int32_t resolve_offsets[] __attribute__((visibility("hidden")));
extern const int32_t resolve_offsets_suspend[] __attribute__((visibility("hidden")));

/* Return the wrapper for an address in the real driver, or the address itself. The first call loads the driver's
   functions, under a lock. The wrapper is determined by the function at the address, not by the suffix of a name. */
static void *resolve_wrapper(void *pointer) {
    if (!pointer || !settings_share() || !driver_load()) return pointer;
    int number = driver_number_of(pointer);
    if (number < 0) return pointer;
    const int32_t *table = settings_engine() == ENGINE_SUSPEND ? resolve_offsets_suspend : resolve_offsets;
    const int32_t *offset = &table[number];
    return *offset ? (char *)offset + *offset : pointer;
}

/* The same for a result of cuGetProcAddress, with the arguments of its call. */
static void *resolve_answer(void *pointer, const char *symbol, int version, uint64_t flags) {
    void *wrapper = resolve_wrapper(pointer);
    if (wrapper != pointer || !symbol || !settings_share()) return wrapper;
    /* cuGetProcAddress may return a function that the library does not export */
    return driver_add_answer(pointer, symbol, version, flags) ? resolve_wrapper(pointer) : pointer;
}

CUresult wrapped_cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    CUresult result = real.cuGetProcAddress(symbol, function, version, flags);
    if (result == CUDA_SUCCESS && function && *function) *function = resolve_answer(*function, symbol, version, flags);
    return result;
}
EXPORTED(cuGetProcAddress);

CUresult wrapped_cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    CUresult result = real.cuGetProcAddress_v2(symbol, function, version, flags, status);
    if (result == CUDA_SUCCESS && function && *function) *function = resolve_answer(*function, symbol, version, flags);
    return result;
}
EXPORTED(cuGetProcAddress_v2);

/* ---- dlsym, exported at glibc's versions. Names other than the driver's are passed on by a tail jump, so that the
   real dlsym sees the program's return address, and RTLD_NEXT refers to the libraries after the caller ---- */

#ifndef WITHOUT_DLSYM /* a build with sanitizers exports no dlsym, because it would run before their runtime */
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
#define TAIL_JUMP return /* gcc makes a tail call at -O2; only clang guarantees it */
#endif

static void *driver_symbol(void *handle, const char *name) {
    void *pointer = libc_dlsym(handle, name);
    if (!pointer) return NULL;
    if (libc_is_own_address(pointer)) {
        /* the global scope contains it because this library exports it: return the result that the program would get
           without this library */
        pointer = libc_dlsym(RTLD_NEXT, name);
        if (!pointer) return NULL;
    }
    return *name == 'n' ? nvml_find(pointer, name) : resolve_wrapper(pointer);
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
#endif

/* ---- AddressSanitizer ---- */

/* The runtime, as a shared library, ends a program in which another library is loaded before it, as every preloaded
   library is, because that library could hide the runtime's functions. This library defines none of their names, so it
   disables the check. The runtime calls this function before any other definition, including its own default, which has
   no options. A program's own definition and ASAN_OPTIONS take effect as before. */
const char *__asan_default_options(void) __attribute__((visibility("default")));
const char *__asan_default_options(void) {
    return "verify_asan_link_order=0";
}
