/* Executable graphs: instantiation, updates, launches. */
#include <stdlib.h>
#include <string.h>

#include "cuda/streams/call_lock.h"
#include "cuda/streams/event.h"
#include "cuda/streams/execute.h"
#include "cuda/streams/capture.h"
#include "cuda/streams/graph.h"
#include "cuda/driver/ptsz.h"

static size_t count_operations(const struct graph *graph) {
    size_t count = 0;
    for (size_t i = 0; i < graph->count; i++)
        count += graph->nodes[i]->child ? count_operations(graph->nodes[i]->child) : 1;
    return count;
}

static void flatten(const struct graph *graph, struct graph_exec *exec) {
    for (size_t i = 0; i < graph->count; i++) {
        struct node *node = graph->nodes[i];
        if (node->child) {
            flatten(node->child, exec);
            continue;
        }
        if (node->operation.kind == OPERATION_RECORD || node->operation.kind == OPERATION_WAIT_EVENT)
            event_retain(node->operation.event.event);
        exec->origins[exec->count] = node;
        exec->operations[exec->count++] = node->operation;
    }
}

static void exec_release(struct graph_exec *exec) {
    if (__atomic_sub_fetch(&exec->references, 1, __ATOMIC_ACQ_REL)) return;
    for (size_t i = 0; i < exec->count; i++)
        if (exec->operations[i].kind == OPERATION_RECORD || exec->operations[i].kind == OPERATION_WAIT_EVENT)
            event_release(exec->operations[i].event.event);
    free(exec->operations);
    free(exec->origins);
    free(exec);
}

uint64_t graph_run(struct stream *stream, struct graph_exec *exec, uint64_t ready) {
    for (size_t i = 0; i < exec->count; i++) {
        struct operation operation = exec->operations[i];
        if (operation.kind == OPERATION_RECORD) {
            event_retain(operation.event.event);
            operation.event.number = __atomic_add_fetch(&operation.event.event->recorded, 1, __ATOMIC_ACQ_REL);
        } else if (operation.kind == OPERATION_WAIT_EVENT) {
            event_retain(operation.event.event);
            operation.event.number = __atomic_load_n(&operation.event.event->recorded, __ATOMIC_ACQUIRE);
        }
        stream->graph_next = exec->operations + i + 1;
        stream->graph_end = exec->operations + exec->count;
        ready = execute(stream, &operation, ready);
    }
    stream->graph_next = stream->graph_end = NULL;
    exec_release(exec);
    return ready;
}

static CUresult instantiate(CUgraphExec *out, CUgraph graph, uint64_t flags) {
    LOCKABLE();
    CUresult error = graph_check(graph);
    if (error) return error;
    REQUIRE(out, CUDA_ERROR_INVALID_VALUE);
    struct graph_exec *exec = calloc(1, sizeof *exec);
    REQUIRE(exec, CUDA_ERROR_OUT_OF_MEMORY);
    size_t count = count_operations(graph);
    exec->magic = EXEC_MAGIC;
    exec->references = 1;
    exec->flags = flags;
    exec->operations = calloc(count ? count : 1, sizeof *exec->operations);
    exec->origins = calloc(count ? count : 1, sizeof *exec->origins);
    if (!exec->operations || !exec->origins) {
        exec_release(exec);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    flatten(graph, exec);
    *out = exec;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    return instantiate(exec, graph, flags);
}

EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *bad, char *log, size_t size) {
    return instantiate(exec, graph, 0);
}

EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    REQUIRE(params, CUDA_ERROR_INVALID_VALUE);
    CUresult error = instantiate(exec, graph, params->flags);
    params->error_node = NULL;
    params->result = error ? 1 : 0;
    return error;
}

EXPORT CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph,
                                                  CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    return cuGraphInstantiateWithParams(exec, graph, params);
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(exec && exec->magic == EXEC_MAGIC, CUDA_ERROR_INVALID_VALUE);
    exec->magic = 0; /* launches in flight keep it */
    exec_release(exec);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecGetFlags(CUgraphExec exec, uint64_t *flags) {
    REQUIRE_INIT();
    REQUIRE(exec && exec->magic == EXEC_MAGIC && flags, CUDA_ERROR_INVALID_VALUE);
    *flags = exec->flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                                  const CUDA_KERNEL_NODE_PARAMS *params) {
    LOCKABLE();
    struct operation operation;
    REQUIRE_INIT();
    REQUIRE(exec && exec->magic == EXEC_MAGIC, CUDA_ERROR_INVALID_VALUE);
    CUresult error = graph_kernel(params, 1, &operation);
    if (error) return error;
    for (size_t i = 0; i < exec->count; i++) {
        if (exec->origins[i] == node && exec->operations[i].kind == OPERATION_KERNEL) {
            exec->operations[i] = operation;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_VALUE;
}

/* An update takes over the operations of a graph of the same shape: the same number and kinds of nodes in the same
 * order. */
static CUresult update(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info) {
    enum { UPDATE_DONE = 0, UPDATE_TOPOLOGY_CHANGED = 2, UPDATE_TYPE_CHANGED = 3 };
    struct graph_exec *fresh;
    REQUIRE_INIT();
    REQUIRE(exec && exec->magic == EXEC_MAGIC, CUDA_ERROR_INVALID_VALUE);
    CUresult error = instantiate(&fresh, graph, exec->flags);
    if (error) return error;
    *info = (CUgraphExecUpdateResultInfo){UPDATE_DONE, NULL, NULL};
    if (fresh->count != exec->count) info->result = UPDATE_TOPOLOGY_CHANGED;
    for (size_t i = 0; i < fresh->count && !info->result; i++) {
        if (fresh->operations[i].kind != exec->operations[i].kind) {
            info->result = UPDATE_TYPE_CHANGED;
            info->error_node = fresh->origins[i];
        }
    }
    if (!info->result) {
        struct operation *operations = exec->operations;
        struct node **origins = exec->origins;
        exec->operations = fresh->operations;
        exec->origins = fresh->origins;
        fresh->operations = operations;
        fresh->origins = origins;
    }
    exec_release(fresh);
    return info->result ? CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE : CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info) {
    LOCKABLE();
    REQUIRE(info, CUDA_ERROR_INVALID_VALUE);
    /* otherwise running launches would see the operations change */
    synchronize_everything();
    return update(exec, graph, info);
}

static CUresult launch(CUgraphExec exec, CUstream handle) {
    LOCKABLE();
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(exec && exec->magic == EXEC_MAGIC, CUDA_ERROR_INVALID_VALUE);
    if (stream_is_captured(stream)) {
        /* the captured graph takes over the nodes */
        for (size_t i = 0; i < exec->count && !error; i++) {
            if (exec->operations[i].kind == OPERATION_RECORD || exec->operations[i].kind == OPERATION_WAIT_EVENT)
                event_retain(exec->operations[i].event.event);
            error = stream_put(stream, &exec->operations[i], NULL);
        }
        return error;
    }
    __atomic_add_fetch(&exec->references, 1, __ATOMIC_RELAXED);
    error = stream_put(stream, &(struct operation){.kind = OPERATION_GRAPH, .graph = {exec}}, NULL);
    if (error) exec_release(exec);
    return error;
}

static CUresult upload(CUgraphExec exec, CUstream handle) {
    LOCKABLE();
    struct stream *stream;
    CUresult error = stream_resolve(handle, &stream);
    if (error) return error;
    REQUIRE(exec && exec->magic == EXEC_MAGIC, CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

LAST_IS_STREAM(cuGraphLaunch, launch, (CUgraphExec exec, CUstream stream), exec)
LAST_IS_STREAM(cuGraphUpload, upload, (CUgraphExec exec, CUstream stream), exec)
