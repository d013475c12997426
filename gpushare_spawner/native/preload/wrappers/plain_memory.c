#include "wrappers/plain_memory.h"

#include <pthread.h>
#include <stdlib.h>

#include "driver/driver.h"
#include "memory/account.h"
#include "memory/allowance.h"
#include "memory/graph_memory.h"
#include "memory/ties.h"
#include "memory/tree.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- VMM: physical memory lives until its handles are released and its last mapping is gone, in either order ---- */

struct physical {
    size_t bytes;
    struct gpu *gpu;  /* NULL: not this process's; it counts nowhere */
    unsigned handles; /* that name it */
    unsigned mappings;
    bool tied; /* to other processes: ties.h */
};

/* A value that names physical memory. The driver gives it out again once it is released as often as it was got. */
struct handle {
    struct tree_node place; /* by value */
    struct physical *physical;
    unsigned references; /* created or retained, not yet released */
};

struct mapping {
    struct tree_node place; /* by address */
    size_t bytes;
    struct physical *physical;
};

static struct tree_node *handles;
static struct tree_node *mappings;

/* Everything from here on with the lock held. */

static struct physical *physical_of(CUmemHandle handle) {
    struct tree_node *node = *tree_link(&handles, handle);
    return node ? tree_record(node, struct handle, place)->physical : NULL;
}

static void drop_if_unused(struct physical *entry) {
    if (entry->handles || entry->mappings) return;
    if (entry->gpu) account_return(entry->gpu, entry->bytes, ACCOUNT_PLAIN);
    if (entry->tied) ties_remove(TIE_PHYSICAL, (uintptr_t)entry);
    free(entry);
}

/* False: no memory; the handle is not known then. */
static bool add_handle(CUmemHandle value, struct physical *physical) {
    struct tree_node *known = *tree_link(&handles, value);
    if (known) {
        tree_record(known, struct handle, place)->references++;
        return true;
    }
    struct handle *handle = malloc(sizeof *handle);
    if (!handle) return false;
    *handle = (struct handle){{.key = value}, physical, 1};
    tree_insert(&handles, &handle->place);
    physical->handles++;
    return true;
}

static void release_handle(CUmemHandle value) {
    struct tree_node **link = tree_link(&handles, value);
    struct handle *handle = *link ? tree_record(*link, struct handle, place) : NULL;
    if (!handle || --handle->references) return;
    tree_remove(link);
    handle->physical->handles--;
    drop_if_unused(handle->physical);
    free(handle);
}

static struct mapping *mapping_up_to(CUdeviceptr at) {
    struct tree_node *node = tree_last_up_to(mappings, at);
    return node ? tree_record(node, struct mapping, place) : NULL;
}

/* The mapping that an address lies in. */
static struct mapping *mapping_of(CUdeviceptr at) {
    struct mapping *mapping = mapping_up_to(at);
    return mapping && at - mapping->place.key < mapping->bytes ? mapping : NULL;
}

/* Take the mappings out that begin in a range: a list by their left links. Their physical memory counts on. */
static struct tree_node *take_mappings(CUdeviceptr at, size_t bytes) {
    struct tree_node *taken = NULL;
    struct mapping *mapping;
    while (bytes && (mapping = mapping_up_to(at + bytes - 1)) && mapping->place.key >= at) {
        tree_remove(tree_link(&mappings, mapping->place.key));
        mapping->place.left = taken;
        taken = &mapping->place;
    }
    return taken;
}

static void drop_mappings(struct tree_node *taken) {
    while (taken) {
        struct mapping *mapping = tree_record(taken, struct mapping, place);
        taken = taken->left;
        mapping->physical->mappings--;
        drop_if_unused(mapping->physical);
        free(mapping);
    }
}

static void put_back_mappings(struct tree_node *taken) {
    while (taken) {
        struct tree_node *next = taken->left;
        tree_insert(&mappings, taken);
        taken = next;
    }
}

static void tie(struct physical *entry, enum tie_kind kind) {
    if (entry->tied) return;
    entry->tied = true;
    ties_add((struct tie){kind, TIE_PHYSICAL, (uintptr_t)entry, 0, entry->bytes, NULL});
}

/* Without the lock held from here on: new physical memory, named by a handle. False: no memory. */
static bool add_physical(CUmemHandle handle, struct physical physical, enum tie_kind *kind) {
    struct physical *entry = malloc(sizeof *entry);
    if (!entry) return false;
    *entry = physical;
    pthread_mutex_lock(&lock);
    bool known = add_handle(handle, entry);
    bool named = entry->handles > 0;
    if (named && kind) tie(entry, *kind);
    pthread_mutex_unlock(&lock);
    if (!named) free(entry);
    return known;
}

/* Of another process, or of several at once. */
static void add_foreign(CUmemHandle handle, enum tie_kind kind) {
    if (!add_physical(handle, (struct physical){0}, &kind)) ties_lost();
}

CUresult wrapped_cuMemCreate(CUmemHandle *out, size_t bytes, const CUmemAllocationProp *prop,
                             unsigned long long flags) {
    bool device = out && prop && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    struct gpu *gpu = device ? gpu_of_device(prop->location.id) : NULL;
    if (!gpu) return real.cuMemCreate(out, bytes, prop, flags);
    if (!allowance_take(gpu, bytes, false, true)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real.cuMemCreate(out, bytes, prop, flags);
    if (result != CUDA_SUCCESS || !add_physical(*out, (struct physical){.bytes = bytes, .gpu = gpu}, NULL))
        account_return(gpu, bytes, ACCOUNT_PLAIN);
    return result;
}

CUresult wrapped_cuMemRetainAllocationHandle(CUmemHandle *out, void *at) {
    pthread_mutex_lock(&lock);
    CUresult result = real.cuMemRetainAllocationHandle(out, at);
    struct mapping *mapping = result == CUDA_SUCCESS ? mapping_of((CUdeviceptr)(uintptr_t)at) : NULL;
    if (mapping) add_handle(*out, mapping->physical);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult wrapped_cuMemRelease(CUmemHandle handle) {
    /* forgotten under the lock together with the real release: the driver may give the handle out again at once */
    pthread_mutex_lock(&lock);
    CUresult result = real.cuMemRelease(handle);
    if (result == CUDA_SUCCESS) release_handle(handle);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult wrapped_cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemHandle handle, unsigned long long flags) {
    struct mapping *mapping = malloc(sizeof *mapping);
    pthread_mutex_lock(&lock);
    CUresult result = real.cuMemMap(at, bytes, offset, handle, flags);
    struct physical *physical = result == CUDA_SUCCESS ? physical_of(handle) : NULL;
    if (mapping && physical) { /* unknown: of a GPU that is not this session's */
        drop_mappings(take_mappings(at, bytes));
        *mapping = (struct mapping){{.key = at}, bytes, physical};
        tree_insert(&mappings, &mapping->place);
        physical->mappings++;
        mapping = NULL;
    }
    pthread_mutex_unlock(&lock);
    free(mapping);
    return result;
}

CUresult wrapped_cuMemUnmap(CUdeviceptr at, size_t bytes) {
    /* taken out first: as soon as the driver has unmapped them, another thread can map the same addresses. The driver
       may wait for the device, and so is called without the lock. */
    pthread_mutex_lock(&lock);
    struct tree_node *taken = take_mappings(at, bytes);
    pthread_mutex_unlock(&lock);
    CUresult result = real.cuMemUnmap(at, bytes);
    pthread_mutex_lock(&lock);
    if (result == CUDA_SUCCESS)
        drop_mappings(taken);
    else
        put_back_mappings(taken);
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
    struct mapping *mapping = mapping_of(at);
    if (mapping) tie(mapping->physical, TIE_EXPORTED);
    pthread_mutex_unlock(&lock);
}

/* ---- arrays: their size is computed from the descriptor; the driver's padding is not known ---- */

struct array {
    struct tree_node place; /* by handle */
    size_t bytes;
    struct gpu *gpu;
};

static struct tree_node *arrays;

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

/* Take an array out. NULL: unknown. */
static struct array *array_take(const void *handle) {
    pthread_mutex_lock(&lock);
    struct tree_node **link = tree_link(&arrays, (uintptr_t)handle);
    struct array *entry = *link ? tree_record(*link, struct array, place) : NULL;
    if (entry) tree_remove(link);
    pthread_mutex_unlock(&lock);
    return entry;
}

static void array_gone(struct array *entry) {
    if (entry) account_return(entry->gpu, entry->bytes, ACCOUNT_PLAIN);
    free(entry);
}

static void array_put(struct array *entry) {
    pthread_mutex_lock(&lock);
    tree_insert(&arrays, &entry->place);
    pthread_mutex_unlock(&lock);
}

static void array_made(struct gpu *gpu, const void *handle, size_t bytes) {
    array_gone(array_take(handle)); /* one that went with its context */
    struct array *entry = malloc(sizeof *entry);
    if (!entry) {
        account_return(gpu, bytes, ACCOUNT_PLAIN);
        return;
    }
    *entry = (struct array){{.key = (uintptr_t)handle}, bytes, gpu};
    array_put(entry);
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
    struct array *entry = array_take(array); /* before the driver gives the handle out again */
    CUresult result = real.cuArrayDestroy(array);
    if (result == CUDA_SUCCESS)
        array_gone(entry);
    else if (entry)
        array_put(entry);
    return result;
}

CUresult wrapped_cuMipmappedArrayDestroy(CUmipmap array) {
    struct array *entry = array_take(array); /* before the driver gives the handle out again */
    CUresult result = real.cuMipmappedArrayDestroy(array);
    if (result == CUDA_SUCCESS)
        array_gone(entry);
    else if (entry)
        array_put(entry);
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
    handles = NULL;
    mappings = NULL;
    arrays = NULL;
    pthread_mutex_init(&lock, NULL);
}
