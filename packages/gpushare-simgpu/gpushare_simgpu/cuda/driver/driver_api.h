/* The part of the CUDA driver API's binary interface that the simulator implements: types, constants and layouts, taken
 * from the published API reference. No CUDA header is needed. */
#ifndef SIMGPU_DRIVER_API_H
#define SIMGPU_DRIVER_API_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

#define DRIVER_VERSION 13000

typedef enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_UNSUPPORTED_LIMIT = 215,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_INVALID_PTX = 218,
    CUDA_ERROR_FILE_NOT_FOUND = 301,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_SYSTEM_NOT_READY = 802,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    CUDA_ERROR_CAPTURED_EVENT = 907,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
    CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE = 910,
    CUDA_ERROR_UNKNOWN = 999,
} CUresult;

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct module *CUmodule;
typedef struct link *CUlinkState;
typedef struct function *CUfunction;
typedef struct module *CUlibrary;  /* a library is a module that needs no context */
typedef struct function *CUkernel; /* so its kernels are functions */
typedef struct pool *CUmemoryPool;
typedef struct graph *CUgraph;
typedef struct node *CUgraphNode;
typedef struct graph_exec *CUgraphExec;
typedef void *CUarray;
typedef unsigned long long CUmemGenericAllocationHandle;

typedef struct {
    char bytes[16];
} CUuuid;

#define CU_STREAM_LEGACY                              ((CUstream)0x1)
#define CU_STREAM_PER_THREAD                          ((CUstream)0x2)
#define CU_STREAM_NON_BLOCKING                        1u
#define CU_EVENT_DISABLE_TIMING                       2u
#define CU_EVENT_EXTERNAL                             1u /* record and wait flag: a separate node in a graph */
#define CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM 2u
#define CU_MEM_ATTACH_GLOBAL                          1u
#define CU_MEM_ATTACH_HOST                            2u
#define CU_MEM_ATTACH_SINGLE                          4u
#define CU_DEVICE_CPU                                 (-1)
#define CU_DEVICE_INVALID                             (-2)
#define CU_LAUNCH_PARAM_END                           ((void *)0)
#define CU_LAUNCH_PARAM_BUFFER_POINTER                ((void *)1)
#define CU_LAUNCH_PARAM_BUFFER_SIZE                   ((void *)2)

typedef enum { PROC_FOUND = 0, PROC_NOT_FOUND = 1, PROC_VERSION_NOT_SUFFICIENT = 2 } CUdriverProcAddressQueryResult;
typedef enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_INVALIDATED = 2 } CUstreamCaptureStatus;
typedef enum { CAPTURE_MODE_GLOBAL = 0, CAPTURE_MODE_THREAD_LOCAL = 1, CAPTURE_MODE_RELAXED = 2 } CUstreamCaptureMode;
typedef enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2, MEMORY_ARRAY = 3, MEMORY_UNIFIED = 4 } CUmemorytype;
typedef enum {
    LOCATION_INVALID = 0,
    LOCATION_DEVICE = 1,
    LOCATION_HOST = 2,
    LOCATION_HOST_NUMA = 3,
    LOCATION_HOST_NUMA_CURRENT = 4
} CUmemLocationType;

typedef struct {
    CUmemLocationType type;
    int id;
} CUmemLocation;

typedef enum {
    ADVISE_SET_READ_MOSTLY = 1,
    ADVISE_UNSET_READ_MOSTLY = 2,
    ADVISE_SET_PREFERRED_LOCATION = 3,
    ADVISE_UNSET_PREFERRED_LOCATION = 4,
    ADVISE_SET_ACCESSED_BY = 5,
    ADVISE_UNSET_ACCESSED_BY = 6
} CUmem_advise;

typedef enum {
    RANGE_READ_MOSTLY = 1,
    RANGE_PREFERRED_LOCATION = 2,
    RANGE_ACCESSED_BY = 3,
    RANGE_LAST_PREFETCH_LOCATION = 4,
    RANGE_PREFERRED_LOCATION_TYPE = 5,
    RANGE_PREFERRED_LOCATION_ID = 6,
    RANGE_LAST_PREFETCH_LOCATION_TYPE = 7,
    RANGE_LAST_PREFETCH_LOCATION_ID = 8
} CUmem_range_attribute;

typedef enum {
    POINTER_CONTEXT = 1,
    POINTER_MEMORY_TYPE = 2,
    POINTER_DEVICE_POINTER = 3,
    POINTER_HOST_POINTER = 4,
    POINTER_P2P_TOKENS = 5,
    POINTER_SYNC_MEMOPS = 6,
    POINTER_BUFFER_ID = 7,
    POINTER_IS_MANAGED = 8,
    POINTER_DEVICE_ORDINAL = 9,
    POINTER_IS_LEGACY_IPC_CAPABLE = 10,
    POINTER_RANGE_START = 11,
    POINTER_RANGE_SIZE = 12,
    POINTER_MAPPED = 13,
    POINTER_ALLOWED_HANDLE_TYPES = 14,
    POINTER_IS_RDMA_CAPABLE = 15,
    POINTER_ACCESS_FLAGS = 16,
    POINTER_MEMPOOL_HANDLE = 17,
    POINTER_MAPPING_SIZE = 18,
    POINTER_MAPPING_BASE = 19,
    POINTER_BLOCK_ID = 20
} CUpointer_attribute;

typedef enum {
    POOL_REUSE_FOLLOW_EVENT_DEPENDENCIES = 1,
    POOL_REUSE_ALLOW_OPPORTUNISTIC = 2,
    POOL_REUSE_ALLOW_INTERNAL_DEPENDENCIES = 3,
    POOL_RELEASE_THRESHOLD = 4,
    POOL_RESERVED_CURRENT = 5,
    POOL_RESERVED_HIGH = 6,
    POOL_USED_CURRENT = 7,
    POOL_USED_HIGH = 8
} CUmemPool_attribute;

typedef struct {
    CUmemLocation location;
    unsigned flags; /* 0 none, 1 read, 3 read and write */
} CUmemAccessDesc;

enum { ALLOCATION_TYPE_MANAGED = 2 };

typedef struct {
    unsigned type, handle_types;
    CUmemLocation location;
    void *windows;
    size_t max_size;
    unsigned short usage;
    unsigned char reserved[54];
} CUmemPoolProps;

typedef struct {
    unsigned type, handle_types;
    CUmemLocation location;
    void *windows;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} CUmemAllocationProp;

typedef struct {
    unsigned src_access_order;
    CUmemLocation src_hint, dst_hint;
    unsigned flags;
} CUmemcpyAttributes;

typedef struct {
    size_t src_x, src_y;
    CUmemorytype src_type;
    const void *src_host;
    CUdeviceptr src_device;
    CUarray src_array;
    size_t src_pitch;
    size_t dst_x, dst_y;
    CUmemorytype dst_type;
    void *dst_host;
    CUdeviceptr dst_device;
    CUarray dst_array;
    size_t dst_pitch;
    size_t width, height;
} CUDA_MEMCPY2D;

typedef struct {
    size_t src_x, src_y, src_z, src_lod;
    CUmemorytype src_type;
    const void *src_host;
    CUdeviceptr src_device;
    CUarray src_array;
    void *src_context; /* reserved, or the context in the peer form */
    size_t src_pitch, src_height;
    size_t dst_x, dst_y, dst_z, dst_lod;
    CUmemorytype dst_type;
    void *dst_host;
    CUdeviceptr dst_device;
    CUarray dst_array;
    void *dst_context;
    size_t dst_pitch, dst_height;
    size_t width, height, depth;
} CUDA_MEMCPY3D;

typedef struct {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    CUstream stream;
    void *attributes;
    unsigned attribute_count;
} CUlaunchConfig;

typedef struct {
    CUfunction func;
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    void **params, **extra;
    CUkernel kernel; /* from here on only in the second version */
    CUcontext context;
} CUDA_KERNEL_NODE_PARAMS;

typedef struct {
    CUdeviceptr dst;
    size_t pitch;
    unsigned value, element;
    size_t width, height;
} CUDA_MEMSET_NODE_PARAMS;

typedef void (*CUhostFn)(void *data);
typedef void (*CUstreamCallback)(CUstream stream, CUresult status, void *data);

typedef struct {
    CUhostFn fn;
    void *data;
} CUDA_HOST_NODE_PARAMS;

typedef struct {
    uint64_t flags;
    CUstream upload_stream;
    CUgraphNode error_node;
    int result;
} CUDA_GRAPH_INSTANTIATE_PARAMS;

typedef struct {
    int result;
    CUgraphNode error_node, error_from_node;
} CUgraphExecUpdateResultInfo;

typedef struct {
    unsigned char from_port, to_port, type, reserved[5];
} CUgraphEdgeData;

typedef struct {
    int max_threads_per_block, max_threads_dim[3], max_grid[3], shared_per_block, constant_memory, warp, mem_pitch,
        registers, clock_khz, texture_align;
} CUdevprop;

typedef struct {
    char bytes[64];
} CUipcMemHandle;

/* The arguments of the calls cuCheckpointProcess*: 64 bytes each. Reserved fields must be 0. */
typedef struct {
    unsigned timeout_ms; /* 0: no limit */
    unsigned reserved0;
    uint64_t reserved1[7];
} CUcheckpointLockArgs;

typedef struct {
    uint64_t reserved[8];
} CUcheckpointCheckpointArgs;

typedef struct {
    CUuuid before, after;
} CUcheckpointGpuPair;

typedef struct {
    CUcheckpointGpuPair *pairs; /* the target GPU for each GPU's memory; since CUDA 13.0, previously reserved */
    unsigned pair_count;
    char reserved0[44];
    uint64_t reserved1;
} CUcheckpointRestoreArgs;

typedef struct {
    uint64_t reserved[8];
} CUcheckpointUnlockArgs;

_Static_assert(sizeof(CUcheckpointLockArgs) == 64 && sizeof(CUcheckpointRestoreArgs) == 64, "as in CUDA's headers");

#endif
