/* Driver calls that are wrapped with engine `suspend` only: a suspended process must not make them.

   The driver blocks every call of a locked process that launches work, manages resources or changes the GPU's state,
   and nobody learns that a thread waits there. So the library waits in front of the call and asks for the GPU. Which
   calls are here: those that a notebook's program may make first after a pause (PyTorch's allocator, streams and
   events; JAX's and Triton's loading of code; garbage collection), and those that synchronize. Calls that only read
   what the host knows (cuCtxGetCurrent, cuCtxGetDevice, cuDeviceGetAttribute, cuGetErrorName, cuDriverGetVersion) are
   not: they go on in a suspended process.

   HELD(name, asked-for name, CUDA version of this ABI, 1 for the _ptsz form, parameters, arguments)
   COUNTED(the same)
       its wrapper also counts what keeps the process from being suspended (ties.c, managed_variables.c), or its
       contexts (context_calls.c).

   A file that does not define them takes such a call for WRAPPED. */

#ifndef HELD
#define HELD(name, asked, version, per_thread, parameters, arguments)                                                  \
    WRAPPED(name, asked, version, per_thread, parameters)
#endif
#ifndef COUNTED
#define COUNTED(name, asked, version, per_thread, parameters, arguments)                                               \
    HELD(name, asked, version, per_thread, parameters, arguments)
#endif

/* contexts and devices: the first call of a program in a thread, and waiting for all work */
COUNTED(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000, 0, (CUcontext * out, CUdevice device),
        (out, device))
HELD(cuDevicePrimaryCtxSetFlags, "cuDevicePrimaryCtxSetFlags", 7000, 0, (CUdevice device, unsigned flags),
     (device, flags))
HELD(cuDevicePrimaryCtxSetFlags_v2, "cuDevicePrimaryCtxSetFlags", 11000, 0, (CUdevice device, unsigned flags),
     (device, flags))
HELD(cuCtxSynchronize, "cuCtxSynchronize", 2000, 0, (void), ())
HELD(cuCtxSynchronize_v2, "cuCtxSynchronize", 13000, 0, (CUcontext context), (context))
HELD(cuCtxSetLimit, "cuCtxSetLimit", 3010, 0, (int limit, size_t value), (limit, value))
HELD(cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess", 4000, 0, (CUcontext peer, unsigned flags), (peer, flags))
HELD(cuCtxDisablePeerAccess, "cuCtxDisablePeerAccess", 4000, 0, (CUcontext peer), (peer))

/* streams and events: synchronize, queries, callbacks */
HELD(cuStreamCreate, "cuStreamCreate", 2000, 0, (CUstream * out, unsigned flags), (out, flags))
HELD(cuStreamCreateWithPriority, "cuStreamCreateWithPriority", 5050, 0, (CUstream * out, unsigned flags, int priority),
     (out, flags, priority))
HELD(cuStreamSynchronize, "cuStreamSynchronize", 2000, 0, (CUstream stream), (stream))
HELD(cuStreamSynchronize_ptsz, "cuStreamSynchronize", 7000, 1, (CUstream stream), (stream))
HELD(cuStreamQuery, "cuStreamQuery", 2000, 0, (CUstream stream), (stream))
HELD(cuStreamQuery_ptsz, "cuStreamQuery", 7000, 1, (CUstream stream), (stream))
HELD(cuStreamAddCallback, "cuStreamAddCallback", 5000, 0, (CUstream stream, void *callback, void *data, unsigned flags),
     (stream, callback, data, flags))
HELD(cuStreamAddCallback_ptsz, "cuStreamAddCallback", 7000, 1,
     (CUstream stream, void *callback, void *data, unsigned flags), (stream, callback, data, flags))
HELD(cuLaunchHostFunc, "cuLaunchHostFunc", 10000, 0, (CUstream stream, void *function, void *data),
     (stream, function, data))
HELD(cuLaunchHostFunc_ptsz, "cuLaunchHostFunc", 10000, 1, (CUstream stream, void *function, void *data),
     (stream, function, data))
HELD(cuLaunchHostFunc_v2, "cuLaunchHostFunc", 13010, 0, (CUstream stream, void *function, void *data, unsigned mode),
     (stream, function, data, mode))
HELD(cuLaunchHostFunc_v2_ptsz, "cuLaunchHostFunc", 13010, 1,
     (CUstream stream, void *function, void *data, unsigned mode), (stream, function, data, mode))
HELD(cuStreamAttachMemAsync, "cuStreamAttachMemAsync", 6000, 0,
     (CUstream stream, CUdeviceptr at, size_t bytes, unsigned flags), (stream, at, bytes, flags))
HELD(cuStreamAttachMemAsync_ptsz, "cuStreamAttachMemAsync", 7000, 1,
     (CUstream stream, CUdeviceptr at, size_t bytes, unsigned flags), (stream, at, bytes, flags))
HELD(cuStreamWaitValue32, "cuStreamWaitValue32", 8000, 0,
     (CUstream stream, CUdeviceptr at, uint32_t value, unsigned flags), (stream, at, value, flags))
HELD(cuStreamWaitValue32_ptsz, "cuStreamWaitValue32", 8000, 1,
     (CUstream stream, CUdeviceptr at, uint32_t value, unsigned flags), (stream, at, value, flags))
HELD(cuStreamWaitValue32_v2, "cuStreamWaitValue32", 11070, 0,
     (CUstream stream, CUdeviceptr at, uint32_t value, unsigned flags), (stream, at, value, flags))
HELD(cuStreamWaitValue32_v2_ptsz, "cuStreamWaitValue32", 11070, 1,
     (CUstream stream, CUdeviceptr at, uint32_t value, unsigned flags), (stream, at, value, flags))
HELD(cuStreamWaitValue64, "cuStreamWaitValue64", 9000, 0,
     (CUstream stream, CUdeviceptr at, uint64_t value, unsigned flags), (stream, at, value, flags))
HELD(cuStreamWaitValue64_ptsz, "cuStreamWaitValue64", 9000, 1,
     (CUstream stream, CUdeviceptr at, uint64_t value, unsigned flags), (stream, at, value, flags))
HELD(cuStreamWaitValue64_v2, "cuStreamWaitValue64", 11070, 0,
     (CUstream stream, CUdeviceptr at, uint64_t value, unsigned flags), (stream, at, value, flags))
HELD(cuStreamWaitValue64_v2_ptsz, "cuStreamWaitValue64", 11070, 1,
     (CUstream stream, CUdeviceptr at, uint64_t value, unsigned flags), (stream, at, value, flags))
HELD(cuStreamIsCapturing, "cuStreamIsCapturing", 10000, 0, (CUstream stream, int *status), (stream, status))
HELD(cuStreamIsCapturing_ptsz, "cuStreamIsCapturing", 10000, 1, (CUstream stream, int *status), (stream, status))
HELD(cuStreamGetCaptureInfo, "cuStreamGetCaptureInfo", 10010, 0, (CUstream stream, int *status, uint64_t *id),
     (stream, status, id))
HELD(cuStreamGetCaptureInfo_ptsz, "cuStreamGetCaptureInfo", 10010, 1, (CUstream stream, int *status, uint64_t *id),
     (stream, status, id))
HELD(cuStreamGetCaptureInfo_v2, "cuStreamGetCaptureInfo", 11030, 0,
     (CUstream stream, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **after, size_t *count),
     (stream, status, id, graph, after, count))
HELD(cuStreamGetCaptureInfo_v2_ptsz, "cuStreamGetCaptureInfo", 11030, 1,
     (CUstream stream, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **after, size_t *count),
     (stream, status, id, graph, after, count))
HELD(cuStreamGetCaptureInfo_v3, "cuStreamGetCaptureInfo", 12030, 0,
     (CUstream stream, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **after, const void **edges,
      size_t *count),
     (stream, status, id, graph, after, edges, count))
HELD(cuStreamGetCaptureInfo_v3_ptsz, "cuStreamGetCaptureInfo", 12030, 1,
     (CUstream stream, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **after, const void **edges,
      size_t *count),
     (stream, status, id, graph, after, edges, count))
HELD(cuStreamUpdateCaptureDependencies, "cuStreamUpdateCaptureDependencies", 11030, 0,
     (CUstream stream, CUgraphNode *after, size_t count, unsigned flags), (stream, after, count, flags))
HELD(cuStreamUpdateCaptureDependencies_ptsz, "cuStreamUpdateCaptureDependencies", 11030, 1,
     (CUstream stream, CUgraphNode *after, size_t count, unsigned flags), (stream, after, count, flags))
HELD(cuStreamUpdateCaptureDependencies_v2, "cuStreamUpdateCaptureDependencies", 12030, 0,
     (CUstream stream, CUgraphNode *after, const void *edges, size_t count, unsigned flags),
     (stream, after, edges, count, flags))
HELD(cuStreamUpdateCaptureDependencies_v2_ptsz, "cuStreamUpdateCaptureDependencies", 12030, 1,
     (CUstream stream, CUgraphNode *after, const void *edges, size_t count, unsigned flags),
     (stream, after, edges, count, flags))
HELD(cuEventCreate, "cuEventCreate", 2000, 0, (CUevent * out, unsigned flags), (out, flags))
HELD(cuEventRecord, "cuEventRecord", 2000, 0, (CUevent event, CUstream stream), (event, stream))
HELD(cuEventRecord_ptsz, "cuEventRecord", 7000, 1, (CUevent event, CUstream stream), (event, stream))
HELD(cuEventRecordWithFlags, "cuEventRecordWithFlags", 11010, 0, (CUevent event, CUstream stream, unsigned flags),
     (event, stream, flags))
HELD(cuEventRecordWithFlags_ptsz, "cuEventRecordWithFlags", 11010, 1, (CUevent event, CUstream stream, unsigned flags),
     (event, stream, flags))
HELD(cuEventQuery, "cuEventQuery", 2000, 0, (CUevent event), (event))
HELD(cuEventSynchronize, "cuEventSynchronize", 2000, 0, (CUevent event), (event))
HELD(cuEventElapsedTime, "cuEventElapsedTime", 2000, 0, (float *milliseconds, CUevent begin, CUevent end),
     (milliseconds, begin, end))
HELD(cuEventElapsedTime_v2, "cuEventElapsedTime", 12080, 0, (float *milliseconds, CUevent begin, CUevent end),
     (milliseconds, begin, end))
COUNTED(cuEventDestroy, "cuEventDestroy", 2000, 0, (CUevent event), (event))
COUNTED(cuEventDestroy_v2, "cuEventDestroy", 4000, 0, (CUevent event), (event))

/* code: a framework loads a kernel's module at its first use */
HELD(cuModuleLoad, "cuModuleLoad", 2000, 0, (void **out, const char *path), (out, path))
HELD(cuModuleLoadData, "cuModuleLoadData", 2000, 0, (void **out, const void *image), (out, image))
HELD(cuModuleLoadDataEx, "cuModuleLoadDataEx", 2010, 0,
     (void **out, const void *image, unsigned count, int *options, void **values), (out, image, count, options, values))
HELD(cuModuleLoadFatBinary, "cuModuleLoadFatBinary", 2000, 0, (void **out, const void *image), (out, image))
COUNTED(cuModuleUnload, "cuModuleUnload", 2000, 0, (void *module), (module))
HELD(cuModuleGetFunction, "cuModuleGetFunction", 2000, 0, (CUfunction * out, void *module, const char *name),
     (out, module, name))
COUNTED(cuModuleGetGlobal_v2, "cuModuleGetGlobal", 3020, 0,
        (CUdeviceptr * out, size_t *bytes, void *module, const char *name), (out, bytes, module, name))
HELD(cuLibraryLoadData, "cuLibraryLoadData", 12000, 0,
     (void **out, const void *image, int *options, void **values, unsigned count, int *library_options,
      void **library_values, unsigned library_count),
     (out, image, options, values, count, library_options, library_values, library_count))
HELD(cuLibraryLoadFromFile, "cuLibraryLoadFromFile", 12000, 0,
     (void **out, const char *path, int *options, void **values, unsigned count, int *library_options,
      void **library_values, unsigned library_count),
     (out, path, options, values, count, library_options, library_values, library_count))
COUNTED(cuLibraryUnload, "cuLibraryUnload", 12000, 0, (void *library), (library))
HELD(cuLibraryGetKernel, "cuLibraryGetKernel", 12000, 0, (void **out, void *library, const char *name),
     (out, library, name))
HELD(cuLibraryGetModule, "cuLibraryGetModule", 12000, 0, (void **out, void *library), (out, library))
COUNTED(cuLibraryGetGlobal, "cuLibraryGetGlobal", 12000, 0,
        (CUdeviceptr * out, size_t *bytes, void *library, const char *name), (out, bytes, library, name))
COUNTED(cuLibraryGetManaged, "cuLibraryGetManaged", 12000, 0,
        (CUdeviceptr * out, size_t *bytes, void *library, const char *name), (out, bytes, library, name))
HELD(cuKernelGetFunction, "cuKernelGetFunction", 12000, 0, (CUfunction * out, void *kernel), (out, kernel))
HELD(cuKernelGetAttribute, "cuKernelGetAttribute", 12000, 0, (int *value, int attribute, void *kernel, CUdevice device),
     (value, attribute, kernel, device))
HELD(cuKernelSetAttribute, "cuKernelSetAttribute", 12000, 0, (int attribute, int value, void *kernel, CUdevice device),
     (attribute, value, kernel, device))
HELD(cuFuncGetAttribute, "cuFuncGetAttribute", 2020, 0, (int *value, int attribute, CUfunction function),
     (value, attribute, function))
HELD(cuFuncSetAttribute, "cuFuncSetAttribute", 9000, 0, (CUfunction function, int attribute, int value),
     (function, attribute, value))
HELD(cuFuncSetCacheConfig, "cuFuncSetCacheConfig", 3000, 0, (CUfunction function, int config), (function, config))
HELD(cuFuncLoad, "cuFuncLoad", 12040, 0, (CUfunction function), (function))
HELD(cuOccupancyMaxActiveBlocksPerMultiprocessor, "cuOccupancyMaxActiveBlocksPerMultiprocessor", 6050, 0,
     (int *blocks, CUfunction function, int block_size, size_t shared), (blocks, function, block_size, shared))
HELD(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", 7000,
     0, (int *blocks, CUfunction function, int block_size, size_t shared, unsigned flags),
     (blocks, function, block_size, shared, flags))

/* memory: page-locked host memory, addresses, pools */
HELD(cuMemHostAlloc, "cuMemHostAlloc", 2020, 0, (void **out, size_t bytes, unsigned flags), (out, bytes, flags))
HELD(cuMemAllocHost_v2, "cuMemAllocHost", 3020, 0, (void **out, size_t bytes), (out, bytes))
HELD(cuMemFreeHost, "cuMemFreeHost", 2000, 0, (void *at), (at))
HELD(cuMemHostRegister_v2, "cuMemHostRegister", 6050, 0, (void *at, size_t bytes, unsigned flags), (at, bytes, flags))
HELD(cuMemHostUnregister, "cuMemHostUnregister", 4000, 0, (void *at), (at))
HELD(cuMemHostGetDevicePointer_v2, "cuMemHostGetDevicePointer", 3020, 0, (CUdeviceptr * out, void *at, unsigned flags),
     (out, at, flags))
HELD(cuMemAddressReserve, "cuMemAddressReserve", 10020, 0,
     (CUdeviceptr * out, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags),
     (out, bytes, alignment, wanted, flags))
HELD(cuMemAddressFree, "cuMemAddressFree", 10020, 0, (CUdeviceptr at, size_t bytes), (at, bytes))
HELD(cuMemSetAccess, "cuMemSetAccess", 10020, 0, (CUdeviceptr at, size_t bytes, const void *access, size_t count),
     (at, bytes, access, count))
HELD(cuMemAdvise, "cuMemAdvise", 8000, 0, (CUdeviceptr at, size_t bytes, int advice, CUdevice device),
     (at, bytes, advice, device))
HELD(cuMemAdvise_v2, "cuMemAdvise", 12020, 0, (CUdeviceptr at, size_t bytes, int advice, CUmemLocation location),
     (at, bytes, advice, location))
HELD(cuMemRangeGetAttribute, "cuMemRangeGetAttribute", 8000, 0,
     (void *data, size_t size, int attribute, CUdeviceptr at, size_t bytes), (data, size, attribute, at, bytes))
HELD(cuDeviceGetDefaultMemPool, "cuDeviceGetDefaultMemPool", 11020, 0, (CUmempool * out, CUdevice device),
     (out, device))
HELD(cuDeviceGetMemPool, "cuDeviceGetMemPool", 11020, 0, (CUmempool * out, CUdevice device), (out, device))
HELD(cuDeviceSetMemPool, "cuDeviceSetMemPool", 11020, 0, (CUdevice device, CUmempool pool), (device, pool))
HELD(cuMemPoolTrimTo, "cuMemPoolTrimTo", 11020, 0, (CUmempool pool, size_t keep), (pool, keep))
HELD(cuMemPoolSetAttribute, "cuMemPoolSetAttribute", 11020, 0, (CUmempool pool, int attribute, void *value),
     (pool, attribute, value))
HELD(cuMemPoolGetAttribute, "cuMemPoolGetAttribute", 11020, 0, (CUmempool pool, int attribute, void *value),
     (pool, attribute, value))
HELD(cuMemPoolSetAccess, "cuMemPoolSetAccess", 11020, 0, (CUmempool pool, const void *access, size_t count),
     (pool, access, count))
HELD(cuDeviceGraphMemTrim, "cuDeviceGraphMemTrim", 11040, 0, (CUdevice device), (device))
HELD(cuTexObjectCreate, "cuTexObjectCreate", 5000, 0,
     (unsigned long long *out, const void *resource, const void *texture, const void *view),
     (out, resource, texture, view))
HELD(cuTexObjectDestroy, "cuTexObjectDestroy", 5000, 0, (unsigned long long object), (object))
HELD(cuSurfObjectCreate, "cuSurfObjectCreate", 5000, 0, (unsigned long long *out, const void *resource),
     (out, resource))
HELD(cuSurfObjectDestroy, "cuSurfObjectDestroy", 5000, 0, (unsigned long long object), (object))

/* graphs */
HELD(cuGraphCreate, "cuGraphCreate", 10000, 0, (CUgraph * out, unsigned flags), (out, flags))
HELD(cuGraphDestroy, "cuGraphDestroy", 10000, 0, (CUgraph graph), (graph))
HELD(cuGraphInstantiate, "cuGraphInstantiate", 10000, 0,
     (CUgraphExec * out, CUgraph graph, CUgraphNode *error, char *log, size_t size), (out, graph, error, log, size))
HELD(cuGraphInstantiate_v2, "cuGraphInstantiate", 11000, 0,
     (CUgraphExec * out, CUgraph graph, CUgraphNode *error, char *log, size_t size), (out, graph, error, log, size))
HELD(cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags", 11040, 0,
     (CUgraphExec * out, CUgraph graph, unsigned long long flags), (out, graph, flags))
HELD(cuGraphInstantiateWithParams, "cuGraphInstantiateWithParams", 12000, 0,
     (CUgraphExec * out, CUgraph graph, void *params), (out, graph, params))
HELD(cuGraphInstantiateWithParams_ptsz, "cuGraphInstantiateWithParams", 12000, 1,
     (CUgraphExec * out, CUgraph graph, void *params), (out, graph, params))
HELD(cuGraphExecUpdate, "cuGraphExecUpdate", 10020, 0,
     (CUgraphExec exec, CUgraph graph, CUgraphNode *error, int *outcome), (exec, graph, error, outcome))
HELD(cuGraphExecUpdate_v2, "cuGraphExecUpdate", 12000, 0, (CUgraphExec exec, CUgraph graph, void *outcome),
     (exec, graph, outcome))
HELD(cuGraphExecKernelNodeSetParams, "cuGraphExecKernelNodeSetParams", 10010, 0,
     (CUgraphExec exec, CUgraphNode node, const void *params), (exec, node, params))
HELD(cuGraphExecKernelNodeSetParams_v2, "cuGraphExecKernelNodeSetParams", 12000, 0,
     (CUgraphExec exec, CUgraphNode node, const void *params), (exec, node, params))
HELD(cuGraphExecDestroy, "cuGraphExecDestroy", 10000, 0, (CUgraphExec exec), (exec))

/* what ties the process to others: nothing of it survives a checkpoint */
COUNTED(cuIpcOpenMemHandle, "cuIpcOpenMemHandle", 4010, 0, (CUdeviceptr * out, CUipcMemHandle handle, unsigned flags),
        (out, handle, flags))
COUNTED(cuIpcOpenMemHandle_v2, "cuIpcOpenMemHandle", 11000, 0,
        (CUdeviceptr * out, CUipcMemHandle handle, unsigned flags), (out, handle, flags))
COUNTED(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", 4010, 0, (CUdeviceptr at), (at))
COUNTED(cuIpcGetEventHandle, "cuIpcGetEventHandle", 4010, 0, (CUipcMemHandle * out, CUevent event), (out, event))
COUNTED(cuIpcOpenEventHandle, "cuIpcOpenEventHandle", 4010, 0, (CUevent * out, CUipcMemHandle handle), (out, handle))
COUNTED(cuMemExportToShareableHandle, "cuMemExportToShareableHandle", 10020, 0,
        (void *out, CUmemHandle handle, int type, unsigned long long flags), (out, handle, type, flags))
COUNTED(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", 10020, 0,
        (CUmemHandle * out, void *handle, int type), (out, handle, type))
COUNTED(cuMemGetHandleForAddressRange, "cuMemGetHandleForAddressRange", 11070, 0,
        (void *out, CUdeviceptr at, size_t bytes, int type, unsigned long long flags), (out, at, bytes, type, flags))
COUNTED(cuMemPoolExportToShareableHandle, "cuMemPoolExportToShareableHandle", 11020, 0,
        (void *out, CUmempool pool, int type, unsigned long long flags), (out, pool, type, flags))
COUNTED(cuMulticastCreate, "cuMulticastCreate", 12010, 0, (CUmemHandle * out, const void *prop), (out, prop))
COUNTED(cuImportExternalMemory, "cuImportExternalMemory", 10000, 0, (void **out, const void *description),
        (out, description))
COUNTED(cuDestroyExternalMemory, "cuDestroyExternalMemory", 10000, 0, (void *memory), (memory))
COUNTED(cuImportExternalSemaphore, "cuImportExternalSemaphore", 10000, 0, (void **out, const void *description),
        (out, description))
COUNTED(cuDestroyExternalSemaphore, "cuDestroyExternalSemaphore", 10000, 0, (void *semaphore), (semaphore))
COUNTED(cuGraphicsGLRegisterBuffer, "cuGraphicsGLRegisterBuffer", 3000, 0,
        (void **out, unsigned buffer, unsigned flags), (out, buffer, flags))
COUNTED(cuGraphicsGLRegisterImage, "cuGraphicsGLRegisterImage", 3000, 0,
        (void **out, unsigned image, unsigned target, unsigned flags), (out, image, target, flags))
COUNTED(cuGraphicsEGLRegisterImage, "cuGraphicsEGLRegisterImage", 7000, 0, (void **out, void *image, unsigned flags),
        (out, image, flags))
COUNTED(cuGraphicsUnregisterResource, "cuGraphicsUnregisterResource", 3000, 0, (void *resource), (resource))

#undef HELD
#undef COUNTED
