/* The C library's dlsym, found without dlsym, and without dlvsym, which musl does not have. */
#define _GNU_SOURCE
#include "platform/libc_dlsym.h"

#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "platform/common.h"

static _Atomic(dlsym_function) found;

struct object {
    const ElfW(Sym) * symbols;
    const char *names;
    const uint32_t *gnu_hash, *hash;
};

static const void *dynamic_pointer(const struct dl_phdr_info *info, ElfW(Addr) value) {
    /* glibc has relocated it where it can write, musl never does */
    return (const void *)(value < info->dlpi_addr ? value + info->dlpi_addr : value);
}

static bool object_read(const struct dl_phdr_info *info, struct object *object) {
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = (const void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    if (!dynamic) return false;
    *object = (struct object){0};
    for (; dynamic->d_tag != DT_NULL; dynamic++) {
        const void *pointer = dynamic_pointer(info, dynamic->d_un.d_ptr);
        if (dynamic->d_tag == DT_SYMTAB) object->symbols = pointer;
        if (dynamic->d_tag == DT_STRTAB) object->names = pointer;
        if (dynamic->d_tag == DT_GNU_HASH) object->gnu_hash = pointer;
        if (dynamic->d_tag == DT_HASH) object->hash = pointer;
    }
    return object->symbols && object->names;
}

static bool is_the_function(const struct object *object, uint32_t i, const char *name) {
    const ElfW(Sym) *symbol = &object->symbols[i];
    return symbol->st_shndx != SHN_UNDEF && (symbol->st_info & 15) == STT_FUNC &&
           strcmp(object->names + symbol->st_name, name) == 0;
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

struct search {
    bool past_us;
    dlsym_function function;
};

/* The first after this library, in the order in which libraries were loaded: what RTLD_NEXT means. */
static int look_in(struct dl_phdr_info *info, size_t size, void *closure) {
    struct search *search = closure;
    struct object object;
    for (int i = 0; i < info->dlpi_phnum && !search->past_us; i++) {
        if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
        if (libc_dlsym_is_ours((const void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr))) {
            search->past_us = true;
            return 0;
        }
    }
    if (!search->past_us || !object_read(info, &object)) return 0;
    uint32_t i = symbol_number(&object, "dlsym");
    if (!i) return 0;
    search->function = (dlsym_function)(info->dlpi_addr + object.symbols[i].st_value);
    return 1;
}

dlsym_function libc_dlsym_next(void) {
    dlsym_function function = atomic_load_explicit(&found, memory_order_relaxed);
    if (unlikely(!function)) {
        struct search search = {false, NULL};
        dl_iterate_phdr(look_in, &search);
        function = search.function;
        atomic_store_explicit(&found, function, memory_order_relaxed);
    }
    return function;
}

void *libc_dlsym(void *handle, const char *name) {
    dlsym_function next = libc_dlsym_next();
    return next ? next(handle, name) : NULL;
}
