#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "dlsym.h"
#include "resolve.h"

/* declarations of all wrappers */
#define SINGLE(name, asked, version, parameters, arguments, stream) CUresult wrapped_##name parameters;
#define STREAMED(name, asked, version, twin, parameters, arguments, stream)                                            \
    CUresult wrapped_##name parameters;                                                                                \
    CUresult wrapped_##name##_ptsz parameters;
#define IMPLICIT(name, asked, version, twin, parameters, arguments)                                                    \
    CUresult wrapped_##name parameters;                                                                                \
    CUresult wrapped_##name##_ptds parameters;
#define WRAPPED(name, asked, version, per_thread, parameters) CUresult wrapped_##name parameters;
#define CALLED(name, parameters)
#include "driver_calls.h"
#include "gated_calls.h"

CUresult driver_lacks(void) {
    return CUDA_ERROR_NOT_FOUND;
}

#define ABSENT (void *)driver_lacks
struct real_driver real = {
#define SINGLE(name, asked, version, parameters, arguments, stream)         .name = ABSENT,
#define STREAMED(name, asked, version, twin, parameters, arguments, stream) .name = ABSENT, .name##_ptsz = ABSENT,
#define IMPLICIT(name, asked, version, twin, parameters, arguments)         .name = ABSENT, .name##_ptds = ABSENT,
#define WRAPPED(name, asked, version, per_thread, parameters)               .name = ABSENT,
#define CALLED(name, parameters)                                            .name = ABSENT,
#include "driver_calls.h"
#include "gated_calls.h"
};

struct entry {
    const char *exported; /* the real library's symbol */
    const char *asked;    /* what cuGetProcAddress is asked for */
    int version;          /* the first CUDA version (major*1000 + minor*10) with this ABI */
    int per_thread;       /* the form for the per-thread default stream */
    void *wrapper;        /* NULL: only called */
    void **slot;
};

#define SLOT(name) (void **)&real.name
static const struct entry entries[] = {
#define SINGLE(name, asked, version, parameters, arguments, stream)                                                    \
    {#name, asked, version, 0, (void *)wrapped_##name, SLOT(name)},
#define STREAMED(name, asked, version, twin, parameters, arguments, stream)                                            \
    {#name, asked, version, 0, (void *)wrapped_##name, SLOT(name)},                                                    \
        {#name "_ptsz", asked, twin, 1, (void *)wrapped_##name##_ptsz, SLOT(name##_ptsz)},
#define IMPLICIT(name, asked, version, twin, parameters, arguments)                                                    \
    {#name, asked, version, 0, (void *)wrapped_##name, SLOT(name)},                                                    \
        {#name "_ptds", asked, twin, 1, (void *)wrapped_##name##_ptds, SLOT(name##_ptds)},
#define WRAPPED(name, asked, version, per_thread, parameters)                                                          \
    {#name, asked, version, per_thread, (void *)wrapped_##name, SLOT(name)},
#define CALLED(name, parameters) {#name, "", 0, 0, NULL, SLOT(name)},
#include "driver_calls.h"
#include "gated_calls.h"
};
#define ENTRIES (sizeof entries / sizeof *entries)

/* Real pointer -> entry: an open hash that only grows, so that looking up takes no lock. */
#define PLACES 1024
_Static_assert(ENTRIES * 2 <= PLACES, "the hash must stay at most half full");
static struct {
    _Atomic(void *) pointer;
    const struct entry *entry;
} places[PLACES];

static size_t place_of(const void *pointer) {
    return ((uintptr_t)pointer >> 4) * 0x9E3779B97F4A7C15ull >> 54;
}

static const struct entry *known(const void *pointer) {
    for (size_t i = place_of(pointer);; i = (i + 1) % PLACES) {
        void *there = atomic_load_explicit(&places[i].pointer, memory_order_acquire);
        if (there == pointer) return places[i].entry;
        if (!there) return NULL;
    }
}

static void learn(void *pointer, const struct entry *entry) {
    if (!entry->wrapper || known(pointer)) return;
    size_t i = place_of(pointer);
    while (atomic_load_explicit(&places[i].pointer, memory_order_relaxed)) i = (i + 1) % PLACES;
    places[i].entry = entry;
    atomic_store_explicit(&places[i].pointer, pointer, memory_order_release);
}

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool loaded;

bool sharing_wanted(void) {
    static _Atomic int answer; /* 0: not asked yet */
    int known_answer = atomic_load_explicit(&answer, memory_order_relaxed);
    if (!known_answer) {
        const char *socket = getenv("GPUSHARE_SOCKET"), *disabled = getenv("GPUSHARE_DISABLE");
        bool off = disabled && *disabled && strcmp(disabled, "0") != 0;
        known_answer = socket && *socket && !off ? 1 : 2;
        atomic_store_explicit(&answer, known_answer, memory_order_relaxed);
    }
    return known_answer == 1;
}

bool driver_load(void) {
    if (atomic_load_explicit(&loaded, memory_order_acquire)) return true;
    /* RTLD_NOLOAD: this library never brings a driver into a program that has none */
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!library) {
        dlerror(); /* the program's next dlerror() is about its own calls */
        return false;
    }
    pthread_mutex_lock(&loading);
    if (!loaded) {
        for (size_t i = 0; i < ENTRIES; i++) {
            void *pointer = real_dlsym(library, entries[i].exported);
            if (!pointer) continue;
            *entries[i].slot = pointer;
            learn(pointer, &entries[i]);
        }
        dlerror();
        atomic_store_explicit(&loaded, true, memory_order_release);
    }
    pthread_mutex_unlock(&loading);
    /* the handle is kept: the pointers above must stay good */
    return true;
}

void driver_forget(void) {
    pthread_mutex_init(&loading, NULL);
}

void *wrapper_of(void *pointer) {
    if (!pointer || !sharing_wanted() || !driver_load()) return pointer;
    const struct entry *entry = known(pointer);
    return entry ? entry->wrapper : pointer;
}

void *wrapper_of_answer(void *pointer, const char *asked, int version, uint64_t flags) {
    void *wrapper = wrapper_of(pointer);
    if (wrapper != pointer || !asked || !sharing_wanted()) return wrapper;

    /* A function that the library answers for but does not export: its ABI is the newest one of that name that is not
       newer than what was asked for. Where the export is there and is another function, the ABI is unknown, and the
       pointer is left alone. */
    int per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    const struct entry *best = NULL;
    for (size_t i = 0; i < ENTRIES; i++) {
        const struct entry *entry = &entries[i];
        if (!entry->wrapper || entry->version > version || strcmp(entry->asked, asked) != 0) continue;
        if (entry->per_thread && !per_thread) continue;
        if (!best || entry->per_thread > best->per_thread ||
            (entry->per_thread == best->per_thread && entry->version > best->version))
            best = entry;
    }
    if (!best || *best->slot != ABSENT) return pointer;
    pthread_mutex_lock(&loading);
    if (*best->slot == ABSENT) {
        *best->slot = pointer;
        learn(pointer, best);
    }
    pthread_mutex_unlock(&loading);
    return wrapper_of(pointer);
}

/* A program that is linked against libcuda has it mapped already, and calls the wrappers without asking for them. */
__attribute__((constructor)) static void linked_program(void) {
    if (sharing_wanted()) driver_load();
}

CUresult wrapped_cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    driver_load();
    CUresult result = real.cuGetProcAddress(symbol, function, version, flags);
    if (result == CUDA_SUCCESS && function && *function)
        *function = wrapper_of_answer(*function, symbol, version, flags);
    return result;
}
EXPORTED(cuGetProcAddress);

CUresult wrapped_cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    driver_load();
    CUresult result = real.cuGetProcAddress_v2(symbol, function, version, flags, status);
    if (result == CUDA_SUCCESS && function && *function)
        *function = wrapper_of_answer(*function, symbol, version, flags);
    return result;
}
EXPORTED(cuGetProcAddress_v2);
