/* Graphs: operations with an order. A launch executes the nodes one after another in the order in which they were
 * added, which respects all dependencies, because an edge always leads to a later node. */
#ifndef SIMGPU_GRAPH_H
#define SIMGPU_GRAPH_H

#include "cuda/streams/stream.h"

#define GRAPH_MAGIC 0x47524150u
#define NODE_MAGIC  0x4e4f4445u
#define EXEC_MAGIC  0x45584543u

struct node {
    uint32_t magic;
    struct graph *graph;
    struct operation operation;
    struct graph *child;  /* for OPERATION_NOTHING with a nested graph */
    int type;             /* as CUgraphNodeType */
    struct node **before; /* nodes on which it depends */
    size_t before_count;
    size_t index; /* in the graph */
};

struct graph {
    uint32_t magic;
    struct node **nodes;
    size_t count, room;
};

struct graph_exec {
    uint32_t magic;
    uint32_t references;
    uint64_t flags;
    size_t count;
    struct operation *operations;
    struct node **origins; /* the original of each node, to find it in updates */
};

enum {
    NODE_KERNEL = 0,
    NODE_MEMCPY = 1,
    NODE_MEMSET = 2,
    NODE_HOST = 3,
    NODE_GRAPH = 4,
    NODE_EMPTY = 5,
    NODE_WAIT = 6,
    NODE_RECORD = 7
};

struct graph *graph_make(void);
void graph_drop(struct graph *graph);
CUresult graph_add(struct graph *graph, const struct operation *operation, struct node *const *before, size_t count,
                   struct node **out);
CUresult graph_check(struct graph *graph);

/* Make the operation of a kernel node; with `second` the parameters have the second version's layout. */
CUresult graph_kernel(const CUDA_KERNEL_NODE_PARAMS *params, int second, struct operation *operation);

uint64_t graph_run(struct stream *stream, struct graph_exec *exec, uint64_t ready);

#endif
