/* The C library's dlsym, found without dlsym, and without dlvsym, which musl does not have.

   Calls nothing of the C library: sanitizers ask for dlsym before their own strcmp and dl_iterate_phdr, which are the
   ones that a call from here would reach, can be called. .ci/c_layers.py checks that. */
#define _GNU_SOURCE
#include "platform/libc_dlsym.h"

#include <link.h>
#include <stdatomic.h>
#include <stdint.h>

#include "platform/common.h"

static _Atomic(dlsym_function) found;

/* The dynamic linker's list of objects, as debuggers read it: glibc's, and musl's. */
extern struct r_debug _r_debug __attribute__((weak));
extern struct r_debug *_dl_debug_addr __attribute__((weak));
extern ElfW(Dyn) _DYNAMIC[] __attribute__((visibility("hidden")));

struct object {
    const ElfW(Sym) * symbols;
    const char *names;
    const uint32_t *gnu_hash, *hash;
};

static const void *dynamic_pointer(const struct link_map *map, ElfW(Addr) value) {
    /* glibc has relocated it where it can write, musl never does */
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

static bool same_name(const char *one, const char *other) {
    for (; *one == *other; one++, other++)
        if (!*one) return true;
    return false;
}

static bool is_the_function(const struct object *object, uint32_t i, const char *name) {
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
            uint32_t there = chain[i - first];
            if ((there | 1) == (hash | 1) && is_the_function(object, i, name)) return i;
            if (there & 1) break;
        }
    } else if (object->hash) {
        uint32_t hash = 0, buckets = object->hash[0];
        for (const char *c = name; *c; c++) {
            hash = (hash << 4) + (unsigned char)*c;
            hash = (hash ^ ((hash & 0xf0000000) >> 24)) & 0x0fffffff;
        }
        uint32_t i = buckets ? object->hash[2 + hash % buckets] : 0;
        for (; i; i = object->hash[2 + buckets + i])
            if (is_the_function(object, i, name)) return i;
    }
    return 0;
}

bool libc_dlsym_is_ours(const void *pointer) {
    extern const char __ehdr_start[] __attribute__((visibility("hidden")));
    extern const char _end[] __attribute__((visibility("hidden")));
    return (const char *)pointer >= __ehdr_start && (const char *)pointer < _end;
}

/* The first after this library, in the order in which libraries were loaded: what RTLD_NEXT means. It is among those
   that the program began with, which stay where they are in the list: no lock is needed. */
static dlsym_function search(void) {
    const struct r_debug *list = &_r_debug ? &_r_debug : &_dl_debug_addr ? _dl_debug_addr : NULL;
    bool past_us = false;
    struct object object;
    for (const struct link_map *map = list ? list->r_map : NULL; map; map = map->l_next) {
        if (map->l_ld == _DYNAMIC) {
            past_us = true;
        } else if (past_us && object_read(map, &object)) {
            uint32_t i = symbol_number(&object, "dlsym");
            if (i) return (dlsym_function)(map->l_addr + object.symbols[i].st_value);
        }
    }
    return NULL;
}

dlsym_function libc_dlsym_next(void) {
    dlsym_function function = atomic_load_explicit(&found, memory_order_relaxed);
    if (unlikely(!function)) {
        function = search();
        atomic_store_explicit(&found, function, memory_order_relaxed);
    }
    return function;
}

void *libc_dlsym(void *handle, const char *name) {
    dlsym_function next = libc_dlsym_next();
    return next ? next(handle, name) : NULL;
}
