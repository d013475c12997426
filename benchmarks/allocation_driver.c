/* A libcuda.so.1 that answers at once: what is measured on it is what lies above it. One GPU, one context, and memory
   that nobody looks into. Built by benchmarks/allocation.py. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
static int current;
static _Atomic uint64_t next = 1 << 30;

EXPORT int cuInit(unsigned flags) {
    return 0;
}
EXPORT int cuDeviceGetCount(int *count) {
    *count = 1;
    return 0;
}
EXPORT int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return 0;
}
EXPORT int cuDeviceGetUuid(void *uuid, int device) {
    memset(uuid, 7, 16);
    return 0;
}
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = 1;
    return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &current;
    return 0;
}
EXPORT int cuCtxSetCurrent(void *context) {
    return 0;
}
EXPORT int cuCtxGetCurrent(void **context) {
    *context = &current;
    return 0;
}
EXPORT int cuCtxGetDevice(int *device) {
    *device = 0;
    return 0;
}
EXPORT int cuStreamCreate(void **stream, unsigned flags) {
    *stream = &next;
    return 0;
}
/* Addresses come again, as a driver's do: a ring of 64 Ki places of 64 KiB. */
static int place(uint64_t *at) {
    *at = next;
    next = next + 65536 < (5ull << 30) ? next + 65536 : 1 << 30;
    return 0;
}
EXPORT int cuMemAlloc_v2(uint64_t *at, size_t bytes) {
    return place(at);
}
EXPORT int cuMemAllocManaged(uint64_t *at, size_t bytes, unsigned flags) {
    return place(at);
}
EXPORT int cuMemAdvise(uint64_t at, size_t bytes, int advice, int device) {
    return 0;
}
EXPORT int cuMemFree_v2(uint64_t at) {
    return 0;
}
