#define _GNU_SOURCE
#include "driver/driver.h"

#include <errno.h>
#include <string.h>

_Atomic uint32_t driver_suspension;
_Atomic bool driver_suspension_of_background;

CUresult driver_lacks(void) {
    return CUDA_ERROR_NOT_FOUND;
}
#define ABSENT (void *)driver_lacks

/* Until the driver's functions have been looked up, each slot holds a stub that looks them up and jumps to the function
   with its arguments unchanged. This makes wrappers work in every program: a program that is linked against libcuda
   calls this library's exports without dlsym or cuGetProcAddress. */
#define STUB_BYTES 16
#if defined __x86_64__
/* r11 carries the address of the stub; a call may change that register */
#define STUB(name) ".balign 16\nlazy_" #name ":\nleaq lazy_" #name "(%rip), %r11\njmp lazy_common\n"
#define COMMON                                                                                                         \
    "pushq %rdi\npushq %rsi\npushq %rdx\npushq %rcx\npushq %r8\npushq %r9\nsubq $8, %rsp\n"                            \
    "movq %r11, %rdi\ncall driver_lazy_function\nmovq %rax, %r11\n"                                                    \
    "addq $8, %rsp\npopq %r9\npopq %r8\npopq %rcx\npopq %rdx\npopq %rsi\npopq %rdi\njmp *%r11\n"
#elif defined __aarch64__
#define STUB(name) ".balign 16\nlazy_" #name ":\nadr x16, lazy_" #name "\nb lazy_common\n"
#define COMMON                                                                                                         \
    "stp x29, x30, [sp, #-80]!\nstp x0, x1, [sp, #16]\nstp x2, x3, [sp, #32]\nstp x4, x5, [sp, #48]\n"                 \
    "stp x6, x7, [sp, #64]\nmov x0, x16\nbl driver_lazy_function\nmov x16, x0\nldp x0, x1, [sp, #16]\n"                \
    "ldp x2, x3, [sp, #32]\nldp x4, x5, [sp, #48]\nldp x6, x7, [sp, #64]\nldp x29, x30, [sp], #80\nbr x16\n"
#endif
/* clang-format off */
__asm__(".text\n.balign 16\nlazy_common:\n" COMMON
        ".balign 16\n.globl driver_lazy_stubs\n.hidden driver_lazy_stubs\ndriver_lazy_stubs:\n"
#define SINGLE(name, symbol, version, parameters, arguments, stream)         STUB(name)
#define STREAMED(name, symbol, version, twin, parameters, arguments, stream) STUB(name) STUB(name##_ptsz)
#define IMPLICIT(name, symbol, version, twin, parameters, arguments)         STUB(name) STUB(name##_ptds)
#define WRAPPED(name, symbol, version, per_thread, parameters)               STUB(name)
#define CALLED(name, parameters)                                             STUB(name)
#include "driver/driver_calls.h"
        );
/* clang-format on */
extern const char driver_lazy_stubs[] __attribute__((visibility("hidden")));
void *driver_lazy_function(const char *stub) __attribute__((visibility("hidden"), used));

#define NUMBER(name) (offsetof(struct real_driver, name) / sizeof(void *))
#define LAZY(name)   .name = (void *)(driver_lazy_stubs + NUMBER(name) * STUB_BYTES)
struct real_driver real = {
#define SINGLE(name, symbol, version, parameters, arguments, stream)         LAZY(name),
#define STREAMED(name, symbol, version, twin, parameters, arguments, stream) LAZY(name), LAZY(name##_ptsz),
#define IMPLICIT(name, symbol, version, twin, parameters, arguments)         LAZY(name), LAZY(name##_ptds),
#define WRAPPED(name, symbol, version, per_thread, parameters)               LAZY(name),
#define CALLED(name, parameters)                                             LAZY(name),
#include "driver/driver_calls.h"
};

/* The tables hold offsets instead of pointers, which the dynamic linker would have to relocate in every process. */
static const struct names {
#define NAMED(name, symbol)                                                                                            \
    char exported_##name[sizeof #name];                                                                                \
    char symbol_##name[sizeof symbol];
#define SINGLE(name, symbol, version, parameters, arguments, stream) NAMED(name, symbol)
#define STREAMED(name, symbol, version, twin, parameters, arguments, stream)                                           \
    NAMED(name, symbol) NAMED(name##_ptsz, symbol)
#define IMPLICIT(name, symbol, version, twin, parameters, arguments) NAMED(name, symbol) NAMED(name##_ptds, symbol)
#define WRAPPED(name, symbol, version, per_thread, parameters)       NAMED(name, symbol)
#define CALLED(name, parameters)                                     NAMED(name, "")
#include "driver/driver_calls.h"
#undef NAMED
} names = {
#define NAMED(name, symbol)                                          .exported_##name = #name, .symbol_##name = symbol,
#define SINGLE(name, symbol, version, parameters, arguments, stream) NAMED(name, symbol)
#define STREAMED(name, symbol, version, twin, parameters, arguments, stream)                                           \
    NAMED(name, symbol) NAMED(name##_ptsz, symbol)
#define IMPLICIT(name, symbol, version, twin, parameters, arguments) NAMED(name, symbol) NAMED(name##_ptds, symbol)
#define WRAPPED(name, symbol, version, per_thread, parameters)       NAMED(name, symbol)
#define CALLED(name, parameters)                                     NAMED(name, "")
#include "driver/driver_calls.h"
};

struct entry {
    uint16_t exported; /* in `names`: the name of the library's export */
    uint16_t symbol;   /* in `names`: the name for cuGetProcAddress */
    uint16_t version;  /* the first CUDA version ((major*1000 + minor*10) / 10) with this ABI */
    bool per_thread;   /* the form for the per-thread default stream */
    bool wrapped;      /* false: the function is only called */
};

/* In the order of struct real_driver: an entry's number is that of its slot, stub and wrapper. */
#define ENTRY(name, version, per_thread, wrapped)                                                                      \
    {offsetof(struct names, exported_##name), offsetof(struct names, symbol_##name), (version) / 10, per_thread,       \
     wrapped},
static const struct entry entries[] = {
#define SINGLE(name, symbol, version, parameters, arguments, stream) ENTRY(name, version, 0, true)
#define STREAMED(name, symbol, version, twin, parameters, arguments, stream)                                           \
    ENTRY(name, version, 0, true) ENTRY(name##_ptsz, twin, 1, true)
#define IMPLICIT(name, symbol, version, twin, parameters, arguments)                                                   \
    ENTRY(name, version, 0, true) ENTRY(name##_ptds, twin, 1, true)
#define WRAPPED(name, symbol, version, per_thread, parameters) ENTRY(name, version, per_thread, true)
#define CALLED(name, parameters)                               ENTRY(name, 0, 0, false)
#include "driver/driver_calls.h"
};
#define ENTRIES (sizeof entries / sizeof *entries)
_Static_assert(sizeof real == ENTRIES * sizeof(void *), "one entry for each slot");
_Static_assert(sizeof names <= UINT16_MAX, "an offset is 16 bits");

static size_t number_of(const struct entry *entry) {
    return (size_t)(entry - entries);
}

static void **slot_of(const struct entry *entry) {
    return (void **)&real + number_of(entry);
}

static const char *name_at(uint16_t offset) {
    return (const char *)&names + offset;
}

/* Entries by real pointer: an open hash table that only grows, so that a lookup takes no lock. */
#define PLACES 1024
_Static_assert(ENTRIES * 2 <= PLACES, "the hash must stay at most half full");
static struct {
    _Atomic(void *) pointer;
    const struct entry *entry;
} places[PLACES];

static size_t place_of(const void *pointer) {
    return ((uintptr_t)pointer >> 4) * 0x9E3779B97F4A7C15ull >> 54;
}

static const struct entry *entry_at(const void *pointer) {
    for (size_t i = place_of(pointer);; i = (i + 1) % PLACES) {
        void *occupant = atomic_load_explicit(&places[i].pointer, memory_order_acquire);
        if (occupant == pointer) return places[i].entry;
        if (!occupant) return NULL;
    }
}

static void add_place(void *pointer, const struct entry *entry) {
    if (!entry->wrapped || entry_at(pointer)) return;
    size_t i = place_of(pointer);
    while (atomic_load_explicit(&places[i].pointer, memory_order_relaxed)) i = (i + 1) % PLACES;
    places[i].entry = entry;
    atomic_store_explicit(&places[i].pointer, pointer, memory_order_release);
}

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool loaded;

bool driver_load(void) {
    if (atomic_load_explicit(&loaded, memory_order_acquire)) return true;
    if (!libc_load()) return false;
    /* RTLD_NOLOAD: this library never loads a driver into a program that has none */
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!library) {
        dlerror(); /* clears the error, so that the program's next dlerror() reports only its own calls */
        return false;
    }
    pthread_mutex_lock(&loading);
    if (!loaded) {
        for (size_t i = 0; i < ENTRIES; i++) {
            void *pointer = libc_dlsym(library, name_at(entries[i].exported));
            *slot_of(&entries[i]) = pointer ? pointer : ABSENT;
            if (pointer) add_place(pointer, &entries[i]);
        }
        dlerror();
        atomic_store_explicit(&loaded, true, memory_order_release);
    }
    pthread_mutex_unlock(&loading);
    /* the handle stays open, because the pointers above must stay valid */
    return true;
}

RESET_IN_CHILD(driver_reset);
void driver_reset(void) {
    pthread_mutex_init(&loading, NULL); /* the driver's functions remain valid */
    atomic_store(&driver_suspension, SUSPENSION_NONE);
    atomic_store(&driver_suspension_of_background, false);
}

int driver_number_of(const void *pointer) {
    const struct entry *entry = entry_at(pointer);
    return entry ? (int)number_of(entry) : -1;
}

bool driver_add_answer(void *pointer, const char *symbol, int version, uint64_t flags) {
    /* The ABI is the newest of that name up to the requested version. If the library exports another function for it,
       the ABI is unknown, and the pointer stays unwrapped. */
    int per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    const struct entry *best = NULL;
    for (size_t i = 0; i < ENTRIES; i++) {
        const struct entry *entry = &entries[i];
        if (!entry->wrapped || entry->version > version / 10 || strcmp(name_at(entry->symbol), symbol) != 0) continue;
        if (entry->per_thread && !per_thread) continue;
        if (!best || entry->per_thread > best->per_thread ||
            (entry->per_thread == best->per_thread && entry->version > best->version))
            best = entry;
    }
    if (!best || *slot_of(best) != ABSENT) return false;
    pthread_mutex_lock(&loading);
    if (*slot_of(best) == ABSENT) {
        *slot_of(best) = pointer;
        add_place(pointer, best);
    }
    pthread_mutex_unlock(&loading);
    return true;
}

void *driver_lazy_function(const char *stub) {
    void **slot = (void **)&real + (size_t)(stub - driver_lazy_stubs) / STUB_BYTES;
    int kept = errno;
    bool available = driver_load();
    errno = kept;
    return available ? *slot : ABSENT;
}
