#define _GNU_SOURCE
#include "wrappers/nvml.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>

#include "platform/libc_dlsym.h"
#include "platform/sharing.h"
#include "wrappers/exported.h"
#include "wrappers/reported.h"
#include "driver/driver.h"

#define NVML_ERROR_FUNCTION_NOT_FOUND 13

typedef int nvmlReturn;
typedef void *nvmlDevice;

static _Atomic(void *) real_memory, real_memory_v2, real_uuid;

int wrapped_nvmlDeviceGetMemoryInfo(nvmlDevice device, nvmlMemory *memory);
int wrapped_nvmlDeviceGetMemoryInfo_v2(nvmlDevice device, nvmlMemory_v2 *memory);

static bool nvml_load(void) {
    if (atomic_load(&real_memory)) return true;
    if (!late_libc_load()) return false;
    void *library = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (library) {
        atomic_store(&real_uuid, libc_dlsym(library, "nvmlDeviceGetUUID"));
        atomic_store(&real_memory_v2, libc_dlsym(library, "nvmlDeviceGetMemoryInfo_v2"));
        atomic_store(&real_memory, libc_dlsym(library, "nvmlDeviceGetMemoryInfo"));
    }
    dlerror(); /* the program's next dlerror() is about its own calls */
    return library != NULL;
}

void *nvml_wrapper_of(void *pointer) {
    if (!sharing_wanted() || !nvml_load()) return pointer;
    if (pointer == atomic_load(&real_memory)) return (void *)wrapped_nvmlDeviceGetMemoryInfo;
    if (pointer == atomic_load(&real_memory_v2)) return (void *)wrapped_nvmlDeviceGetMemoryInfo_v2;
    return pointer;
}

static int hex(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/* The GPU that NVML's handle means, if CUDA has shown it to this process: "GPU-" and 16 bytes in hexadecimal with
 * dashes. */
static struct gpu *gpu_of(nvmlDevice device) {
    nvmlReturn (*uuid_of)(nvmlDevice, char *, unsigned) = atomic_load(&real_uuid);
    char text[96] = "";
    unsigned char uuid[16];
    if (!gpu_count || !uuid_of || uuid_of(device, text, sizeof text) != 0 || strncmp(text, "GPU-", 4) != 0) return NULL;
    const char *at = text + 4;
    for (int i = 0; i < 16; i++) {
        if (*at == '-') at++;
        int high = hex(at[0]), low = high < 0 ? -1 : hex(at[1]);
        if (low < 0) return NULL;
        uuid[i] = (unsigned char)(high * 16 + low);
        at += 2;
    }
    return gpu_of_uuid(uuid);
}

int wrapped_nvmlDeviceGetMemoryInfo(nvmlDevice device, nvmlMemory *memory) {
    nvmlReturn (*call)(nvmlDevice, nvmlMemory *) = nvml_load() ? atomic_load(&real_memory) : NULL;
    if (!call) return NVML_ERROR_FUNCTION_NOT_FOUND;
    nvmlReturn result = call(device, memory);
    struct gpu *gpu = result == 0 && memory ? gpu_of(device) : NULL;
    uint64_t available, total;
    if (gpu && reported_memory(gpu, memory->free, &available, &total)) {
        memory->total = total;
        memory->free = available;
        memory->used = total - available;
    }
    return result;
}
EXPORTED(nvmlDeviceGetMemoryInfo);

int wrapped_nvmlDeviceGetMemoryInfo_v2(nvmlDevice device, nvmlMemory_v2 *memory) {
    nvmlReturn (*call)(nvmlDevice, nvmlMemory_v2 *) = nvml_load() ? atomic_load(&real_memory_v2) : NULL;
    if (!call) return NVML_ERROR_FUNCTION_NOT_FOUND;
    nvmlReturn result = call(device, memory);
    struct gpu *gpu = result == 0 && memory ? gpu_of(device) : NULL;
    uint64_t available, total;
    if (gpu && reported_memory(gpu, memory->free, &available, &total)) {
        memory->total = total;
        memory->reserved = 0;
        memory->free = available;
        memory->used = total - available;
    }
    return result;
}
EXPORTED(nvmlDeviceGetMemoryInfo_v2);
