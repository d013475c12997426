/* Queries of a program on devices. */
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "common/mig.h"
#include "cuda/driver/driver.h"

/* Return the GPU of a device, which is the device itself or the GPU of an instance. */
static int parent(CUdevice device) {
    return mig_parent(driver.state, driver.gpu[device]);
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    REQUIRE_INIT();
    REQUIRE(count, CUDA_ERROR_INVALID_VALUE);
    *count = driver.devices;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    REQUIRE_INIT();
    REQUIRE(device, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_exists(ordinal), CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    REQUIRE_INIT();
    REQUIRE(name && length > 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_exists(device), CUDA_ERROR_INVALID_DEVICE);
    char text[MIG_NAME];
    mig_name(driver.state, driver.gpu[device], text);
    snprintf(name, (size_t)length, "%s", text);
    return CUDA_SUCCESS;
}

static CUresult give_uuid(CUuuid *uuid, CUdevice device, int of_parent) {
    REQUIRE_INIT();
    REQUIRE(uuid, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_exists(device), CUDA_ERROR_INVALID_DEVICE);
    int number = of_parent ? parent(device) : driver.gpu[device];
    memcpy(uuid->bytes, driver.state->gpus[number].uuid, 16);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    return give_uuid(uuid, device, 0);
}

/* The function from before CUDA 11.4 supports only whole GPUs. */
EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    return give_uuid(uuid, device, 1);
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    REQUIRE_INIT();
    REQUIRE(bytes, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_exists(device), CUDA_ERROR_INVALID_DEVICE);
    *bytes = mig_memory(driver.state, driver.gpu[device]);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
    REQUIRE_INIT();
    REQUIRE(major && minor, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_exists(device), CUDA_ERROR_INVALID_DEVICE);
    *major = 7;
    *minor = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    REQUIRE_INIT();
    REQUIRE(text && length >= 13, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_exists(device), CUDA_ERROR_INVALID_DEVICE);
    snprintf(text, (size_t)length, "0000:%02X:00.0", parent(device) + 1);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text) {
    REQUIRE_INIT();
    REQUIRE(device && text, CUDA_ERROR_INVALID_VALUE);
    unsigned domain, bus, slot, function = 0;
    int fields = sscanf(text, "%x:%x:%x.%x", &domain, &bus, &slot, &function);
    if (fields < 3) {
        domain = 0;
        fields = sscanf(text, "%x:%x.%x", &bus, &slot, &function);
    }
    REQUIRE(fields >= 2, CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < driver.devices; i++) {
        if (domain == 0 && bus == (unsigned)parent(i) + 1 && slot == 0 && function == 0) {
            *device = i;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

/* The attributes of a small Ampere GPU; attributes that are not listed are 0 (missing or not supported). */
static int attribute(int which, CUdevice device) {
    struct mig_parts parts = mig_parts(driver.state, driver.gpu[device]);
    switch (which) {
    case 1: /* threads per block */
    case 2: /* block x */
    case 3: /* block y */ return 1024;
    case 4: /* block z */ return 64;
    case 5: /* grid x */ return 0x7fffffff;
    case 6: /* grid y */
    case 7: /* grid z */ return 65535;
    case 8: /* shared memory per block */ return 48 * 1024;
    case 9: /* constant memory */ return 64 * 1024;
    case 10: /* warp */ return 32;
    case 11: /* pitch */ return 0x7fffffff;
    case 12: /* registers per block */
    case 82: /* registers per multiprocessor */ return 65536;
    case 13: /* clock, kHz */ return 1530000;
    case 14: /* texture alignment */
    case 30: /* surface alignment */ return 512;
    case 15: /* copies overlap with kernels */ return 1;
    case 16: /* multiprocessors */ return (int)parts.multiprocessors;
    case 19: /* can map host memory */ return 1;
    case 21: /* textures and surfaces have sizes, although they are unused */
    case 22:
    case 23: return 131072;
    case 31: /* concurrent kernels; kernels of one process queue */ return 1;
    case 33: /* PCI bus */ return parent(device) + 1;
    case 36: /* memory clock, kHz */ return 877000;
    case 37: /* memory bus, bits */ return 4096 / MIG_MEMORY_SLICES * (int)parts.memory_slices;
    case 38: /* L2 */ return (6 << 20) / MIG_MEMORY_SLICES * (int)parts.memory_slices;
    case 39: /* threads per multiprocessor */ return 2048;
    case 40: /* copy engines: one in each direction */ return 2;
    case 41: /* unified addressing */ return 1;
    case 75: /* compute capability: CUDA 13's compilers support none below 7.5 */ return 8;
    case 76: return 0;
    case 78: /* stream priorities */
    case 79: /* L1 caches */
    case 80: return 1;
    case 81: /* shared memory per multiprocessor */ return 164 * 1024;
    case 97: /* for a block that requests more */ return 163 * 1024;
    case 83:  /* managed memory */
    case 89:  /* ... while kernels run */
    case 90:  /* preemption */
    case 91:  /* registered memory under its own address */
    case 95:  /* cooperative launch */
    case 99:  /* host memory can be registered */
    case 102: /* virtual memory management */
    case 115: /* memory pools */
    case 122: /* 64-bit stream memory operations */
    case 123: /* wait for not-or */
    case 129: /* unified function pointers */ return 1;
    case 87: /* double precision is half as fast */ return 2;
    case 106: /* blocks per multiprocessor */ return 32;
    case 109: /* access policy window */ return 0;
    case 131: /* no separate NUMA node */
    case 134: return -1;
    default: return 0;
    }
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int which, CUdevice device) {
    REQUIRE_INIT();
    REQUIRE(value && which > 0 && which < 256, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_exists(device), CUDA_ERROR_INVALID_DEVICE);
    *value = attribute(which, device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetProperties(CUdevprop *p, CUdevice device) {
    REQUIRE_INIT();
    REQUIRE(p, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_exists(device), CUDA_ERROR_INVALID_DEVICE);
    *p = (CUdevprop){
        1024, {1024, 1024, 64}, {0x7fffffff, 65535, 65535}, 48 * 1024, 64 * 1024, 32, 0x7fffffff, 65536, 1530000, 512};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetLuid(char *luid, unsigned *node_mask, CUdevice device) {
    REQUIRE_INIT();
    return CUDA_ERROR_NOT_SUPPORTED; /* Windows only */
}

EXPORT CUresult cuDeviceGetExecAffinitySupport(int *supported, int type, CUdevice device) {
    REQUIRE_INIT();
    REQUIRE(supported, CUDA_ERROR_INVALID_VALUE);
    *supported = 0;
    return CUDA_SUCCESS;
}
