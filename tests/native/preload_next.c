/* A library that asks for the next `gpushare_test_word` after itself; and, compiled with -DWORD, one that has such a
 * word. */
#define _GNU_SOURCE
#include <dlfcn.h>

#define EXPORT __attribute__((visibility("default")))

#ifdef WORD
EXPORT const char *gpushare_test_word(void) {
    return WORD;
}
#endif

#ifdef ASKS
EXPORT const char *next_word(void) {
    const char *(*next)(void) = (const char *(*)(void))dlsym(RTLD_NEXT, "gpushare_test_word");
    return next ? next() : "none";
}
#endif
