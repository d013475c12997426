/* Wrappers of the calls that create arrays and memory nodes of graphs: device memory that is only counted. */
#include <pthread.h>
#include <stdlib.h>

#include "memory/account.h"
#include "memory/allowance.h"
#include "memory/tree.h"

/* ---- arrays: the size is computed from the descriptor; the driver's padding is unknown ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct array {
    struct tree_node place; /* by handle */
    size_t bytes;
    struct gpu *gpu;
};

static struct tree_node *arrays;

/* Return the size in bytes of an element of a CUarray_format (cuda.h): 8, 16 and 32-bit integers, half, float, and 8
   and 16-bit normalized integers. Other formats (block-compressed, planar) count as one byte per channel. */
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

/* Remove the record of an array. NULL: there is none. */
static struct array *take_array(const void *handle) {
    pthread_mutex_lock(&lock);
    struct tree_node **link = tree_link(&arrays, (uintptr_t)handle, 0);
    struct array *entry = *link ? tree_record(*link, struct array, place) : NULL;
    if (entry) tree_remove(link);
    pthread_mutex_unlock(&lock);
    return entry;
}

static void drop_array(struct array *entry) {
    if (entry) account_return(entry->gpu, entry->bytes, ACCOUNT_PLAIN);
    free(entry);
}

static void add_array(struct array *entry) {
    pthread_mutex_lock(&lock);
    tree_insert(&arrays, &entry->place);
    pthread_mutex_unlock(&lock);
}

static void record_array(struct gpu *gpu, const void *handle, size_t bytes) {
    drop_array(take_array(handle)); /* an array that was destroyed with its context */
    struct array *entry = malloc(sizeof *entry);
    if (!entry) {
        account_return(gpu, bytes, ACCOUNT_PLAIN);
        return;
    }
    *entry = (struct array){{.key = (uintptr_t)handle}, bytes, gpu};
    add_array(entry);
}

#define MAKING(call, size)                                                                                             \
    struct gpu *gpu = out && descriptor ? gpu_current() : NULL;                                                        \
    if (!gpu) return call;                                                                                             \
    size_t bytes = size;                                                                                               \
    if (!allowance_take(gpu, bytes, false, true)) return CUDA_ERROR_OUT_OF_MEMORY;                                     \
    CUresult result = call;                                                                                            \
    if (result == CUDA_SUCCESS)                                                                                        \
        record_array(gpu, *out, bytes);                                                                                \
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
    struct array *entry = take_array(array); /* before the driver can return the handle again */
    CUresult result = real.cuArrayDestroy(array);
    if (result == CUDA_SUCCESS)
        drop_array(entry);
    else if (entry)
        add_array(entry);
    return result;
}

CUresult wrapped_cuMipmappedArrayDestroy(CUmipmap array) {
    struct array *entry = take_array(array); /* before the driver can return the handle again */
    CUresult result = real.cuMipmappedArrayDestroy(array);
    if (result == CUDA_SUCCESS)
        drop_array(entry);
    else if (entry)
        add_array(entry);
    return result;
}

/* ---- memory nodes of graphs: the driver provides a figure for them ---- */

CUresult wrapped_cuGraphAddMemAllocNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                                        void *params) {
    account_graph();
    return real.cuGraphAddMemAllocNode(out, graph, after, count, params);
}

CUresult wrapped_cuGraphAddNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                                CUgraphNodeParams *params) {
    if (params && params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) account_graph();
    return real.cuGraphAddNode(out, graph, after, count, params);
}

CUresult wrapped_cuGraphAddNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, const void *edges,
                                   size_t count, CUgraphNodeParams *params) {
    if (params && params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) account_graph();
    return real.cuGraphAddNode_v2(out, graph, after, edges, count, params);
}

CUresult wrapped_cuGraphAddNode_v3(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, const void *edges,
                                   size_t count, CUgraphNodeParams *params) {
    if (params && params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) account_graph();
    return real.cuGraphAddNode_v3(out, graph, after, edges, count, params);
}

RESET_IN_CHILD(array_calls_reset);
void array_calls_reset(void) {
    arrays = NULL;
    pthread_mutex_init(&lock, NULL);
}
