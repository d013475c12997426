/* Graphs as programs build them: nodes and their dependencies. */
#include "cuda/streams/graph.h"

#include <stdlib.h>
#include <string.h>

#include "cuda/memory/copy_rectangle.h"
#include "cuda/streams/event.h"
#include "cuda/kernels/launch.h"

struct graph *graph_make(void) {
    struct graph *graph = calloc(1, sizeof *graph);
    if (graph) graph->magic = GRAPH_MAGIC;
    return graph;
}

static void drop_node(struct node *node) {
    if (node->operation.kind == OPERATION_RECORD || node->operation.kind == OPERATION_WAIT_EVENT)
        event_release(node->operation.event.event);
    if (node->child) graph_drop(node->child);
    node->magic = 0;
    free(node->before);
    free(node);
}

void graph_drop(struct graph *graph) {
    for (size_t i = 0; i < graph->count; i++) drop_node(graph->nodes[i]);
    graph->magic = 0;
    free(graph->nodes);
    free(graph);
}

static int type_of(const struct operation *operation) {
    switch (operation->kind) {
    case OPERATION_KERNEL: return NODE_KERNEL;
    case OPERATION_COPY: return NODE_MEMCPY;
    case OPERATION_SET: return NODE_MEMSET;
    case OPERATION_HOST: return NODE_HOST;
    case OPERATION_RECORD: return NODE_RECORD;
    case OPERATION_WAIT_EVENT: return NODE_WAIT;
    case OPERATION_NOTHING: return NODE_EMPTY;
    default: return -1;
    }
}

CUresult graph_add(struct graph *graph, const struct operation *operation, struct node *const *before, size_t count,
                   struct node **out) {
    int type = type_of(operation);
    REQUIRE(type >= 0, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (graph->count == graph->room) {
        size_t room = graph->room ? 2 * graph->room : 16;
        struct node **nodes = realloc(graph->nodes, room * sizeof *nodes);
        REQUIRE(nodes, CUDA_ERROR_OUT_OF_MEMORY);
        graph->nodes = nodes;
        graph->room = room;
    }
    struct node *node = calloc(1, sizeof *node);
    struct node **copy = malloc((count ? count : 1) * sizeof *copy);
    if (!node || !copy) {
        free(node);
        free(copy);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memcpy(copy, before, count * sizeof *copy);
    *node = (struct node){NODE_MAGIC, graph, *operation, NULL, type, copy, count, graph->count};
    graph->nodes[graph->count++] = node;
    *out = node;
    return CUDA_SUCCESS;
}

CUresult graph_check(CUgraph graph) {
    REQUIRE_INIT();
    REQUIRE(graph && graph->magic == GRAPH_MAGIC, CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphCreate(CUgraph *graph, unsigned flags) {
    REQUIRE_INIT();
    REQUIRE(graph && flags == 0, CUDA_ERROR_INVALID_VALUE);
    *graph = graph_make();
    return *graph ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuGraphDestroy(CUgraph graph) {
    CUresult error = graph_check(graph);
    if (!error) graph_drop(graph);
    return error;
}

EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    CUresult error = graph_check(graph);
    if (error) return error;
    REQUIRE(count, CUDA_ERROR_INVALID_VALUE);
    if (nodes) {
        size_t room = *count;
        for (size_t i = 0; i < room; i++) nodes[i] = i < graph->count ? graph->nodes[i] : NULL;
        if (room > graph->count) *count = graph->count;
    } else {
        *count = graph->count;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    CUresult error = graph_check(graph);
    if (error) return error;
    REQUIRE(count, CUDA_ERROR_INVALID_VALUE);
    size_t found = 0, room = nodes ? *count : 0;
    for (size_t i = 0; i < graph->count; i++) {
        if (graph->nodes[i]->before_count) continue;
        if (found < room) nodes[found] = graph->nodes[i];
        found++;
    }
    *count = nodes && found > room ? room : found;
    return CUDA_SUCCESS;
}

static CUresult edges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *count) {
    CUresult error = graph_check(graph);
    if (error) return error;
    REQUIRE(count && !from == !to, CUDA_ERROR_INVALID_VALUE);
    size_t found = 0, room = from ? *count : 0;
    for (size_t i = 0; i < graph->count; i++) {
        for (size_t b = 0; b < graph->nodes[i]->before_count; b++, found++) {
            if (found >= room) continue;
            from[found] = graph->nodes[i]->before[b];
            to[found] = graph->nodes[i];
            if (data) memset(&data[found], 0, sizeof *data);
        }
    }
    *count = from && found > room ? room : found;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count) {
    return edges(graph, from, to, NULL, count);
}

EXPORT CUresult cuGraphGetEdges_v2(CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data,
                                   size_t *count) {
    return edges(graph, from, to, data, count);
}

EXPORT CUresult cuGraphNodeGetType(CUgraphNode node, int *type) {
    REQUIRE_INIT();
    REQUIRE(node && node->magic == NODE_MAGIC && type, CUDA_ERROR_INVALID_VALUE);
    *type = node->type;
    return CUDA_SUCCESS;
}

static CUresult add(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count,
                    const struct operation *operation) {
    CUresult error = graph_check(graph);
    if (error) return error;
    REQUIRE(out && (before || count == 0), CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++)
        REQUIRE(before[i] && before[i]->magic == NODE_MAGIC && before[i]->graph == graph, CUDA_ERROR_INVALID_VALUE);
    return graph_add(graph, operation, before, count, out);
}

CUresult graph_kernel(const CUDA_KERNEL_NODE_PARAMS *p, int second, struct operation *operation) {
    REQUIRE(p, CUDA_ERROR_INVALID_VALUE);
    memset(operation, 0, sizeof *operation);
    operation->kind = OPERATION_KERNEL;
    return launch_prepare(&operation->kernel, p->func || !second ? p->func : p->kernel,
                          (const unsigned[]){p->grid_x, p->grid_y, p->grid_z},
                          (const unsigned[]){p->block_x, p->block_y, p->block_z}, p->shared_bytes, p->params, p->extra);
}

EXPORT CUresult cuGraphAddKernelNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count,
                                     const CUDA_KERNEL_NODE_PARAMS *params) {
    struct operation operation;
    CUresult error = graph_kernel(params, 0, &operation);
    return error ? error : add(out, graph, before, count, &operation);
}

EXPORT CUresult cuGraphAddKernelNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count,
                                        const CUDA_KERNEL_NODE_PARAMS *params) {
    struct operation operation;
    CUresult error = graph_kernel(params, 1, &operation);
    return error ? error : add(out, graph, before, count, &operation);
}

EXPORT CUresult cuGraphAddMemsetNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count,
                                     const CUDA_MEMSET_NODE_PARAMS *p, CUcontext context) {
    REQUIRE(p && (p->element == 1 || p->element == 2 || p->element == 4), CUDA_ERROR_INVALID_VALUE);
    struct operation operation = {.kind = OPERATION_SET,
                                  .set = {p->dst, p->pitch, p->width, p->height, p->value, p->element}};
    return add(out, graph, before, count, &operation);
}

EXPORT CUresult cuGraphAddHostNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count,
                                   const CUDA_HOST_NODE_PARAMS *params) {
    REQUIRE(params && params->fn, CUDA_ERROR_INVALID_VALUE);
    struct operation operation = {.kind = OPERATION_HOST, .host = {params->fn, params->data}};
    return add(out, graph, before, count, &operation);
}

EXPORT CUresult cuGraphAddEmptyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count) {
    struct operation operation = {.kind = OPERATION_NOTHING};
    return add(out, graph, before, count, &operation);
}

EXPORT CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params) {
    struct operation operation;
    REQUIRE_INIT();
    REQUIRE(node && node->magic == NODE_MAGIC && node->type == NODE_KERNEL, CUDA_ERROR_INVALID_VALUE);
    CUresult error = graph_kernel(params, 1, &operation);
    if (!error) node->operation = operation;
    return error;
}

EXPORT CUresult cuGraphAddEventRecordNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count,
                                          CUevent event) {
    REQUIRE(event && event->magic == EVENT_MAGIC, CUDA_ERROR_INVALID_VALUE);
    struct operation operation = {.kind = OPERATION_RECORD, .event = {event, 0}};
    event_retain(event);
    CUresult error = add(out, graph, before, count, &operation);
    if (error) event_release(event);
    return error;
}

EXPORT CUresult cuGraphAddEventWaitNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count,
                                        CUevent event) {
    REQUIRE(event && event->magic == EVENT_MAGIC, CUDA_ERROR_INVALID_VALUE);
    struct operation operation = {.kind = OPERATION_WAIT_EVENT, .event = {event, 0}};
    event_retain(event);
    CUresult error = add(out, graph, before, count, &operation);
    if (error) event_release(event);
    return error;
}

EXPORT CUresult cuGraphAddMemcpyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count,
                                     const CUDA_MEMCPY3D *copy, CUcontext context) {
    struct operation operation;
    CUresult error = copy_rectangle(copy, &operation);
    return error ? error : add(out, graph, before, count, &operation);
}

static CUresult neighbours(CUgraphNode *nodes, size_t *count, struct node *const *found, size_t found_count) {
    REQUIRE(count, CUDA_ERROR_INVALID_VALUE);
    size_t room = nodes ? *count : 0;
    for (size_t i = 0; i < room; i++) nodes[i] = i < found_count ? found[i] : NULL;
    *count = nodes && room < found_count ? room : found_count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *nodes, size_t *count) {
    REQUIRE_INIT();
    REQUIRE(node && node->magic == NODE_MAGIC, CUDA_ERROR_INVALID_VALUE);
    return neighbours(nodes, count, node->before, node->before_count);
}

EXPORT CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *nodes, CUgraphEdgeData *edges,
                                              size_t *count) {
    CUresult error = cuGraphNodeGetDependencies(node, nodes, count);
    if (!error && edges && nodes) memset(edges, 0, *count * sizeof *edges);
    return error;
}
