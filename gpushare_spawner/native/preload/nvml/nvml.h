/* The parts of NVML that this library uses: the types, constants and structure layouts of its binary interface, its
   functions, and the wrappers that show the session instead of the GPU. */
#pragma once

#include "platform/common.h"

typedef int nvmlReturn;
typedef void *nvmlDevice;

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_FUNCTION_NOT_FOUND = 13,
};
#define NVML_UUID_TEXT 96    /* bytes that hold any UUID as text: NVML_DEVICE_UUID_V2_BUFFER_SIZE */
#define NVML_NO_ID     (~0u) /* no MIG instance */
#define NVML_NO_VALUE  (~0ull)

/* The first field of a versioned structure contains its size and version. */
#define NVML_VERSION_OF(type, number) ((unsigned)sizeof(type) | (unsigned)(number) << 24)

typedef struct { /* nvmlMemory_t */
    unsigned long long total, free, used;
} nvmlMemory;

typedef struct { /* nvmlMemory_v2_t */
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2;

typedef struct { /* nvmlUtilization_t, percent */
    unsigned gpu, memory;
} nvmlUtilization;

typedef struct { /* nvmlProcessInfo_v1_t */
    unsigned pid;
    unsigned long long used;
} nvmlProcess_v1;

typedef struct { /* nvmlProcessInfo_v2_t; _v3 takes the same */
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} nvmlProcess_v2;

typedef struct { /* nvmlProcessDetail_v1_t */
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
    unsigned long long used_protected;
} nvmlProcessDetail;

enum { NVML_MODE_COMPUTE = 0, NVML_MODE_MPS = 2 }; /* 1: graphics */
typedef struct {                                   /* nvmlProcessDetailList_v1_t */
    unsigned version, mode, count;
    nvmlProcessDetail *entries;
} nvmlProcessDetails;

typedef struct { /* nvmlProcessUtilizationSample_t */
    unsigned pid;
    unsigned long long at;                 /* microseconds since the epoch */
    unsigned sm, memory, encoder, decoder; /* percent */
} nvmlProcessUse;

typedef struct { /* nvmlProcessUtilizationInfo_v1_t */
    unsigned long long at;
    unsigned pid, sm, memory, encoder, decoder, jpeg, optical_flow;
} nvmlProcessUseDetail;

typedef struct { /* nvmlProcessesUtilizationInfo_v1_t */
    unsigned version, count;
    unsigned long long last_seen;
    nvmlProcessUseDetail *entries;
} nvmlProcessUses;

/* NVML's functions that are wrapped or only called. */
/* clang-format off */
#define NVML_CALLS(WRAPPED, CALLED)                                                                                    \
    WRAPPED(nvmlDeviceGetCount, (unsigned *count))                                                                     \
    WRAPPED(nvmlDeviceGetCount_v2, (unsigned *count))                                                                  \
    WRAPPED(nvmlDeviceGetHandleByIndex, (unsigned index, nvmlDevice *device))                                          \
    WRAPPED(nvmlDeviceGetHandleByIndex_v2, (unsigned index, nvmlDevice *device))                                       \
    WRAPPED(nvmlDeviceGetIndex, (nvmlDevice device, unsigned *index))                                                  \
    WRAPPED(nvmlDeviceGetMemoryInfo, (nvmlDevice device, nvmlMemory *memory))                                          \
    WRAPPED(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice device, nvmlMemory_v2 *memory))                                    \
    WRAPPED(nvmlDeviceGetUtilizationRates, (nvmlDevice device, nvmlUtilization *rates))                                \
    WRAPPED(nvmlDeviceGetComputeRunningProcesses, (nvmlDevice device, unsigned *count, nvmlProcess_v1 *out))           \
    WRAPPED(nvmlDeviceGetComputeRunningProcesses_v2, (nvmlDevice device, unsigned *count, nvmlProcess_v2 *out))        \
    WRAPPED(nvmlDeviceGetComputeRunningProcesses_v3, (nvmlDevice device, unsigned *count, nvmlProcess_v2 *out))        \
    WRAPPED(nvmlDeviceGetGraphicsRunningProcesses, (nvmlDevice device, unsigned *count, nvmlProcess_v1 *out))          \
    WRAPPED(nvmlDeviceGetGraphicsRunningProcesses_v2, (nvmlDevice device, unsigned *count, nvmlProcess_v2 *out))       \
    WRAPPED(nvmlDeviceGetGraphicsRunningProcesses_v3, (nvmlDevice device, unsigned *count, nvmlProcess_v2 *out))       \
    WRAPPED(nvmlDeviceGetMPSComputeRunningProcesses, (nvmlDevice device, unsigned *count, nvmlProcess_v1 *out))        \
    WRAPPED(nvmlDeviceGetMPSComputeRunningProcesses_v2, (nvmlDevice device, unsigned *count, nvmlProcess_v2 *out))     \
    WRAPPED(nvmlDeviceGetMPSComputeRunningProcesses_v3, (nvmlDevice device, unsigned *count, nvmlProcess_v2 *out))     \
    WRAPPED(nvmlDeviceGetRunningProcessDetailList, (nvmlDevice device, nvmlProcessDetails *list))                      \
    WRAPPED(nvmlDeviceGetProcessUtilization, (nvmlDevice device, nvmlProcessUse *out, unsigned *count, unsigned long long seen))\
    WRAPPED(nvmlDeviceGetProcessesUtilizationInfo, (nvmlDevice device, nvmlProcessUses *list))                         \
    WRAPPED(nvmlDeviceGetAccountingPids, (nvmlDevice device, unsigned *count, void *out))                              \
    WRAPPED(nvmlDeviceGetAccountingStats, (nvmlDevice device, unsigned pid, void *out))                                \
    WRAPPED(nvmlDeviceGetAccountingStats_v2, (nvmlDevice device, void *out))                                           \
    WRAPPED(nvmlDeviceGetEncoderSessions, (nvmlDevice device, unsigned *count, void *out))                             \
    WRAPPED(nvmlDeviceGetFBCSessions, (nvmlDevice device, unsigned *count, void *out))                                 \
    CALLED(nvmlDeviceGetUUID, (nvmlDevice device, char *uuid, unsigned length))                                        \
    CALLED(nvmlDeviceGetHandleByUUID, (const char *uuid, nvmlDevice *device))
/* clang-format on */

/* Return the wrapper for the address of the function with this name in the real libnvidia-ml, or the address itself.
   The first call looks up NVML's functions. Any thread; takes no lock of this library, only the dynamic linker's. */
void *nvml_find(void *pointer, const char *name);
