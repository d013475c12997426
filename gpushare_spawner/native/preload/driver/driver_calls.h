/* The other driver calls: those that are wrapped by hand, and those that are only called.

   WRAPPED(name, asked-for name, CUDA version of this ABI, 1 for the _ptsz form, parameters)
   CALLED(name, parameters) */

WRAPPED(cuInit, "cuInit", 2000, 0, (unsigned flags))
WRAPPED(cuGetProcAddress, "cuGetProcAddress", 11030, 0,
        (const char *symbol, void **function, int version, uint64_t flags))
WRAPPED(cuGetProcAddress_v2, "cuGetProcAddress", 12000, 0,
        (const char *symbol, void **function, int version, uint64_t flags, int *status))

/* context_calls.c */
WRAPPED(cuCtxCreate_v2, "cuCtxCreate", 3020, 0, (CUcontext * out, unsigned flags, CUdevice device))
WRAPPED(cuCtxCreate_v3, "cuCtxCreate", 11040, 0,
        (CUcontext * out, void *affinity, int count, unsigned flags, CUdevice device))
WRAPPED(cuCtxCreate_v4, "cuCtxCreate", 12050, 0, (CUcontext * out, void *params, unsigned flags, CUdevice device))
WRAPPED(cuCtxDestroy, "cuCtxDestroy", 2000, 0, (CUcontext context))
WRAPPED(cuCtxDestroy_v2, "cuCtxDestroy", 4000, 0, (CUcontext context))
WRAPPED(cuCtxDetach, "cuCtxDetach", 2000, 0, (CUcontext context))
WRAPPED(cuCtxSetCurrent, "cuCtxSetCurrent", 4000, 0, (CUcontext context))
WRAPPED(cuCtxPushCurrent, "cuCtxPushCurrent", 2000, 0, (CUcontext context))
WRAPPED(cuCtxPushCurrent_v2, "cuCtxPushCurrent", 4000, 0, (CUcontext context))
WRAPPED(cuCtxPopCurrent, "cuCtxPopCurrent", 2000, 0, (CUcontext * out))
WRAPPED(cuCtxPopCurrent_v2, "cuCtxPopCurrent", 4000, 0, (CUcontext * out))
WRAPPED(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease", 7000, 0, (CUdevice device))
WRAPPED(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", 11000, 0, (CUdevice device))
WRAPPED(cuDevicePrimaryCtxReset, "cuDevicePrimaryCtxReset", 7000, 0, (CUdevice device))
WRAPPED(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", 11000, 0, (CUdevice device))

/* context_calls.c, capture_calls.c */
WRAPPED(cuStreamDestroy, "cuStreamDestroy", 2000, 0, (CUstream stream))
WRAPPED(cuStreamDestroy_v2, "cuStreamDestroy", 4000, 0, (CUstream stream))
WRAPPED(cuStreamBeginCapture, "cuStreamBeginCapture", 10000, 0, (CUstream stream))
WRAPPED(cuStreamBeginCapture_ptsz, "cuStreamBeginCapture", 10000, 1, (CUstream stream))
WRAPPED(cuStreamBeginCapture_v2, "cuStreamBeginCapture", 10010, 0, (CUstream stream, int mode))
WRAPPED(cuStreamBeginCapture_v2_ptsz, "cuStreamBeginCapture", 10010, 1, (CUstream stream, int mode))
WRAPPED(cuStreamBeginCaptureToGraph, "cuStreamBeginCaptureToGraph", 12030, 0,
        (CUstream stream, CUgraph graph, const CUgraphNode *after, const void *edges, size_t count, int mode))
WRAPPED(cuStreamBeginCaptureToGraph_ptsz, "cuStreamBeginCaptureToGraph", 12030, 1,
        (CUstream stream, CUgraph graph, const CUgraphNode *after, const void *edges, size_t count, int mode))
WRAPPED(cuStreamBeginRecaptureToGraph, "cuStreamBeginRecaptureToGraph", 13030, 0,
        (CUstream stream, int mode, CUgraph graph, void *callback, void *data))
WRAPPED(cuStreamBeginRecaptureToGraph_ptsz, "cuStreamBeginRecaptureToGraph", 13030, 1,
        (CUstream stream, int mode, CUgraph graph, void *callback, void *data))
WRAPPED(cuStreamBeginCaptureToCig, "cuStreamBeginCaptureToCig", 13010, 0, (CUstream stream, void *parameters))
WRAPPED(cuStreamBeginCaptureToCig_ptsz, "cuStreamBeginCaptureToCig", 13010, 1, (CUstream stream, void *parameters))
WRAPPED(cuStreamEndCaptureToCig, "cuStreamEndCaptureToCig", 13010, 0, (CUstream stream))
WRAPPED(cuStreamEndCaptureToCig_ptsz, "cuStreamEndCaptureToCig", 13010, 1, (CUstream stream))
WRAPPED(cuStreamEndCapture, "cuStreamEndCapture", 10000, 0, (CUstream stream, CUgraph *out))
WRAPPED(cuStreamEndCapture_ptsz, "cuStreamEndCapture", 10000, 1, (CUstream stream, CUgraph *out))
WRAPPED(cuStreamWaitEvent, "cuStreamWaitEvent", 3020, 0, (CUstream stream, CUevent event, unsigned flags))
WRAPPED(cuStreamWaitEvent_ptsz, "cuStreamWaitEvent", 7000, 1, (CUstream stream, CUevent event, unsigned flags))

/* memory_calls.c */
WRAPPED(cuMemAlloc_v2, "cuMemAlloc", 3020, 0, (CUdeviceptr * out, size_t bytes))
WRAPPED(cuMemAllocPitch_v2, "cuMemAllocPitch", 3020, 0,
        (CUdeviceptr * out, size_t *pitch, size_t width, size_t height, unsigned element))
WRAPPED(cuMemAllocManaged, "cuMemAllocManaged", 6000, 0, (CUdeviceptr * out, size_t bytes, unsigned flags))
WRAPPED(cuMemFree_v2, "cuMemFree", 3020, 0, (CUdeviceptr at))

/* stream_ordered.c */
WRAPPED(cuMemAllocAsync, "cuMemAllocAsync", 11020, 0, (CUdeviceptr * out, size_t bytes, CUstream stream))
WRAPPED(cuMemAllocAsync_ptsz, "cuMemAllocAsync", 11020, 1, (CUdeviceptr * out, size_t bytes, CUstream stream))
WRAPPED(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", 11020, 0,
        (CUdeviceptr * out, size_t bytes, CUmempool pool, CUstream stream))
WRAPPED(cuMemAllocFromPoolAsync_ptsz, "cuMemAllocFromPoolAsync", 11020, 1,
        (CUdeviceptr * out, size_t bytes, CUmempool pool, CUstream stream))
WRAPPED(cuMemFreeAsync, "cuMemFreeAsync", 11020, 0, (CUdeviceptr at, CUstream stream))
WRAPPED(cuMemFreeAsync_ptsz, "cuMemFreeAsync", 11020, 1, (CUdeviceptr at, CUstream stream))
WRAPPED(cuMemPoolCreate, "cuMemPoolCreate", 11020, 0, (CUmempool * out, const CUmemPoolProps *props))
WRAPPED(cuMemPoolDestroy, "cuMemPoolDestroy", 11020, 0, (CUmempool pool))
WRAPPED(cuMemPoolImportFromShareableHandle, "cuMemPoolImportFromShareableHandle", 11020, 0,
        (CUmempool * out, void *handle, int type, unsigned long long flags))

/* plain_memory.c */
WRAPPED(cuMemCreate, "cuMemCreate", 10020, 0,
        (CUmemHandle * out, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags))
WRAPPED(cuMemRelease, "cuMemRelease", 10020, 0, (CUmemHandle handle))
WRAPPED(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", 11000, 0, (CUmemHandle * out, void *at))
WRAPPED(cuMemMap, "cuMemMap", 10020, 0,
        (CUdeviceptr at, size_t bytes, size_t offset, CUmemHandle handle, unsigned long long flags))
WRAPPED(cuMemUnmap, "cuMemUnmap", 10020, 0, (CUdeviceptr at, size_t bytes))
WRAPPED(cuArrayCreate_v2, "cuArrayCreate", 3020, 0, (CUarray * out, const CUarrayDescriptor *descriptor))
WRAPPED(cuArray3DCreate_v2, "cuArray3DCreate", 3020, 0, (CUarray * out, const CUarray3DDescriptor *descriptor))
WRAPPED(cuArrayDestroy, "cuArrayDestroy", 2000, 0, (CUarray array))
WRAPPED(cuMipmappedArrayCreate, "cuMipmappedArrayCreate", 5000, 0,
        (CUmipmap * out, const CUarray3DDescriptor *descriptor, unsigned levels))
WRAPPED(cuMipmappedArrayDestroy, "cuMipmappedArrayDestroy", 5000, 0, (CUmipmap array))
WRAPPED(cuGraphAddMemAllocNode, "cuGraphAddMemAllocNode", 11040, 0,
        (CUgraphNode * out, CUgraph graph, const CUgraphNode *after, size_t count, void *params))
WRAPPED(cuGraphAddNode, "cuGraphAddNode", 12020, 0,
        (CUgraphNode * out, CUgraph graph, const CUgraphNode *after, size_t count, CUgraphNodeParams *params))
WRAPPED(cuGraphAddNode_v2, "cuGraphAddNode", 12030, 0,
        (CUgraphNode * out, CUgraph graph, const CUgraphNode *after, const void *edges, size_t count,
         CUgraphNodeParams *params))
WRAPPED(cuGraphAddNode_v3, "cuGraphAddNode", 13040, 0,
        (CUgraphNode * out, CUgraph graph, const CUgraphNode *after, const void *edges, size_t count,
         CUgraphNodeParams *params))

/* reported.c */
WRAPPED(cuMemGetInfo_v2, "cuMemGetInfo", 3020, 0, (size_t *available, size_t *total))
WRAPPED(cuDeviceTotalMem_v2, "cuDeviceTotalMem", 3020, 0, (size_t *bytes, CUdevice device))
WRAPPED(cuPointerGetAttribute, "cuPointerGetAttribute", 4000, 0, (void *data, int attribute, CUdeviceptr at))
WRAPPED(cuPointerGetAttributes, "cuPointerGetAttributes", 7000, 0,
        (unsigned count, int *attributes, void **data, CUdeviceptr at))
WRAPPED(cuMemGetAddressRange_v2, "cuMemGetAddressRange", 3020, 0, (CUdeviceptr * base, size_t *size, CUdeviceptr at))
WRAPPED(cuIpcGetMemHandle, "cuIpcGetMemHandle", 4010, 0, (CUipcMemHandle * out, CUdeviceptr at))

CALLED(cuCtxGetCurrent, (CUcontext * out))
CALLED(cuCtxGetDevice, (CUdevice * out))
CALLED(cuCtxSynchronize, (void))
CALLED(cuDeviceGet, (CUdevice * out, int ordinal))
CALLED(cuDeviceGetAttribute, (int *value, int attribute, CUdevice device))
CALLED(cuDeviceGetCount, (int *count))
CALLED(cuDeviceGetGraphMemAttribute, (CUdevice device, int attribute, void *value))
CALLED(cuDeviceGetMemPool, (CUmempool * out, CUdevice device))
CALLED(cuDeviceGetUuid, (CUuuid * out, CUdevice device))
CALLED(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned *flags, int *active))
CALLED(cuDevicePrimaryCtxRetain, (CUcontext * out, CUdevice device))
CALLED(cuEventCreate, (CUevent * out, unsigned flags))
CALLED(cuEventDestroy_v2, (CUevent event))
CALLED(cuEventQuery, (CUevent event))
CALLED(cuEventRecord, (CUevent event, CUstream stream))
CALLED(cuMemAdvise, (CUdeviceptr at, size_t bytes, int advice, CUdevice device))
CALLED(cuMemAdvise_v2, (CUdeviceptr at, size_t bytes, int advice, CUmemLocation location))
CALLED(cuMemPoolGetAttribute, (CUmempool pool, int attribute, void *value))
CALLED(cuMemPoolTrimTo, (CUmempool pool, size_t keep))
CALLED(cuStreamCreate, (CUstream * out, unsigned flags))
CALLED(cuStreamGetCtx, (CUstream stream, CUcontext *out))
CALLED(cuStreamIsCapturing, (CUstream stream, int *status))
CALLED(cuThreadExchangeStreamCaptureMode, (int *mode))

#undef WRAPPED
#undef CALLED
