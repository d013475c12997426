/* In place of preload/dlsym.c and platform/libc_dlsym.c in a build with sanitizers: their runtime asks dlsym before it
 * is ready for code that it instruments. */
#include <dlfcn.h>

#include "platform/libc_dlsym.h"

void *libc_dlsym(void *handle, const char *name) {
    return dlsym(handle, name);
}
