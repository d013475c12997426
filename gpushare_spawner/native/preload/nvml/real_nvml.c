#define _GNU_SOURCE
#include "nvml/real_nvml.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "platform/libc_dlsym.h"

/* Several threads may look for it at once. The first one's stays until the process ends: others may read it already. */
static struct real_nvml *_Atomic found;
static const struct real_nvml nothing;

/* Characters, not pointers: the dynamic linker would have to relocate each pointer in every process. */
#define WRAPPED(name, parameters) #name "\0"
#define CALLED(name, parameters)  #name "\0"
static const char names[] =
#include "nvml/nvml_calls.h"
    ;

const struct real_nvml *real_nvml(void) {
    const struct real_nvml *at = atomic_load_explicit(&found, memory_order_acquire);
    return at ? at : &nothing;
}

bool real_nvml_load(void) {
    if (atomic_load_explicit(&found, memory_order_acquire)) return true;
    if (!late_libc_load()) return false;
    /* RTLD_NOLOAD: this library never brings NVML into a program that has none */
    void *library = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_NOLOAD);
    struct real_nvml *fresh = library ? malloc(sizeof *fresh) : NULL, *none = NULL;
    if (fresh) {
        const char *name = names;
        for (size_t i = 0; i < sizeof *fresh / sizeof(void *); i++, name += strlen(name) + 1)
            ((void **)fresh)[i] = libc_dlsym(library, name);
        if (!atomic_compare_exchange_strong(&found, &none, fresh)) free(fresh);
    }
    dlerror(); /* the program's next dlerror() is about its own calls */
    return fresh != NULL;
}

static int hex(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

static bool uuid_text(nvmlDevice device, char text[NVML_UUID_TEXT]) {
    return real_nvml()->nvmlDeviceGetUUID &&
           real_nvml()->nvmlDeviceGetUUID(device, text, NVML_UUID_TEXT) == NVML_SUCCESS;
}

bool real_nvml_knows(nvmlDevice device) {
    char text[NVML_UUID_TEXT];
    return uuid_text(device, text);
}

bool real_nvml_uuid(nvmlDevice device, unsigned char uuid[16]) {
    char text[NVML_UUID_TEXT] = "";
    if (!uuid_text(device, text)) return false;
    if (strncmp(text, "GPU-", 4) != 0) return false;
    const char *at = text + 4;
    for (int i = 0; i < 16; i++) {
        if (*at == '-') at++;
        int high = hex(at[0]), low = high < 0 ? -1 : hex(at[1]);
        if (low < 0) return false;
        uuid[i] = (unsigned char)(high * 16 + low);
        at += 2;
    }
    return true;
}

nvmlReturn real_nvml_handle(const unsigned char uuid[16], nvmlDevice *device) {
    char text[NVML_UUID_TEXT] = "GPU", *at = text + 3;
    if (!real_nvml()->nvmlDeviceGetHandleByUUID) return NVML_ERROR_FUNCTION_NOT_FOUND;
    for (int i = 0; i < 16; i++) /* a dash before the bytes 0, 4, 6, 8 and 10 */
        at += sprintf(at, i == 0 || (i >= 4 && i <= 10 && i % 2 == 0) ? "-%02x" : "%02x", uuid[i]);
    return real_nvml()->nvmlDeviceGetHandleByUUID(text, device);
}
