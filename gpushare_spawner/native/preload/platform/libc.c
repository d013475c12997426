/* This file calls no C library function by name: sanitizers call dlsym before their own strcmp and dl_iterate_phdr,
   which such a call would reach, are ready. .ci/c_layers.py checks this rule. */
#define _GNU_SOURCE
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>

#include "platform/common.h"

/* ---- lookup of dlsym without dlsym, and without dlvsym, which musl lacks ---- */

static _Atomic(dlsym_function) next_dlsym;

/* The dynamic linker's list of objects, as read by debuggers, in glibc and in musl. */
extern struct r_debug _r_debug __attribute__((weak));
extern struct r_debug *_dl_debug_addr __attribute__((weak));
extern ElfW(Dyn) _DYNAMIC[] __attribute__((visibility("hidden")));

struct object {
    const ElfW(Sym) * symbols;
    const char *names;
    const uint32_t *gnu_hash, *hash;
};

static const void *dynamic_pointer(const struct link_map *map, ElfW(Addr) value) {
    /* glibc relocates the address if it can write there; musl never does */
    return (const void *)(value < map->l_addr ? value + map->l_addr : value);
}

static bool object_read(const struct link_map *map, struct object *object) {
    object->symbols = NULL;
    object->names = NULL;
    object->gnu_hash = object->hash = NULL;
    for (const ElfW(Dyn) *dynamic = map->l_ld; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        const void *pointer = dynamic_pointer(map, dynamic->d_un.d_ptr);
        if (dynamic->d_tag == DT_SYMTAB) object->symbols = pointer;
        if (dynamic->d_tag == DT_STRTAB) object->names = pointer;
        if (dynamic->d_tag == DT_GNU_HASH) object->gnu_hash = pointer;
        if (dynamic->d_tag == DT_HASH) object->hash = pointer;
    }
    return object->symbols && object->names;
}

static bool same_name(const char *a, const char *b) {
    for (; *a == *b; a++, b++)
        if (!*a) return true;
    return false;
}

static bool is_function(const struct object *object, uint32_t i, const char *name) {
    const ElfW(Sym) *symbol = &object->symbols[i];
    return symbol->st_shndx != SHN_UNDEF && (symbol->st_info & 15) == STT_FUNC &&
           same_name(object->names + symbol->st_name, name);
}

static uint32_t symbol_number(const struct object *object, const char *name) {
    if (object->gnu_hash) {
        uint32_t hash = 5381, buckets = object->gnu_hash[0], first = object->gnu_hash[1];
        for (const char *c = name; *c; c++) hash = hash * 33 + (unsigned char)*c;
        const uint32_t *bucket = object->gnu_hash + 4 + object->gnu_hash[2] * (sizeof(ElfW(Addr)) / 4);
        const uint32_t *chain = bucket + buckets;
        uint32_t i = buckets ? bucket[hash % buckets] : 0;
        for (; i >= first && i; i++) {
            uint32_t entry = chain[i - first];
            if ((entry | 1) == (hash | 1) && is_function(object, i, name)) return i;
            if (entry & 1) break;
        }
    } else if (object->hash) {
        uint32_t hash = 0, buckets = object->hash[0];
        for (const char *c = name; *c; c++) {
            hash = (hash << 4) + (unsigned char)*c;
            hash = (hash ^ ((hash & 0xf0000000) >> 24)) & 0x0fffffff;
        }
        uint32_t i = buckets ? object->hash[2 + hash % buckets] : 0;
        for (; i; i = object->hash[2 + buckets + i])
            if (is_function(object, i, name)) return i;
    }
    return 0;
}

bool libc_is_own_address(const void *pointer) {
    extern const char __ehdr_start[] __attribute__((visibility("hidden")));
    extern const char _end[] __attribute__((visibility("hidden")));
    return (const char *)pointer >= __ehdr_start && (const char *)pointer < _end;
}

/* Return the first dlsym after this library, in load order, as for RTLD_NEXT. It is in one of the program's initial
   libraries, whose position in the list is fixed, so no lock is needed. */
static dlsym_function search(void) {
    const struct r_debug *list = &_r_debug ? &_r_debug : &_dl_debug_addr ? _dl_debug_addr : NULL;
    bool past_own = false;
    struct object object;
    for (const struct link_map *map = list ? list->r_map : NULL; map; map = map->l_next) {
        if (map->l_ld == _DYNAMIC) {
            past_own = true;
        } else if (past_own && object_read(map, &object)) {
            uint32_t i = symbol_number(&object, "dlsym");
            if (i) return (dlsym_function)(map->l_addr + object.symbols[i].st_value);
        }
    }
    return NULL;
}

dlsym_function libc_dlsym_next(void) {
    dlsym_function function = atomic_load_explicit(&next_dlsym, memory_order_relaxed);
    if (unlikely(!function)) {
        function = search();
        atomic_store_explicit(&next_dlsym, function, memory_order_relaxed);
    }
    return function;
}

void *libc_dlsym(void *handle, const char *name) {
    dlsym_function next = libc_dlsym_next();
    return next ? next(handle, name) : NULL;
}

/* ---- functions that are looked up when first needed ---- */

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

bool libc_load(void) {
    static _Atomic bool loaded;
    if (atomic_load_explicit(&loaded, memory_order_acquire)) return true;
    bool all = true;
    for (size_t i = 0; i < FUNCTIONS; i++) {
        /* several threads may do this simultaneously; each writes the same addresses */
        void *function = libc_dlsym(RTLD_DEFAULT, functions[i]);
        /* before glibc 2.34, a program may not be linked against libpthread; then the driver has loaded it */
        if (!function && LATE(open_library)) {
            void *library = LATE(open_library)("libpthread.so.0", RTLD_LAZY | RTLD_NOLOAD);
            if (library) function = libc_dlsym(library, functions[i]);
        }
        all &= function != NULL;
        __atomic_store_n((void **)&late + i, function, __ATOMIC_RELAXED);
    }
    if (all)
        atomic_store_explicit(&loaded, true, memory_order_release);
    else if (LATE(library_error))
        LATE(library_error)(); /* the program's next dlerror() reports only its own calls */
    return all;
}

/* ---- forks ---- */

/* The bounds of the section, defined by the linker. */
extern const int32_t __start_gpushare_fork[] __attribute__((visibility("hidden")));
extern const int32_t __stop_gpushare_fork[] __attribute__((visibility("hidden")));

static void in_child(void) {
    for (const int32_t *offset = __start_gpushare_fork; offset != __stop_gpushare_fork; offset++)
        ((void (*)(void))((const char *)offset + *offset))();
}

void libc_watch_forks(void) {
    /* glibc's pthread_atfork does the same, but not every version's shared library exports its name */
    extern void *__dso_handle __attribute__((visibility("hidden")));
    static _Atomic bool watched;
    if (!atomic_load_explicit(&watched, memory_order_relaxed) &&
        LATE(at_fork)(NULL, NULL, in_child, &__dso_handle) == 0)
        atomic_store_explicit(&watched, true, memory_order_relaxed);
}
