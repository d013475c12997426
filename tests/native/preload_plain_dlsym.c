/* In place of preload/dlsym.c in a build with sanitizers: their runtime asks dlsym before it is ready for code that it
 * instruments. */
#include <dlfcn.h>

#include "dlsym.h"

void *real_dlsym(void *handle, const char *name) {
    return dlsym(handle, name);
}
