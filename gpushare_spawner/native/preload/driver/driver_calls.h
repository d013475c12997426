/* The other driver calls: those that are wrapped by hand, and those that are only called.

   WRAPPED(name, asked-for name, CUDA version of this ABI, 1 for the _ptsz form, parameters)
   WATCHED(the same, arguments)
       the driver blocks it in a suspended process: with engine `suspend` it also waits while the process is suspended
       (suspendable_calls.c).
   CALLED(name, parameters)

   A file that does not define WATCHED takes such a call for WRAPPED. */

#ifndef WATCHED
#define WATCHED(name, asked, version, per_thread, parameters, arguments)                                               \
    WRAPPED(name, asked, version, per_thread, parameters)
#endif

WRAPPED(cuInit, "cuInit", 2000, 0, (unsigned flags))
WRAPPED(cuGetProcAddress, "cuGetProcAddress", 11030, 0,
        (const char *symbol, void **function, int version, uint64_t flags))
WRAPPED(cuGetProcAddress_v2, "cuGetProcAddress", 12000, 0,
        (const char *symbol, void **function, int version, uint64_t flags, int *status))

/* context_calls.c */
WATCHED(cuCtxCreate_v2, "cuCtxCreate", 3020, 0, (CUcontext * out, unsigned flags, CUdevice device),
        (out, flags, device))
WATCHED(cuCtxCreate_v3, "cuCtxCreate", 11040, 0,
        (CUcontext * out, void *affinity, int count, unsigned flags, CUdevice device),
        (out, affinity, count, flags, device))
WATCHED(cuCtxCreate_v4, "cuCtxCreate", 12050, 0, (CUcontext * out, void *params, unsigned flags, CUdevice device),
        (out, params, flags, device))
WATCHED(cuCtxDestroy, "cuCtxDestroy", 2000, 0, (CUcontext context), (context))
WATCHED(cuCtxDestroy_v2, "cuCtxDestroy", 4000, 0, (CUcontext context), (context))
WATCHED(cuCtxDetach, "cuCtxDetach", 2000, 0, (CUcontext context), (context))
WATCHED(cuCtxSetCurrent, "cuCtxSetCurrent", 4000, 0, (CUcontext context), (context))
WATCHED(cuCtxPushCurrent, "cuCtxPushCurrent", 2000, 0, (CUcontext context), (context))
WATCHED(cuCtxPushCurrent_v2, "cuCtxPushCurrent", 4000, 0, (CUcontext context), (context))
WATCHED(cuCtxPopCurrent, "cuCtxPopCurrent", 2000, 0, (CUcontext * out), (out))
WATCHED(cuCtxPopCurrent_v2, "cuCtxPopCurrent", 4000, 0, (CUcontext * out), (out))
WATCHED(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease", 7000, 0, (CUdevice device), (device))
WATCHED(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", 11000, 0, (CUdevice device), (device))
WATCHED(cuDevicePrimaryCtxReset, "cuDevicePrimaryCtxReset", 7000, 0, (CUdevice device), (device))
WATCHED(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", 11000, 0, (CUdevice device), (device))

WATCHED(cuGreenCtxDestroy, "cuGreenCtxDestroy", 12040, 0, (CUgreenCtx green), (green))

/* context_calls.c, capture_calls.c */
WATCHED(cuStreamDestroy, "cuStreamDestroy", 2000, 0, (CUstream stream), (stream))
WATCHED(cuStreamDestroy_v2, "cuStreamDestroy", 4000, 0, (CUstream stream), (stream))
WATCHED(cuStreamBeginCapture, "cuStreamBeginCapture", 10000, 0, (CUstream stream), (stream))
WATCHED(cuStreamBeginCapture_ptsz, "cuStreamBeginCapture", 10000, 1, (CUstream stream), (stream))
WATCHED(cuStreamBeginCapture_v2, "cuStreamBeginCapture", 10010, 0, (CUstream stream, int mode), (stream, mode))
WATCHED(cuStreamBeginCapture_v2_ptsz, "cuStreamBeginCapture", 10010, 1, (CUstream stream, int mode), (stream, mode))
WATCHED(cuStreamBeginCaptureToGraph, "cuStreamBeginCaptureToGraph", 12030, 0,
        (CUstream stream, CUgraph graph, const CUgraphNode *after, const void *edges, size_t count, int mode),
        (stream, graph, after, edges, count, mode))
WATCHED(cuStreamBeginCaptureToGraph_ptsz, "cuStreamBeginCaptureToGraph", 12030, 1,
        (CUstream stream, CUgraph graph, const CUgraphNode *after, const void *edges, size_t count, int mode),
        (stream, graph, after, edges, count, mode))
WATCHED(cuStreamBeginRecaptureToGraph, "cuStreamBeginRecaptureToGraph", 13030, 0,
        (CUstream stream, int mode, CUgraph graph, void *callback, void *data), (stream, mode, graph, callback, data))
WATCHED(cuStreamBeginRecaptureToGraph_ptsz, "cuStreamBeginRecaptureToGraph", 13030, 1,
        (CUstream stream, int mode, CUgraph graph, void *callback, void *data), (stream, mode, graph, callback, data))
WATCHED(cuStreamBeginCaptureToCig, "cuStreamBeginCaptureToCig", 13010, 0, (CUstream stream, void *parameters),
        (stream, parameters))
WATCHED(cuStreamBeginCaptureToCig_ptsz, "cuStreamBeginCaptureToCig", 13010, 1, (CUstream stream, void *parameters),
        (stream, parameters))
WATCHED(cuStreamEndCaptureToCig, "cuStreamEndCaptureToCig", 13010, 0, (CUstream stream), (stream))
WATCHED(cuStreamEndCaptureToCig_ptsz, "cuStreamEndCaptureToCig", 13010, 1, (CUstream stream), (stream))
WATCHED(cuStreamEndCapture, "cuStreamEndCapture", 10000, 0, (CUstream stream, CUgraph *out), (stream, out))
WATCHED(cuStreamEndCapture_ptsz, "cuStreamEndCapture", 10000, 1, (CUstream stream, CUgraph *out), (stream, out))
WATCHED(cuStreamWaitEvent, "cuStreamWaitEvent", 3020, 0, (CUstream stream, CUevent event, unsigned flags),
        (stream, event, flags))
WATCHED(cuStreamWaitEvent_ptsz, "cuStreamWaitEvent", 7000, 1, (CUstream stream, CUevent event, unsigned flags),
        (stream, event, flags))

/* memory_calls.c */
WATCHED(cuMemAlloc_v2, "cuMemAlloc", 3020, 0, (CUdeviceptr * out, size_t bytes), (out, bytes))
WATCHED(cuMemAllocPitch_v2, "cuMemAllocPitch", 3020, 0,
        (CUdeviceptr * out, size_t *pitch, size_t width, size_t height, unsigned element),
        (out, pitch, width, height, element))
WATCHED(cuMemAllocManaged, "cuMemAllocManaged", 6000, 0, (CUdeviceptr * out, size_t bytes, unsigned flags),
        (out, bytes, flags))
WATCHED(cuMemFree_v2, "cuMemFree", 3020, 0, (CUdeviceptr at), (at))

/* stream_ordered.c */
WATCHED(cuMemAllocAsync, "cuMemAllocAsync", 11020, 0, (CUdeviceptr * out, size_t bytes, CUstream stream),
        (out, bytes, stream))
WATCHED(cuMemAllocAsync_ptsz, "cuMemAllocAsync", 11020, 1, (CUdeviceptr * out, size_t bytes, CUstream stream),
        (out, bytes, stream))
WATCHED(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", 11020, 0,
        (CUdeviceptr * out, size_t bytes, CUmempool pool, CUstream stream), (out, bytes, pool, stream))
WATCHED(cuMemAllocFromPoolAsync_ptsz, "cuMemAllocFromPoolAsync", 11020, 1,
        (CUdeviceptr * out, size_t bytes, CUmempool pool, CUstream stream), (out, bytes, pool, stream))
WATCHED(cuMemFreeAsync, "cuMemFreeAsync", 11020, 0, (CUdeviceptr at, CUstream stream), (at, stream))
WATCHED(cuMemFreeAsync_ptsz, "cuMemFreeAsync", 11020, 1, (CUdeviceptr at, CUstream stream), (at, stream))
WATCHED(cuMemPoolCreate, "cuMemPoolCreate", 11020, 0, (CUmempool * out, const CUmemPoolProps *props), (out, props))
WATCHED(cuMemPoolDestroy, "cuMemPoolDestroy", 11020, 0, (CUmempool pool), (pool))
WATCHED(cuMemGetDefaultMemPool, "cuMemGetDefaultMemPool", 13000, 0,
        (CUmempool * out, CUmemLocation *location, int type), (out, location, type))
WATCHED(cuMemGetMemPool, "cuMemGetMemPool", 13000, 0, (CUmempool * out, CUmemLocation *location, int type),
        (out, location, type))
WATCHED(cuMemPoolImportFromShareableHandle, "cuMemPoolImportFromShareableHandle", 11020, 0,
        (CUmempool * out, void *handle, int type, unsigned long long flags), (out, handle, type, flags))

/* plain_memory.c */
WATCHED(cuMemCreate, "cuMemCreate", 10020, 0,
        (CUmemHandle * out, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags),
        (out, bytes, prop, flags))
WATCHED(cuMemRelease, "cuMemRelease", 10020, 0, (CUmemHandle handle), (handle))
WATCHED(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", 11000, 0, (CUmemHandle * out, void *at), (out, at))
WATCHED(cuMemMap, "cuMemMap", 10020, 0,
        (CUdeviceptr at, size_t bytes, size_t offset, CUmemHandle handle, unsigned long long flags),
        (at, bytes, offset, handle, flags))
WATCHED(cuMemUnmap, "cuMemUnmap", 10020, 0, (CUdeviceptr at, size_t bytes), (at, bytes))
WATCHED(cuArrayCreate_v2, "cuArrayCreate", 3020, 0, (CUarray * out, const CUarrayDescriptor *descriptor),
        (out, descriptor))
WATCHED(cuArray3DCreate_v2, "cuArray3DCreate", 3020, 0, (CUarray * out, const CUarray3DDescriptor *descriptor),
        (out, descriptor))
WATCHED(cuArrayDestroy, "cuArrayDestroy", 2000, 0, (CUarray array), (array))
WATCHED(cuMipmappedArrayCreate, "cuMipmappedArrayCreate", 5000, 0,
        (CUmipmap * out, const CUarray3DDescriptor *descriptor, unsigned levels), (out, descriptor, levels))
WATCHED(cuMipmappedArrayDestroy, "cuMipmappedArrayDestroy", 5000, 0, (CUmipmap array), (array))
WATCHED(cuGraphAddMemAllocNode, "cuGraphAddMemAllocNode", 11040, 0,
        (CUgraphNode * out, CUgraph graph, const CUgraphNode *after, size_t count, void *params),
        (out, graph, after, count, params))
WATCHED(cuGraphAddNode, "cuGraphAddNode", 12020, 0,
        (CUgraphNode * out, CUgraph graph, const CUgraphNode *after, size_t count, CUgraphNodeParams *params),
        (out, graph, after, count, params))
WATCHED(cuGraphAddNode_v2, "cuGraphAddNode", 12030, 0,
        (CUgraphNode * out, CUgraph graph, const CUgraphNode *after, const void *edges, size_t count,
         CUgraphNodeParams *params),
        (out, graph, after, edges, count, params))
WATCHED(cuGraphAddNode_v3, "cuGraphAddNode", 13040, 0,
        (CUgraphNode * out, CUgraph graph, const CUgraphNode *after, const void *edges, size_t count,
         CUgraphNodeParams *params),
        (out, graph, after, edges, count, params))

/* reported.c */
WATCHED(cuMemGetInfo_v2, "cuMemGetInfo", 3020, 0, (size_t *available, size_t *total), (available, total))
WRAPPED(cuDeviceTotalMem_v2, "cuDeviceTotalMem", 3020, 0, (size_t *bytes, CUdevice device))
WATCHED(cuPointerGetAttribute, "cuPointerGetAttribute", 4000, 0, (void *data, int attribute, CUdeviceptr at),
        (data, attribute, at))
WATCHED(cuPointerGetAttributes, "cuPointerGetAttributes", 7000, 0,
        (unsigned count, int *attributes, void **data, CUdeviceptr at), (count, attributes, data, at))
WATCHED(cuMemGetAddressRange_v2, "cuMemGetAddressRange", 3020, 0, (CUdeviceptr * base, size_t *size, CUdeviceptr at),
        (base, size, at))
WATCHED(cuIpcGetMemHandle, "cuIpcGetMemHandle", 4010, 0, (CUipcMemHandle * out, CUdeviceptr at), (out, at))

CALLED(cuCtxFromGreenCtx, (CUcontext * out, CUgreenCtx green))
CALLED(cuCtxGetCurrent, (CUcontext * out))
CALLED(cuCtxGetDevice, (CUdevice * out))
CALLED(cuDeviceGet, (CUdevice * out, int ordinal))
CALLED(cuDeviceGetAttribute, (int *value, int attribute, CUdevice device))
CALLED(cuDeviceGetCount, (int *count))
CALLED(cuDeviceGetGraphMemAttribute, (CUdevice device, int attribute, void *value))
CALLED(cuDeviceGetUuid, (CUuuid * out, CUdevice device))
CALLED(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned *flags, int *active))
CALLED(cuStreamGetCtx, (CUstream stream, CUcontext *out))
CALLED(cuThreadExchangeStreamCaptureMode, (int *mode))

#undef WRAPPED
#undef WATCHED
#undef CALLED
