/* The parts of the CUDA driver that this library uses: the types, constants and structure layouts of its binary
   interface, and its functions. `real.cuMemAlloc_v2(...)` calls the real driver. */
#pragma once

#include <stdatomic.h>

#include "platform/common.h"

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemHandle; /* CUmemGenericAllocationHandle */
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUfunc_st *CUfunction;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUarray_st *CUarray;
typedef struct CUmipmap_st *CUmipmap;
typedef struct CUmempool_st *CUmempool;
typedef struct CUgreenCtx_st *CUgreenCtx;
typedef struct {
    unsigned char bytes[16];
} CUuuid;
typedef struct {
    unsigned char reserved[64];
} CUipcMemHandle;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEINITIALIZED = 4,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
};

#define CU_STREAM_LEGACY                              ((CUstream)0x1)
#define CU_STREAM_PER_THREAD                          ((CUstream)0x2)
#define CU_DEVICE_CPU                                 ((CUdevice) - 1)
#define CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM 2ull

enum {
    CU_MEM_ATTACH_GLOBAL = 1,
    CU_MEM_ADVISE_SET_PREFERRED_LOCATION = 3,
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_STREAM_CAPTURE_STATUS_NONE = 0,
    CU_STREAM_CAPTURE_MODE_RELAXED = 2,
    CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS = 89,
    CU_MEM_ALLOCATION_TYPE_MANAGED = 2,
    CU_MEM_LOCATION_TYPE_INVALID = 0,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_GRAPH_NODE_TYPE_MEM_ALLOC = 10,
    CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT = 2,
    CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT = 5,
    CU_MEMPOOL_ATTR_USED_MEM_CURRENT = 7,
    CU_MEMORYTYPE_DEVICE = 2,
};

enum { /* CUpointer_attribute */
       CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
       CU_POINTER_ATTRIBUTE_HOST_POINTER = 4,
       CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
       CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
       CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
       CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
};

typedef struct {
    int type;
    int id;
} CUmemLocation;

typedef struct { /* CUmemAllocationProp_v1 */
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct { /* CUmemPoolProps_v1 */
    int allocType;
    int handleTypes;
    CUmemLocation location;
    void *win32SecurityAttributes;
    size_t maxSize;
    unsigned short usage;
    unsigned char reserved[54];
} CUmemPoolProps;

typedef struct { /* CUDA_ARRAY_DESCRIPTOR_v2 */
    size_t Width;
    size_t Height;
    int Format;
    unsigned int NumChannels;
} CUarrayDescriptor;

typedef struct { /* CUDA_ARRAY3D_DESCRIPTOR_v2 */
    size_t Width;
    size_t Height;
    size_t Depth;
    int Format;
    unsigned int NumChannels;
    unsigned int Flags;
} CUarray3DDescriptor;

typedef struct { /* CUlaunchConfig: only the stream is read here */
    unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    CUstream hStream;
    void *attrs;
    unsigned int numAttrs;
} CUlaunchConfig;

typedef struct { /* CUDA_LAUNCH_PARAMS_v1: only the stream is read here */
    CUfunction function;
    unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    CUstream hStream;
    void **kernelParams;
} CUlaunchParams;

typedef struct { /* CUgraphNodeParams: only the type is read here */
    int type;
} CUgraphNodeParams;

/* The stream to which a _ptsz or _ptds twin refers: its default stream is the per-thread default stream. */
static inline CUstream driver_twin_stream(CUstream stream) {
    return stream ? stream : CU_STREAM_PER_THREAD;
}

#define SINGLE(name, symbol, version, parameters, arguments, stream) CUresult(*name) parameters;
#define STREAMED(name, symbol, version, twin, parameters, arguments, stream)                                           \
    CUresult(*name) parameters;                                                                                        \
    CUresult(*name##_ptsz) parameters;
#define IMPLICIT(name, symbol, version, twin, parameters, arguments)                                                   \
    CUresult(*name) parameters;                                                                                        \
    CUresult(*name##_ptds) parameters;
#define WRAPPED(name, symbol, version, per_thread, parameters) CUresult(*name) parameters;
#define CALLED(name, parameters)                               CUresult(*name) parameters;
struct real_driver {
#include "driver/driver_calls.h"
};

HIDDEN struct real_driver real;

/* The function in each slot for which the driver has no function; returns CUDA_ERROR_NOT_FOUND. */
CUresult driver_lacks(void);
/* Whether the driver has a function. Valid after the driver has been loaded. */
#define driver_has(name) ((void *)real.name != (void *)driver_lacks)

/* Fill `real` from the libcuda.so.1 that the program has loaded. False while none is loaded. Any thread; the first call
   takes a private lock and looks up names under it. */
bool driver_load(void);

/* Return the number of a wrapped function's slot in struct real_driver, by its address in the real driver; -1: no
   wrapped function is at that address. Takes no lock. */
int driver_number_of(const void *pointer);

/* Record, under this name and version, a function that cuGetProcAddress returned and that the driver's library does not
   export. False: no function of that name is wrapped, or the library exports another function. Takes a private lock. */
bool driver_add_answer(void *pointer, const char *symbol, int version, uint64_t flags);

/* The suspension of this process by the agent, from SUSPEND to RESUMED. During that time the process may be
   checkpointed and the driver blocks each call that launches work or manages resources, so no such call is made.
   lease/suspension.c changes these variables. */
enum { SUSPENSION_NONE, SUSPENSION_ACTIVE };
HIDDEN _Atomic uint32_t driver_suspension; /* for the program's threads, which wait before driver calls; a futex */
HIDDEN _Atomic bool driver_suspension_of_background; /* the background thread makes no driver calls and takes no lock
                                                        that is held during such calls */

static inline bool driver_threads_suspended(void) {
    return unlikely(atomic_load_explicit(&driver_suspension, memory_order_relaxed) == SUSPENSION_ACTIVE);
}

static inline bool driver_background_suspended(void) {
    return unlikely(atomic_load_explicit(&driver_suspension_of_background, memory_order_relaxed));
}
