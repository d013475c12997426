/* Every wrapper by the number that the driver's function has in struct real_driver. */
#include "wrapper_table.h"

#include "driver/driver.h"
#include "platform/engine.h"
#include "platform/sharing.h"
#include "wrappers/exported.h"

#define SINGLE(name, asked, version, parameters, arguments, stream) CUresult wrapped_##name parameters;
#define STREAMED(name, asked, version, twin, parameters, arguments, stream)                                            \
    CUresult wrapped_##name parameters;                                                                                \
    CUresult wrapped_##name##_ptsz parameters;
#define IMPLICIT(name, asked, version, twin, parameters, arguments)                                                    \
    CUresult wrapped_##name parameters;                                                                                \
    CUresult wrapped_##name##_ptds parameters;
#define WRAPPED(name, asked, version, per_thread, parameters) CUresult wrapped_##name parameters;
#define WATCHED(name, asked, version, per_thread, parameters, arguments)                                               \
    CUresult wrapped_##name parameters;                                                                                \
    CUresult suspendable_##name parameters;
#define HELD(name, asked, version, per_thread, parameters, arguments) CUresult suspendable_##name parameters;
#define CALLED(name, parameters)
#include "driver/held_calls.h"
#include "driver/driver_calls.h"
#include "driver/gated_calls.h"

/* How far each wrapper is from its place in this table; 0 where there is none. Two tables: with engine `suspend`, and
   with the others. */
#define OFFSET(wrapper, name) ".long " #wrapper "_" #name " - .\n"
#define NO_OFFSET             ".long 0\n"
/* clang-format off */
__asm__(".section .rodata\n.balign 4\n.globl wrapper_table_offsets\n.hidden wrapper_table_offsets\nwrapper_table_offsets:\n"
#define SINGLE(name, asked, version, parameters, arguments, stream)         OFFSET(wrapped, name)
#define STREAMED(name, asked, version, twin, parameters, arguments, stream) OFFSET(wrapped, name) OFFSET(wrapped, name##_ptsz)
#define IMPLICIT(name, asked, version, twin, parameters, arguments)         OFFSET(wrapped, name) OFFSET(wrapped, name##_ptds)
#define WRAPPED(name, asked, version, per_thread, parameters)               OFFSET(wrapped, name)
#define HELD(name, asked, version, per_thread, parameters, arguments)       NO_OFFSET
#define CALLED(name, parameters)                                            NO_OFFSET
#include "driver/held_calls.h"
#include "driver/driver_calls.h"
#include "driver/gated_calls.h"
        ".globl wrapper_table_suspend\n.hidden wrapper_table_suspend\nwrapper_table_suspend:\n"
#define SINGLE(name, asked, version, parameters, arguments, stream)         OFFSET(wrapped, name)
#define STREAMED(name, asked, version, twin, parameters, arguments, stream) OFFSET(wrapped, name) OFFSET(wrapped, name##_ptsz)
#define IMPLICIT(name, asked, version, twin, parameters, arguments)         OFFSET(wrapped, name) OFFSET(wrapped, name##_ptds)
#define WRAPPED(name, asked, version, per_thread, parameters)               OFFSET(wrapped, name)
#define WATCHED(name, asked, version, per_thread, parameters, arguments)    OFFSET(suspendable, name)
#define HELD(name, asked, version, per_thread, parameters, arguments)       OFFSET(suspendable, name)
#define CALLED(name, parameters)                                            NO_OFFSET
#include "driver/held_calls.h"
#include "driver/driver_calls.h"
#include "driver/gated_calls.h"
        ".text\n");
/* clang-format on */
extern const int32_t wrapper_table_offsets[] __attribute__((visibility("hidden")));
extern const int32_t wrapper_table_suspend[] __attribute__((visibility("hidden")));

void *wrapper_table_find(void *pointer) {
    if (!pointer || !sharing_wanted() || !driver_load()) return pointer;
    int number = driver_number_of(pointer);
    if (number < 0) return pointer;
    const int32_t *table = engine_wanted() == ENGINE_SUSPEND ? wrapper_table_suspend : wrapper_table_offsets;
    const int32_t *offset = &table[number];
    return *offset ? (char *)offset + *offset : pointer;
}

/* The same for an answer of cuGetProcAddress: a name at a version, with flags. */
static void *find_by_name(void *pointer, const char *asked, int version, uint64_t flags) {
    void *wrapper = wrapper_table_find(pointer);
    if (wrapper != pointer || !asked || !sharing_wanted()) return wrapper;
    /* a function that the library answers for but does not export */
    return driver_learn_answer(pointer, asked, version, flags) ? wrapper_table_find(pointer) : pointer;
}

CUresult wrapped_cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    CUresult result = real.cuGetProcAddress(symbol, function, version, flags);
    if (result == CUDA_SUCCESS && function && *function) *function = find_by_name(*function, symbol, version, flags);
    return result;
}
EXPORTED(cuGetProcAddress);

CUresult wrapped_cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    CUresult result = real.cuGetProcAddress_v2(symbol, function, version, flags, status);
    if (result == CUDA_SUCCESS && function && *function) *function = find_by_name(*function, symbol, version, flags);
    return result;
}
EXPORTED(cuGetProcAddress_v2);
