#include "wrappers/plain_memory.h"

#include <pthread.h>
#include <stdlib.h>

#include "driver/driver.h"
#include "memory/account.h"
#include "memory/allowance.h"
#include "memory/graph_memory.h"
#include "memory/ties.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- VMM: physical memory lives until its handle is released and its last mapping is gone, in either order ---- */

struct physical {
    CUmemHandle handle;
    size_t bytes;
    struct gpu *gpu;     /* NULL: not this process's; it counts nowhere */
    unsigned references; /* created or retained, not yet released */
    unsigned mappings;
    bool tied; /* to other processes: ties.h */
    struct physical *next;
};

struct mapping {
    CUdeviceptr at;
    size_t bytes;
    struct physical *physical;
    struct mapping *next;
};

static struct physical *physicals;
static struct mapping *mappings;

static struct physical *physical_of(CUmemHandle handle) {
    for (struct physical *entry = physicals; entry; entry = entry->next)
        if (entry->handle == handle && entry->references) return entry;
    return NULL;
}

/* With the lock held. */
static void drop_if_unused(struct physical *entry) {
    if (entry->references || entry->mappings) return;
    for (struct physical **link = &physicals; *link; link = &(*link)->next) {
        if (*link != entry) continue;
        *link = entry->next;
        break;
    }
    if (entry->gpu) account_return(entry->gpu, entry->bytes, ACCOUNT_PLAIN);
    if (entry->tied) ties_remove(TIE_PHYSICAL, (uintptr_t)entry);
    free(entry);
}

/* With the lock held. */
static void tie(struct physical *entry, enum tie_kind kind) {
    if (entry->tied) return;
    entry->tied = true;
    ties_add((struct tie){kind, TIE_PHYSICAL, (uintptr_t)entry, 0, entry->bytes, NULL});
}

/* Of another process, or of several at once. */
static void add_foreign(CUmemHandle handle, enum tie_kind kind) {
    struct physical *entry = malloc(sizeof *entry);
    if (!entry) {
        ties_lost();
        return;
    }
    *entry = (struct physical){.handle = handle, .references = 1};
    pthread_mutex_lock(&lock);
    tie(entry, kind);
    entry->next = physicals;
    physicals = entry;
    pthread_mutex_unlock(&lock);
}

CUresult wrapped_cuMemCreate(CUmemHandle *out, size_t bytes, const CUmemAllocationProp *prop,
                             unsigned long long flags) {
    bool device = out && prop && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    struct gpu *gpu = device ? gpu_of_device(prop->location.id) : NULL;
    if (!gpu) return real.cuMemCreate(out, bytes, prop, flags);
    if (!allowance_take(gpu, bytes, false, true)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real.cuMemCreate(out, bytes, prop, flags);
    struct physical *entry = result == CUDA_SUCCESS ? malloc(sizeof *entry) : NULL;
    if (!entry) {
        account_return(gpu, bytes, ACCOUNT_PLAIN);
        return result;
    }
    *entry = (struct physical){.handle = *out, .bytes = bytes, .gpu = gpu, .references = 1};
    pthread_mutex_lock(&lock);
    entry->next = physicals;
    physicals = entry;
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult wrapped_cuMemRetainAllocationHandle(CUmemHandle *out, void *at) {
    CUresult result = real.cuMemRetainAllocationHandle(out, at);
    if (result != CUDA_SUCCESS) return result;
    pthread_mutex_lock(&lock);
    for (struct mapping *mapping = mappings; mapping; mapping = mapping->next) {
        if ((CUdeviceptr)(uintptr_t)at - mapping->at >= mapping->bytes) continue;
        mapping->physical->handle = *out;
        mapping->physical->references++;
        break;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult wrapped_cuMemRelease(CUmemHandle handle) {
    /* forgotten under the lock together with the real release: the driver may give the handle out again at once */
    pthread_mutex_lock(&lock);
    CUresult result = real.cuMemRelease(handle);
    struct physical *entry = result == CUDA_SUCCESS ? physical_of(handle) : NULL;
    if (entry) {
        entry->references--;
        drop_if_unused(entry);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult wrapped_cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemHandle handle, unsigned long long flags) {
    CUresult result = real.cuMemMap(at, bytes, offset, handle, flags);
    if (result != CUDA_SUCCESS) return result;
    struct mapping *mapping = malloc(sizeof *mapping);
    if (!mapping) return result;
    pthread_mutex_lock(&lock);
    struct physical *entry = physical_of(handle);
    if (entry) {
        *mapping = (struct mapping){at, bytes, entry, mappings};
        mappings = mapping;
        entry->mappings++;
    } else {
        free(mapping); /* imported from another process, which counts it */
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult wrapped_cuMemUnmap(CUdeviceptr at, size_t bytes) {
    CUresult result = real.cuMemUnmap(at, bytes);
    if (result != CUDA_SUCCESS) return result;
    pthread_mutex_lock(&lock);
    for (struct mapping **link = &mappings; *link;) {
        struct mapping *mapping = *link;
        if (mapping->at - at < bytes) {
            *link = mapping->next;
            mapping->physical->mappings--;
            drop_if_unused(mapping->physical);
            free(mapping);
        } else {
            link = &mapping->next;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult wrapped_cuMemImportFromShareableHandle(CUmemHandle *out, void *handle, int type) {
    CUresult result = real.cuMemImportFromShareableHandle(out, handle, type);
    if (result == CUDA_SUCCESS) add_foreign(*out, TIE_OPENED);
    return result;
}

/* An object that GPUs of several processes may belong to. */
CUresult wrapped_cuMulticastCreate(CUmemHandle *out, const void *prop) {
    CUresult result = real.cuMulticastCreate(out, prop);
    if (result == CUDA_SUCCESS) add_foreign(*out, TIE_EXPORTED);
    return result;
}

CUresult wrapped_cuMemExportToShareableHandle(void *out, CUmemHandle handle, int type, unsigned long long flags) {
    CUresult result = real.cuMemExportToShareableHandle(out, handle, type, flags);
    if (result != CUDA_SUCCESS) return result;
    pthread_mutex_lock(&lock);
    struct physical *entry = physical_of(handle);
    if (entry) tie(entry, TIE_EXPORTED);
    pthread_mutex_unlock(&lock);
    return result;
}

void plain_memory_exported(CUdeviceptr at) {
    pthread_mutex_lock(&lock);
    for (struct mapping *mapping = mappings; mapping; mapping = mapping->next)
        if (at - mapping->at < mapping->bytes) tie(mapping->physical, TIE_EXPORTED);
    pthread_mutex_unlock(&lock);
}

/* ---- arrays: their size is computed from the descriptor; the driver's padding is not known ---- */

struct array {
    const void *handle;
    size_t bytes;
    struct gpu *gpu;
    struct array *next;
};

static struct array *arrays;

/* Bytes of an element of a CUarray_format (cuda.h): 8, 16 and 32-bit integers, half, float, and 8 and 16-bit normalized
   integers. Others (block compressed, planar) are taken as one byte a channel. */
static size_t element_bytes(int format, unsigned channels) {
    size_t bytes = 1;
    bool normalized_16 = (format >= 0xc3 && format <= 0xc5) || (format >= 0xc9 && format <= 0xcb);
    if (format == 0x02 || format == 0x09 || format == 0x10 || normalized_16) bytes = 2;
    if (format == 0x03 || format == 0x0a || format == 0x20) bytes = 4;
    return bytes * (channels ? channels : 1);
}

static size_t array_bytes(size_t width, size_t height, size_t depth, int format, unsigned channels, unsigned levels) {
    size_t sum = 0;
    for (unsigned level = 0; level < levels; level++) {
        size_t bytes = element_bytes(format, channels);
        if (__builtin_mul_overflow(bytes, width ? width : 1, &bytes) ||
            __builtin_mul_overflow(bytes, height ? height : 1, &bytes) ||
            __builtin_mul_overflow(bytes, depth ? depth : 1, &bytes))
            return 0;
        sum += bytes;
        width /= 2;
        height /= 2;
        depth /= 2;
    }
    return sum;
}

static void array_made(struct gpu *gpu, const void *handle, size_t bytes) {
    struct array *entry = malloc(sizeof *entry);
    if (!entry) {
        account_return(gpu, bytes, ACCOUNT_PLAIN);
        return;
    }
    *entry = (struct array){handle, bytes, gpu, NULL};
    pthread_mutex_lock(&lock);
    entry->next = arrays;
    arrays = entry;
    pthread_mutex_unlock(&lock);
}

static void array_gone(const void *handle) {
    pthread_mutex_lock(&lock);
    for (struct array **link = &arrays; *link; link = &(*link)->next) {
        if ((*link)->handle != handle) continue;
        struct array *entry = *link;
        *link = entry->next;
        account_return(entry->gpu, entry->bytes, ACCOUNT_PLAIN);
        free(entry);
        break;
    }
    pthread_mutex_unlock(&lock);
}

#define MAKING(call, size)                                                                                             \
    struct gpu *gpu = out && descriptor ? gpu_current() : NULL;                                                        \
    if (!gpu) return call;                                                                                             \
    size_t bytes = size;                                                                                               \
    if (!allowance_take(gpu, bytes, false, true)) return CUDA_ERROR_OUT_OF_MEMORY;                                     \
    CUresult result = call;                                                                                            \
    if (result == CUDA_SUCCESS)                                                                                        \
        array_made(gpu, *out, bytes);                                                                                  \
    else                                                                                                               \
        account_return(gpu, bytes, ACCOUNT_PLAIN);                                                                     \
    return result

CUresult wrapped_cuArrayCreate_v2(CUarray *out, const CUarrayDescriptor *descriptor) {
    MAKING(real.cuArrayCreate_v2(out, descriptor),
           array_bytes(descriptor->Width, descriptor->Height, 1, descriptor->Format, descriptor->NumChannels, 1));
}

CUresult wrapped_cuArray3DCreate_v2(CUarray *out, const CUarray3DDescriptor *descriptor) {
    MAKING(real.cuArray3DCreate_v2(out, descriptor),
           array_bytes(descriptor->Width, descriptor->Height, descriptor->Depth, descriptor->Format,
                       descriptor->NumChannels, 1));
}

CUresult wrapped_cuMipmappedArrayCreate(CUmipmap *out, const CUarray3DDescriptor *descriptor, unsigned levels) {
    MAKING(real.cuMipmappedArrayCreate(out, descriptor, levels),
           array_bytes(descriptor->Width, descriptor->Height, descriptor->Depth, descriptor->Format,
                       descriptor->NumChannels, levels < 32 ? levels : 32));
}

CUresult wrapped_cuArrayDestroy(CUarray array) {
    CUresult result = real.cuArrayDestroy(array);
    if (result == CUDA_SUCCESS) array_gone(array);
    return result;
}

CUresult wrapped_cuMipmappedArrayDestroy(CUmipmap array) {
    CUresult result = real.cuMipmappedArrayDestroy(array);
    if (result == CUDA_SUCCESS) array_gone(array);
    return result;
}

/* ---- memory nodes of graphs: the driver has a figure for them, asked for when the account is sent ---- */

CUresult wrapped_cuGraphAddMemAllocNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                                        void *params) {
    graph_memory_seen();
    return real.cuGraphAddMemAllocNode(out, graph, after, count, params);
}

CUresult wrapped_cuGraphAddNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                                CUgraphNodeParams *params) {
    if (params && params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) graph_memory_seen();
    return real.cuGraphAddNode(out, graph, after, count, params);
}

CUresult wrapped_cuGraphAddNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, const void *edges,
                                   size_t count, CUgraphNodeParams *params) {
    if (params && params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) graph_memory_seen();
    return real.cuGraphAddNode_v2(out, graph, after, edges, count, params);
}

CUresult wrapped_cuGraphAddNode_v3(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, const void *edges,
                                   size_t count, CUgraphNodeParams *params) {
    if (params && params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) graph_memory_seen();
    return real.cuGraphAddNode_v3(out, graph, after, edges, count, params);
}

void plain_memory_forget(void) {
    physicals = NULL;
    mappings = NULL;
    arrays = NULL;
    pthread_mutex_init(&lock, NULL);
}
