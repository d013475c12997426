/* A libcuda.so.1 that does nothing but answer. Functions that put work on a GPU say which of them was called: the
   result is the function's own number. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    int type, id;
} location;

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
/* With STUB_CONTEXT set there is a context, the device's primary one, unless another was pushed; else there is none. */
static void *pushed, *destroyed;
EXPORT int stub_primary_active = 1;

EXPORT int cuCtxGetCurrent(void **context) {
    *context = pushed ? pushed : getenv("STUB_CONTEXT") ? &cuInit : NULL;
    return 0;
}
EXPORT int cuCtxPushCurrent_v2(void *context) {
    if (context == destroyed) abort();
    pushed = context;
    return 0;
}
EXPORT int cuCtxPopCurrent_v2(void **context) {
    *context = pushed;
    pushed = NULL;
    return 0;
}
EXPORT int cuCtxSetCurrent(void *context) {
    if (context && context == destroyed) abort();
    pushed = context;
    return 0;
}
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *active = stub_primary_active > 0;
    return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &cuInit;
    return 0;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    return 0;
}
/* A green context is its own context. Its end takes the primary one with it where stub_primary_active is 1. */
EXPORT int cuCtxFromGreenCtx(void **context, void *green) {
    *context = green;
    return 0;
}
EXPORT int cuGreenCtxDestroy(void *green) {
    destroyed = green;
    stub_primary_active--;
    return 0;
}
EXPORT int cuCtxGetDevice(int *device) {
    *device = 0;
    return getenv("STUB_CONTEXT") ? 0 : 201;
}
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = 1;
    return 0;
}
EXPORT int cuMemGetInfo_v2(size_t *available, size_t *total) {
    *available = *total = (size_t)1 << 40;
    return 0;
}

/* Memory of every kind, which nobody looks into. */
static uint64_t next_address = 1 << 20;

static int reserve(uint64_t *out, size_t bytes) {
    *out = next_address;
    next_address += (bytes + 4095) / 4096 * 4096;
    return 0;
}

EXPORT int cuMemAlloc_v2(uint64_t *out, size_t bytes) {
    return reserve(out, bytes);
}
EXPORT int cuMemAllocManaged(uint64_t *out, size_t bytes, unsigned flags) {
    return getenv("STUB_NO_MANAGED") ? 2 : reserve(out, bytes);
}
EXPORT int cuMemFree_v2(uint64_t at) {
    return 0;
}
/* One pool, whose figures the program sets. */
EXPORT uint64_t stub_pool_reserved, stub_pool_used;

EXPORT int cuMemAllocAsync(uint64_t *out, size_t bytes, void *stream) {
    return reserve(out, bytes);
}
EXPORT int cuDeviceGetMemPool(void **pool, int device) {
    *pool = &stub_pool_reserved;
    return 0;
}
EXPORT int cuMemPoolGetAttribute(void *pool, int attribute, uint64_t *value) {
    *value = attribute == 5 ? stub_pool_reserved : stub_pool_used;
    return 0;
}
EXPORT int cuMemPoolTrimTo(void *pool, size_t keep) {
    return 0;
}
/* With STUB_SLOW set, in microseconds: work that takes so long. */
EXPORT int cuCtxSynchronize(void) {
    if (getenv("STUB_SLOW")) usleep((unsigned)atoi(getenv("STUB_SLOW")));
    return 0;
}

/* What is shared with other processes, and what is managed: a handle is any number. */
#define MANAGED_ADDRESS 0xabc000
typedef struct {
    char bytes[64];
} shared_handle;

EXPORT int cuIpcOpenMemHandle_v2(uint64_t *out, shared_handle handle, unsigned flags) {
    return reserve(out, 1);
}
EXPORT int cuIpcCloseMemHandle(uint64_t at) {
    return 0;
}
EXPORT int cuIpcGetEventHandle(shared_handle *out, void *event) {
    return 0;
}
EXPORT int cuIpcOpenEventHandle(void **out, shared_handle handle) {
    return reserve((uint64_t *)out, 1);
}
EXPORT int cuEventDestroy_v2(void *event) {
    return 0;
}
EXPORT int cuMemExportToShareableHandle(void *out, uint64_t handle, int type, uint64_t flags) {
    return 0;
}
EXPORT int cuMemImportFromShareableHandle(uint64_t *out, void *handle, int type) {
    return reserve(out, 1);
}
EXPORT int cuMemGetHandleForAddressRange(void *out, uint64_t at, size_t bytes, int type, uint64_t flags) {
    return 0;
}
EXPORT int cuMulticastCreate(uint64_t *out, const void *prop) {
    return reserve(out, 1);
}
EXPORT int cuMemPoolExportToShareableHandle(void *out, void *pool, int type, uint64_t flags) {
    return 0;
}
EXPORT int cuMemPoolImportFromShareableHandle(void **out, void *handle, int type, uint64_t flags) {
    return reserve((uint64_t *)out, 1);
}
EXPORT int cuMemPoolDestroy(void *pool) {
    return 0;
}
EXPORT int cuMemAllocFromPoolAsync(uint64_t *out, size_t bytes, void *pool, void *stream) {
    *out = MANAGED_ADDRESS;
    return 0;
}
EXPORT int cuImportExternalMemory(void **out, const void *description) {
    return reserve((uint64_t *)out, 1);
}
EXPORT int cuDestroyExternalMemory(void *memory) {
    return 0;
}
EXPORT int cuModuleGetGlobal_v2(uint64_t *out, size_t *bytes, void *module, const char *name) {
    *bytes = 64;
    if (strcmp(name, "managed") != 0) return reserve(out, 64);
    *out = MANAGED_ADDRESS;
    return 0;
}
EXPORT int cuModuleUnload(void *module) {
    return 0;
}
EXPORT int cuPointerGetAttribute(void *data, int attribute, uint64_t at) {
    *(unsigned char *)data = attribute == 8 && at == MANAGED_ADDRESS;
    return 0;
}
EXPORT int cuIpcGetMemHandle(void *handle, uint64_t at) {
    return 0;
}
EXPORT int cuMemCreate(uint64_t *handle, size_t bytes, const void *prop, uint64_t flags) {
    return reserve(handle, bytes);
}
EXPORT int cuMemRelease(uint64_t handle) {
    return 0;
}
EXPORT int cuMemRetainAllocationHandle(uint64_t *handle, void *at) {
    *handle = 77;
    return 0;
}
EXPORT int cuMemMap(uint64_t at, size_t bytes, size_t offset, uint64_t handle, uint64_t flags) {
    return 0;
}
EXPORT int stub_unmap_answers;
EXPORT int cuMemUnmap(uint64_t at, size_t bytes) {
    return stub_unmap_answers;
}
EXPORT int cuArrayCreate_v2(void **array, const void *descriptor) {
    return reserve((uint64_t *)array, 1);
}
EXPORT int cuArray3DCreate_v2(void **array, const void *descriptor) {
    return reserve((uint64_t *)array, 1);
}
EXPORT int cuArrayDestroy(void *array) {
    return 0;
}
EXPORT int cuMipmappedArrayCreate(void **array, const void *descriptor, unsigned levels) {
    return reserve((uint64_t *)array, 1);
}
EXPORT int cuMipmappedArrayDestroy(void *array) {
    return 0;
}
EXPORT int cuGraphAddMemAllocNode(void *node, void *graph, const void *after, size_t count, void *params) {
    return 0;
}
EXPORT int cuDeviceGetGraphMemAttribute(int device, int attribute, uint64_t *value) {
    *value = 5 << 20;
    return 0;
}

EXPORT int cuMemPrefetchAsync(uint64_t at, size_t bytes, int device, void *stream) {
    return 8000;
}
EXPORT int cuMemPrefetchAsync_ptsz(uint64_t at, size_t bytes, int device, void *stream) {
    return 8001;
}
EXPORT int cuMemPrefetchAsync_v2(uint64_t at, size_t bytes, location to, unsigned flags, void *stream) {
    return 12020;
}
EXPORT int cuMemPrefetchAsync_v2_ptsz(uint64_t at, size_t bytes, location to, unsigned flags, void *stream) {
    return 12021;
}
EXPORT int cuMemsetD8_v2(uint64_t at, unsigned char value, size_t n) {
    return 3020;
}
EXPORT int cuMemsetD8_v2_ptds(uint64_t at, unsigned char value, size_t n) {
    return 7000;
}
EXPORT int cuGraphLaunch(void *exec, void *stream) {
    return 10000;
}

/* CUDA 13.1 to 13.4 */
EXPORT int cuMemcpyWithAttributesAsync(uint64_t to, uint64_t from, size_t bytes, void *attributes, void *stream) {
    return 13020;
}
EXPORT int cuMemcpyWithAttributesAsync_ptsz(uint64_t to, uint64_t from, size_t bytes, void *attributes, void *stream) {
    return 13021;
}
EXPORT int cuMemcpy3DWithAttributesAsync(void *copy, unsigned long long flags, void *stream) {
    return 13022;
}
/* A stream, an event or a context is whatever the program says; one capture at a time. */
static void *captured;
EXPORT int cuStreamBeginRecaptureToGraph(void *stream, int mode, void *graph, void *callback, void *data) {
    captured = stream;
    return 0;
}
EXPORT int cuStreamEndCapture(void *stream, void **graph) {
    captured = NULL;
    return 0;
}
EXPORT int cuStreamBeginCaptureToCig(void *stream, void *parameters) {
    captured = stream;
    return 0;
}
EXPORT int cuStreamEndCaptureToCig(void *stream) {
    captured = NULL;
    return 0;
}
EXPORT int cuStreamIsCapturing(void *stream, int *status) {
    *status = stream && stream == captured;
    return 0;
}
EXPORT int cuStreamGetCtx(void *stream, void **context) {
    return cuCtxGetCurrent(context);
}
EXPORT int cuGraphAddNode_v3(void *node, void *graph, const void *after, const void *edges, size_t count,
                             void *params) {
    return 0;
}
EXPORT int cuStreamQuery(void *stream) {
    return 2000;
} /* one that the library does not wrap */

/* A future form of a function whose present form is exported: unknown, with another ABI. */
static int graph_launch_of_the_future(void *exec, void *stream, void *more) {
    return 99000;
}
/* A function that can be asked for, but is not exported. */
static int graph_upload(void *exec, void *stream) {
    return 11010;
}

EXPORT int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status);

static void *answer(const char *symbol, int version, uint64_t flags) {
    int twin = (flags & 2) != 0;
    if (strcmp(symbol, "cuMemPrefetchAsync") == 0) {
        if (version >= 12020) return twin ? (void *)cuMemPrefetchAsync_v2_ptsz : (void *)cuMemPrefetchAsync_v2;
        return twin ? (void *)cuMemPrefetchAsync_ptsz : (void *)cuMemPrefetchAsync;
    }
    if (strcmp(symbol, "cuMemsetD8") == 0)
        return twin && version >= 7000 ? (void *)cuMemsetD8_v2_ptds : (void *)cuMemsetD8_v2;
    if (strcmp(symbol, "cuGraphLaunch") == 0)
        return version >= 99000 ? (void *)graph_launch_of_the_future : (void *)cuGraphLaunch;
    if (strcmp(symbol, "cuMemcpyWithAttributesAsync") == 0)
        return twin ? (void *)cuMemcpyWithAttributesAsync_ptsz : (void *)cuMemcpyWithAttributesAsync;
    if (strcmp(symbol, "cuGraphAddNode") == 0) return version >= 13040 ? (void *)cuGraphAddNode_v3 : NULL;
    if (strcmp(symbol, "cuGraphUpload") == 0) return (void *)graph_upload;
    if (strcmp(symbol, "cuStreamQuery") == 0) return (void *)cuStreamQuery;
    if (strcmp(symbol, "cuInit") == 0) return (void *)cuInit;
    if (strcmp(symbol, "cuGetProcAddress") == 0) return (void *)cuGetProcAddress_v2;
    return NULL;
}

EXPORT int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    if (!symbol || !function) return 1;
    *function = answer(symbol, version, flags);
    if (status) *status = *function ? 0 : 1;
    return *function ? 0 : 500;
}

EXPORT int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
