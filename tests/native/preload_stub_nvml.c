/* A libnvidia-ml.so.1 of two GPUs that is strict about its arguments and full of a neighbour: every list has pid 4711.
   Only what the tests of the library need. */
#include <string.h>

#define EXPORT    __attribute__((visibility("default")))
#define NEIGHBOUR 4711

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, INSUFFICIENT_SIZE, MISMATCH = 25 };

static int users;
static char gpus[2];

static int check(const char *device, const void *argument) {
    if (!users) return UNINITIALIZED;
    return (device == &gpus[0] || device == &gpus[1]) && argument ? SUCCESS : INVALID_ARGUMENT;
}

EXPORT int nvmlInit_v2(void) {
    users++;
    return SUCCESS;
}
EXPORT int nvmlShutdown(void) {
    if (!users) return UNINITIALIZED;
    users--;
    return SUCCESS;
}
EXPORT const char *nvmlErrorString(int error) {
    return error == UNINITIALIZED ? "Uninitialized" : "an error";
}
EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!users || !count) return users ? INVALID_ARGUMENT : UNINITIALIZED;
    *count = 2;
    return SUCCESS;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (!users || !device || index > 1) return users ? INVALID_ARGUMENT : UNINITIALIZED;
    *device = &gpus[index];
    return SUCCESS;
}
EXPORT int nvmlDeviceGetUUID(char *device, char *uuid, unsigned length) {
    int bad = check(device, uuid);
    if (bad) return bad;
    if (length < 41) return INSUFFICIENT_SIZE;
    memcpy(uuid, "GPU-07070707-0707-0707-0707-070707070707", 41);
    if (device == &gpus[1])
        for (char *at = uuid; *at; at++)
            if (*at == '7') *at = '8';
    return SUCCESS;
}
EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (!users || !uuid || !device || strlen(uuid) != 40) return users ? INVALID_ARGUMENT : UNINITIALIZED;
    *device = &gpus[uuid[5] == '8'];
    return SUCCESS;
}

typedef struct {
    unsigned long long total, free, used;
} memory_v1;
EXPORT int nvmlDeviceGetMemoryInfo(char *device, memory_v1 *memory) {
    int bad = check(device, memory);
    if (!bad) *memory = (memory_v1){1000, 50, 950};
    return bad;
}
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} memory_v2;
EXPORT int nvmlDeviceGetMemoryInfo_v2(char *device, memory_v2 *memory) {
    int bad = check(device, memory);
    if (bad) return bad;
    if (memory->version != (sizeof *memory | 2u << 24)) return MISMATCH;
    *memory = (memory_v2){memory->version, 1000, 0, 50, 950};
    return SUCCESS;
}
EXPORT int nvmlDeviceGetUtilizationRates(char *device, unsigned *rates) {
    int bad = check(device, rates);
    if (!bad) rates[0] = 80, rates[1] = 40;
    return bad;
}

/* One entry of the neighbour's, of any size, with the pid somewhere in it. */
static int tell_at(char *device, unsigned *count, char *out, size_t size, size_t pid) {
    int bad = check(device, count);
    unsigned room = bad ? 0 : *count;
    if (bad) return bad;
    if (room && !out) return INVALID_ARGUMENT;
    *count = 1;
    if (!room) return INSUFFICIENT_SIZE;
    memset(out, 0xee, size);
    *(unsigned *)(out + pid) = NEIGHBOUR;
    return SUCCESS;
}
static int tell(char *device, unsigned *count, void *out, size_t size) {
    return tell_at(device, count, out, size, 0);
}
#define LISTS(name, size)                                                                                              \
    EXPORT int name(char *device, unsigned *count, void *out) {                                                        \
        return tell(device, count, out, size);                                                                         \
    }
LISTS(nvmlDeviceGetComputeRunningProcesses, 16)
LISTS(nvmlDeviceGetComputeRunningProcesses_v2, 24)
LISTS(nvmlDeviceGetComputeRunningProcesses_v3, 24)
LISTS(nvmlDeviceGetGraphicsRunningProcesses, 16)
LISTS(nvmlDeviceGetGraphicsRunningProcesses_v2, 24)
LISTS(nvmlDeviceGetGraphicsRunningProcesses_v3, 24)
LISTS(nvmlDeviceGetMPSComputeRunningProcesses, 16)
LISTS(nvmlDeviceGetMPSComputeRunningProcesses_v2, 24)
LISTS(nvmlDeviceGetMPSComputeRunningProcesses_v3, 24)
LISTS(nvmlDeviceGetAccountingPids, 4)
LISTS(nvmlDeviceGetEncoderSessions, 40)
LISTS(nvmlDeviceGetFBCSessions, 48)

EXPORT int nvmlDeviceGetAccountingStats(char *device, unsigned pid, void *out) {
    int bad = check(device, out);
    if (!bad && pid == NEIGHBOUR) memset(out, 0xee, 56);
    return bad ? bad : pid == NEIGHBOUR ? SUCCESS : NOT_FOUND;
}
EXPORT int nvmlDeviceGetProcessUtilization(char *device, void *out, unsigned *count, unsigned long long seen) {
    if (out) return tell(device, count, out, 32);
    int bad = check(device, count);
    if (!bad) *count = 100;
    return bad ? bad : INSUFFICIENT_SIZE;
}
typedef struct {
    unsigned version, mode, count;
    void *entries;
} details;
EXPORT int nvmlDeviceGetRunningProcessDetailList(char *device, details *list) {
    int bad = check(device, list);
    if (bad) return bad;
    if (list->version != (sizeof *list | 1u << 24)) return MISMATCH;
    return list->mode > 2 ? INVALID_ARGUMENT : tell(device, &list->count, list->entries, 32);
}
typedef struct {
    unsigned version, count;
    unsigned long long seen;
    void *entries;
} uses;
EXPORT int nvmlDeviceGetProcessesUtilizationInfo(char *device, uses *list) {
    int bad = check(device, list);
    if (bad) return bad;
    if (list->version != (sizeof *list | 1u << 24)) return MISMATCH;
    return tell_at(device, &list->count, list->entries, 40, 8); /* behind the time */
}
