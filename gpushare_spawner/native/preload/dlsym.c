/* dlsym is exported at glibc's versions. Names that are no driver's are passed on by a tail jump, so that the real
   dlsym sees the program's return address: RTLD_NEXT then means next after the caller, not next after this library. */
#define _GNU_SOURCE
#include <link.h>
#include <stdatomic.h>
#include <string.h>

#include "dlsym.h"
#include "wrappers/nvml.h"
#include "driver/resolve.h"

typedef void *(*dlsym_function)(void *, const char *);

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

static _Atomic(dlsym_function) found;

/* ---- finding the C library's dlsym without dlsym, and without dlvsym, which musl does not have ---- */

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

struct search {
    bool past_us;
    dlsym_function function;
};

static bool is_ours(const void *pointer);

/* The first after this library, in the order in which libraries were loaded: what RTLD_NEXT means. */
static int look_in(struct dl_phdr_info *info, size_t size, void *closure) {
    struct search *search = closure;
    struct object object;
    for (int i = 0; i < info->dlpi_phnum && !search->past_us; i++) {
        if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
        if (is_ours((const void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr))) {
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

static dlsym_function next_dlsym(void) {
    dlsym_function function = atomic_load_explicit(&found, memory_order_relaxed);
    if (unlikely(!function)) {
        struct search search = {false, NULL};
        dl_iterate_phdr(look_in, &search);
        function = search.function;
        atomic_store_explicit(&found, function, memory_order_relaxed);
    }
    return function;
}

void *real_dlsym(void *handle, const char *name) {
    dlsym_function next = next_dlsym();
    return next ? next(handle, name) : NULL;
}

static bool is_ours(const void *pointer) {
    extern const char __ehdr_start[] __attribute__((visibility("hidden")));
    extern const char _end[] __attribute__((visibility("hidden")));
    return (const char *)pointer >= __ehdr_start && (const char *)pointer < _end;
}

static void *driver_symbol(void *handle, const char *name) {
    void *pointer = real_dlsym(handle, name);
    if (!pointer) return NULL;
    if (is_ours(pointer)) {
        /* found in the global scope because this library exports it: the answer must be what it would be without us */
        pointer = real_dlsym(RTLD_NEXT, name);
        if (!pointer) return NULL;
    }
    return *name == 'n' ? nvml_wrapper_of(pointer) : wrapper_of(pointer);
}

static void *dlsym_34(void *handle, const char *name) __attribute__((used));
static void *dlsym_first(void *handle, const char *name) __attribute__((used));

static void *dlsym_34(void *handle, const char *name) {
    dlsym_function next = next_dlsym();
    if (unlikely(!next)) return NULL; /* before glibc 2.34, in a program without libdl */
    bool cuda = name && name[0] == 'c' && name[1] == 'u' && name[2] >= 'A' && name[2] <= 'Z';
    bool nvml = name && strncmp(name, "nvml", 4) == 0;
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
