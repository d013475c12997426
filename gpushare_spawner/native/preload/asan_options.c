/* AddressSanitizer's runtime as a shared library ends a program in which another library is loaded before it, as each
   preloaded one is: that one could hide the runtime's functions. This library has none of their names, so the check is
   off. The runtime asks for options before anything else, and finds this function before its own, which has none. A
   program that defines it itself, and ASAN_OPTIONS, are asked as ever. */
#include "platform/common.h"

const char *__asan_default_options(void) __attribute__((visibility("default")));
const char *__asan_default_options(void) {
    return "verify_asan_link_order=0";
}
