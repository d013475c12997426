/* One operation of a stream. Plain data, which is copied into the ring and into graphs. */
#ifndef SIMGPU_OPERATION_H
#define SIMGPU_OPERATION_H

#include "cuda/driver/driver_api.h"

#define KERNEL_ARGUMENTS 48 /* bytes: the largest parameter block of a built-in kernel is 32 */

enum operation_kind {
    OPERATION_NOTHING,
    OPERATION_KERNEL,
    OPERATION_COPY,
    OPERATION_SET,
    OPERATION_PREFETCH,
    OPERATION_RECORD, /* an event */
    OPERATION_WAIT_EVENT,
    OPERATION_WAIT_STREAM,
    OPERATION_HOST,
    OPERATION_CALLBACK,
    OPERATION_FREE,
    OPERATION_GRAPH,
    OPERATION_WRITE_VALUE,
    OPERATION_WAIT_VALUE,
    OPERATION_QUIT
};

struct rectangle {
    uint64_t dst, src;
    uint64_t width, height, depth; /* bytes, rows, slices */
    uint64_t dst_pitch, src_pitch; /* bytes from row to row */
    uint64_t dst_slice, src_slice; /* bytes from slice to slice */
    int staged;                    /* src is the driver's own copy of pageable memory: freed after use */
};

struct kernel_launch {
    CUfunction function;
    unsigned grid[3], block[3], shared;
    uint64_t queued_ns; /* counted in struct gpu as its device time while it is queued; 0 in a graph */
    unsigned char arguments[KERNEL_ARGUMENTS];
};

struct operation {
    enum operation_kind kind;
    union {
        struct kernel_launch kernel;
        struct rectangle copy;
        struct {
            uint64_t dst, pitch, width, height; /* width in elements */
            uint32_t value, element;
        } set;
        struct {
            uint64_t address, size;
            int device; /* CU_DEVICE_CPU: the host */
        } prefetch;
        struct {
            CUevent event;
            uint64_t number; /* number of the record */
        } event;
        struct {
            CUstream stream;
            uint64_t position;
        } stream;
        struct {
            CUhostFn fn;
            void *data;
        } host;
        struct {
            CUstreamCallback fn;
            void *data;
            CUstream stream;
        } callback;
        struct {
            uint64_t address;
        } free;
        struct {
            CUgraphExec exec;
        } graph;
        struct {
            uint64_t address, value;
            int wide;       /* 64 bits */
            unsigned flags; /* wait: 0 at least, 1 equal, 2 any common bit, 3 not all of them */
        } value;
    };
};

#endif
