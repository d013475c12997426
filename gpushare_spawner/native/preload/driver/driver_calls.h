/* Every driver call that this library wraps or makes, in the order of struct real_driver. The macros define a call's
   slot, its stub, its declaration and most wrappers. The order is: calls for engine `suspend` only, calls with a
   handwritten wrapper, then calls that put work on a GPU.

   SUSPENDABLE(name, symbol-for name, CUDA version of this ABI, 1 for the _ptsz form, parameters, arguments)
       is wrapped with engine `suspend` only: a suspended process must not make the call and waits before it.
   COUNTED(as SUSPENDABLE)
       is SUSPENDABLE, and the wrapper also records the process's ties to others (ties.h) or its contexts.
   WRAPPED(name, symbol-for name, CUDA version of this ABI, 1 for the _ptsz form, parameters)
       has a handwritten wrapper.
   WATCHED(as SUSPENDABLE)
       has a handwritten wrapper; with engine `suspend` it also waits while the process is suspended.
   CALLED(name, parameters)
       is called but not wrapped.
   STREAMED(name, symbol-for name, CUDA version of this ABI, version of the _ptsz twin, parameters, arguments, stream)
       puts work into a stream; for stream 0, the twin `name_ptsz` uses the per-thread default stream.
   IMPLICIT(name, symbol-for name, version, version of the _ptds twin, parameters, arguments)
       puts work into the default stream; the twin `name_ptds` uses the per-thread default stream.
   SINGLE(name, symbol-for name, version, parameters, arguments, stream)
       puts work into a stream; has no twin.
   The wrappers of the last three are in wrappers/gated_calls.c.

   A file defines the macros that it needs. By default, COUNTED expands to SUSPENDABLE, SUSPENDABLE and WATCHED expand
   to WRAPPED, and the other macros expand to nothing. All macros are undefined at the end. */

#ifndef WRAPPED
#define WRAPPED(name, symbol, version, per_thread, parameters)
#endif
#ifndef SUSPENDABLE
#define SUSPENDABLE(name, symbol, version, per_thread, parameters, arguments)                                          \
    WRAPPED(name, symbol, version, per_thread, parameters)
#endif
#ifndef COUNTED
#define COUNTED(name, symbol, version, per_thread, parameters, arguments)                                              \
    SUSPENDABLE(name, symbol, version, per_thread, parameters, arguments)
#endif
#ifndef WATCHED
#define WATCHED(name, symbol, version, per_thread, parameters, arguments)                                              \
    WRAPPED(name, symbol, version, per_thread, parameters)
#endif
#ifndef CALLED
#define CALLED(name, parameters)
#endif
#ifndef STREAMED
#define STREAMED(name, symbol, version, twin, parameters, arguments, stream)
#endif
#ifndef IMPLICIT
#define IMPLICIT(name, symbol, version, twin, parameters, arguments)
#endif
#ifndef SINGLE
#define SINGLE(name, symbol, version, parameters, arguments, stream)
#endif

/* ---- engine `suspend` only ----

   The driver blocks every call of a locked process that launches work, manages resources or changes the GPU's state,
   and no other process can detect that a thread is blocked. So the library waits before the call and requests the GPU.
   The list contains the calls that a notebook's program may make first after a pause (PyTorch's allocator, streams and
   events; JAX's and Triton's loading of code; garbage collection), and calls that synchronize. Calls that only read the
   host's state (cuCtxGetCurrent, cuCtxGetDevice, cuDeviceGetAttribute, cuGetErrorName, cuDriverGetVersion) are not
   blocked and are not listed. */

/* contexts and devices: the first call of a program in a thread, and waiting for all work */
COUNTED(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000, 0, (CUcontext * out, CUdevice device),
        (out, device))
SUSPENDABLE(cuDevicePrimaryCtxSetFlags, "cuDevicePrimaryCtxSetFlags", 7000, 0, (CUdevice device, unsigned flags),
            (device, flags))
SUSPENDABLE(cuDevicePrimaryCtxSetFlags_v2, "cuDevicePrimaryCtxSetFlags", 11000, 0, (CUdevice device, unsigned flags),
            (device, flags))
SUSPENDABLE(cuCtxSynchronize, "cuCtxSynchronize", 2000, 0, (void), ())
SUSPENDABLE(cuCtxSynchronize_v2, "cuCtxSynchronize", 13000, 0, (CUcontext context), (context))
SUSPENDABLE(cuCtxSetLimit, "cuCtxSetLimit", 3010, 0, (int limit, size_t value), (limit, value))
SUSPENDABLE(cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess", 4000, 0, (CUcontext peer, unsigned flags), (peer, flags))
SUSPENDABLE(cuCtxDisablePeerAccess, "cuCtxDisablePeerAccess", 4000, 0, (CUcontext peer), (peer))

/* streams and events: synchronize, queries, callbacks */
SUSPENDABLE(cuStreamCreate, "cuStreamCreate", 2000, 0, (CUstream * out, unsigned flags), (out, flags))
SUSPENDABLE(cuStreamCreateWithPriority, "cuStreamCreateWithPriority", 5050, 0,
            (CUstream * out, unsigned flags, int priority), (out, flags, priority))
SUSPENDABLE(cuStreamSynchronize, "cuStreamSynchronize", 2000, 0, (CUstream stream), (stream))
SUSPENDABLE(cuStreamSynchronize_ptsz, "cuStreamSynchronize", 7000, 1, (CUstream stream), (stream))
SUSPENDABLE(cuStreamQuery, "cuStreamQuery", 2000, 0, (CUstream stream), (stream))
SUSPENDABLE(cuStreamQuery_ptsz, "cuStreamQuery", 7000, 1, (CUstream stream), (stream))
SUSPENDABLE(cuStreamAddCallback, "cuStreamAddCallback", 5000, 0,
            (CUstream stream, void *callback, void *data, unsigned flags), (stream, callback, data, flags))
SUSPENDABLE(cuStreamAddCallback_ptsz, "cuStreamAddCallback", 7000, 1,
            (CUstream stream, void *callback, void *data, unsigned flags), (stream, callback, data, flags))
SUSPENDABLE(cuLaunchHostFunc, "cuLaunchHostFunc", 10000, 0, (CUstream stream, void *function, void *data),
            (stream, function, data))
SUSPENDABLE(cuLaunchHostFunc_ptsz, "cuLaunchHostFunc", 10000, 1, (CUstream stream, void *function, void *data),
            (stream, function, data))
SUSPENDABLE(cuLaunchHostFunc_v2, "cuLaunchHostFunc", 13010, 0,
            (CUstream stream, void *function, void *data, unsigned mode), (stream, function, data, mode))
SUSPENDABLE(cuLaunchHostFunc_v2_ptsz, "cuLaunchHostFunc", 13010, 1,
            (CUstream stream, void *function, void *data, unsigned mode), (stream, function, data, mode))
SUSPENDABLE(cuStreamAttachMemAsync, "cuStreamAttachMemAsync", 6000, 0,
            (CUstream stream, CUdeviceptr at, size_t bytes, unsigned flags), (stream, at, bytes, flags))
SUSPENDABLE(cuStreamAttachMemAsync_ptsz, "cuStreamAttachMemAsync", 7000, 1,
            (CUstream stream, CUdeviceptr at, size_t bytes, unsigned flags), (stream, at, bytes, flags))
SUSPENDABLE(cuStreamWaitValue32, "cuStreamWaitValue32", 8000, 0,
            (CUstream stream, CUdeviceptr at, uint32_t value, unsigned flags), (stream, at, value, flags))
SUSPENDABLE(cuStreamWaitValue32_ptsz, "cuStreamWaitValue32", 8000, 1,
            (CUstream stream, CUdeviceptr at, uint32_t value, unsigned flags), (stream, at, value, flags))
SUSPENDABLE(cuStreamWaitValue32_v2, "cuStreamWaitValue32", 11070, 0,
            (CUstream stream, CUdeviceptr at, uint32_t value, unsigned flags), (stream, at, value, flags))
SUSPENDABLE(cuStreamWaitValue32_v2_ptsz, "cuStreamWaitValue32", 11070, 1,
            (CUstream stream, CUdeviceptr at, uint32_t value, unsigned flags), (stream, at, value, flags))
SUSPENDABLE(cuStreamWaitValue64, "cuStreamWaitValue64", 9000, 0,
            (CUstream stream, CUdeviceptr at, uint64_t value, unsigned flags), (stream, at, value, flags))
SUSPENDABLE(cuStreamWaitValue64_ptsz, "cuStreamWaitValue64", 9000, 1,
            (CUstream stream, CUdeviceptr at, uint64_t value, unsigned flags), (stream, at, value, flags))
SUSPENDABLE(cuStreamWaitValue64_v2, "cuStreamWaitValue64", 11070, 0,
            (CUstream stream, CUdeviceptr at, uint64_t value, unsigned flags), (stream, at, value, flags))
SUSPENDABLE(cuStreamWaitValue64_v2_ptsz, "cuStreamWaitValue64", 11070, 1,
            (CUstream stream, CUdeviceptr at, uint64_t value, unsigned flags), (stream, at, value, flags))
SUSPENDABLE(cuStreamIsCapturing, "cuStreamIsCapturing", 10000, 0, (CUstream stream, int *status), (stream, status))
SUSPENDABLE(cuStreamIsCapturing_ptsz, "cuStreamIsCapturing", 10000, 1, (CUstream stream, int *status), (stream, status))
SUSPENDABLE(cuStreamGetCaptureInfo, "cuStreamGetCaptureInfo", 10010, 0, (CUstream stream, int *status, uint64_t *id),
            (stream, status, id))
SUSPENDABLE(cuStreamGetCaptureInfo_ptsz, "cuStreamGetCaptureInfo", 10010, 1,
            (CUstream stream, int *status, uint64_t *id), (stream, status, id))
SUSPENDABLE(cuStreamGetCaptureInfo_v2, "cuStreamGetCaptureInfo", 11030, 0,
            (CUstream stream, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **after, size_t *count),
            (stream, status, id, graph, after, count))
SUSPENDABLE(cuStreamGetCaptureInfo_v2_ptsz, "cuStreamGetCaptureInfo", 11030, 1,
            (CUstream stream, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **after, size_t *count),
            (stream, status, id, graph, after, count))
SUSPENDABLE(cuStreamGetCaptureInfo_v3, "cuStreamGetCaptureInfo", 12030, 0,
            (CUstream stream, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **after, const void **edges,
             size_t *count),
            (stream, status, id, graph, after, edges, count))
SUSPENDABLE(cuStreamGetCaptureInfo_v3_ptsz, "cuStreamGetCaptureInfo", 12030, 1,
            (CUstream stream, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **after, const void **edges,
             size_t *count),
            (stream, status, id, graph, after, edges, count))
SUSPENDABLE(cuStreamUpdateCaptureDependencies, "cuStreamUpdateCaptureDependencies", 11030, 0,
            (CUstream stream, CUgraphNode *after, size_t count, unsigned flags), (stream, after, count, flags))
SUSPENDABLE(cuStreamUpdateCaptureDependencies_ptsz, "cuStreamUpdateCaptureDependencies", 11030, 1,
            (CUstream stream, CUgraphNode *after, size_t count, unsigned flags), (stream, after, count, flags))
SUSPENDABLE(cuStreamUpdateCaptureDependencies_v2, "cuStreamUpdateCaptureDependencies", 12030, 0,
            (CUstream stream, CUgraphNode *after, const void *edges, size_t count, unsigned flags),
            (stream, after, edges, count, flags))
SUSPENDABLE(cuStreamUpdateCaptureDependencies_v2_ptsz, "cuStreamUpdateCaptureDependencies", 12030, 1,
            (CUstream stream, CUgraphNode *after, const void *edges, size_t count, unsigned flags),
            (stream, after, edges, count, flags))
SUSPENDABLE(cuEventCreate, "cuEventCreate", 2000, 0, (CUevent * out, unsigned flags), (out, flags))
SUSPENDABLE(cuEventRecord, "cuEventRecord", 2000, 0, (CUevent event, CUstream stream), (event, stream))
SUSPENDABLE(cuEventRecord_ptsz, "cuEventRecord", 7000, 1, (CUevent event, CUstream stream), (event, stream))
SUSPENDABLE(cuEventRecordWithFlags, "cuEventRecordWithFlags", 11010, 0,
            (CUevent event, CUstream stream, unsigned flags), (event, stream, flags))
SUSPENDABLE(cuEventRecordWithFlags_ptsz, "cuEventRecordWithFlags", 11010, 1,
            (CUevent event, CUstream stream, unsigned flags), (event, stream, flags))
SUSPENDABLE(cuEventQuery, "cuEventQuery", 2000, 0, (CUevent event), (event))
SUSPENDABLE(cuEventSynchronize, "cuEventSynchronize", 2000, 0, (CUevent event), (event))
SUSPENDABLE(cuEventElapsedTime, "cuEventElapsedTime", 2000, 0, (float *milliseconds, CUevent begin, CUevent end),
            (milliseconds, begin, end))
SUSPENDABLE(cuEventElapsedTime_v2, "cuEventElapsedTime", 12080, 0, (float *milliseconds, CUevent begin, CUevent end),
            (milliseconds, begin, end))
COUNTED(cuEventDestroy, "cuEventDestroy", 2000, 0, (CUevent event), (event))
COUNTED(cuEventDestroy_v2, "cuEventDestroy", 4000, 0, (CUevent event), (event))

/* code: a framework loads a kernel's module at its first use */
SUSPENDABLE(cuModuleLoad, "cuModuleLoad", 2000, 0, (void **out, const char *path), (out, path))
SUSPENDABLE(cuModuleLoadData, "cuModuleLoadData", 2000, 0, (void **out, const void *image), (out, image))
SUSPENDABLE(cuModuleLoadDataEx, "cuModuleLoadDataEx", 2010, 0,
            (void **out, const void *image, unsigned count, int *options, void **values),
            (out, image, count, options, values))
SUSPENDABLE(cuModuleLoadFatBinary, "cuModuleLoadFatBinary", 2000, 0, (void **out, const void *image), (out, image))
COUNTED(cuModuleUnload, "cuModuleUnload", 2000, 0, (void *module), (module))
SUSPENDABLE(cuModuleGetFunction, "cuModuleGetFunction", 2000, 0, (CUfunction * out, void *module, const char *name),
            (out, module, name))
COUNTED(cuModuleGetGlobal_v2, "cuModuleGetGlobal", 3020, 0,
        (CUdeviceptr * out, size_t *bytes, void *module, const char *name), (out, bytes, module, name))
SUSPENDABLE(cuLibraryLoadData, "cuLibraryLoadData", 12000, 0,
            (void **out, const void *image, int *options, void **values, unsigned count, int *library_options,
             void **library_values, unsigned library_count),
            (out, image, options, values, count, library_options, library_values, library_count))
SUSPENDABLE(cuLibraryLoadFromFile, "cuLibraryLoadFromFile", 12000, 0,
            (void **out, const char *path, int *options, void **values, unsigned count, int *library_options,
             void **library_values, unsigned library_count),
            (out, path, options, values, count, library_options, library_values, library_count))
COUNTED(cuLibraryUnload, "cuLibraryUnload", 12000, 0, (void *library), (library))
SUSPENDABLE(cuLibraryGetKernel, "cuLibraryGetKernel", 12000, 0, (void **out, void *library, const char *name),
            (out, library, name))
SUSPENDABLE(cuLibraryGetModule, "cuLibraryGetModule", 12000, 0, (void **out, void *library), (out, library))
COUNTED(cuLibraryGetGlobal, "cuLibraryGetGlobal", 12000, 0,
        (CUdeviceptr * out, size_t *bytes, void *library, const char *name), (out, bytes, library, name))
COUNTED(cuLibraryGetManaged, "cuLibraryGetManaged", 12000, 0,
        (CUdeviceptr * out, size_t *bytes, void *library, const char *name), (out, bytes, library, name))
SUSPENDABLE(cuKernelGetFunction, "cuKernelGetFunction", 12000, 0, (CUfunction * out, void *kernel), (out, kernel))
SUSPENDABLE(cuKernelGetAttribute, "cuKernelGetAttribute", 12000, 0,
            (int *value, int attribute, void *kernel, CUdevice device), (value, attribute, kernel, device))
SUSPENDABLE(cuKernelSetAttribute, "cuKernelSetAttribute", 12000, 0,
            (int attribute, int value, void *kernel, CUdevice device), (attribute, value, kernel, device))
SUSPENDABLE(cuFuncGetAttribute, "cuFuncGetAttribute", 2020, 0, (int *value, int attribute, CUfunction function),
            (value, attribute, function))
SUSPENDABLE(cuFuncSetAttribute, "cuFuncSetAttribute", 9000, 0, (CUfunction function, int attribute, int value),
            (function, attribute, value))
SUSPENDABLE(cuFuncSetCacheConfig, "cuFuncSetCacheConfig", 3000, 0, (CUfunction function, int config),
            (function, config))
SUSPENDABLE(cuFuncLoad, "cuFuncLoad", 12040, 0, (CUfunction function), (function))
SUSPENDABLE(cuOccupancyMaxActiveBlocksPerMultiprocessor, "cuOccupancyMaxActiveBlocksPerMultiprocessor", 6050, 0,
            (int *blocks, CUfunction function, int block_size, size_t shared), (blocks, function, block_size, shared))
SUSPENDABLE(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
            "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", 7000, 0,
            (int *blocks, CUfunction function, int block_size, size_t shared, unsigned flags),
            (blocks, function, block_size, shared, flags))

/* memory: page-locked host memory, addresses, pools */
SUSPENDABLE(cuMemHostAlloc, "cuMemHostAlloc", 2020, 0, (void **out, size_t bytes, unsigned flags), (out, bytes, flags))
SUSPENDABLE(cuMemAllocHost_v2, "cuMemAllocHost", 3020, 0, (void **out, size_t bytes), (out, bytes))
SUSPENDABLE(cuMemFreeHost, "cuMemFreeHost", 2000, 0, (void *at), (at))
SUSPENDABLE(cuMemHostRegister_v2, "cuMemHostRegister", 6050, 0, (void *at, size_t bytes, unsigned flags),
            (at, bytes, flags))
SUSPENDABLE(cuMemHostUnregister, "cuMemHostUnregister", 4000, 0, (void *at), (at))
SUSPENDABLE(cuMemHostGetDevicePointer_v2, "cuMemHostGetDevicePointer", 3020, 0,
            (CUdeviceptr * out, void *at, unsigned flags), (out, at, flags))
SUSPENDABLE(cuMemAddressReserve, "cuMemAddressReserve", 10020, 0,
            (CUdeviceptr * out, size_t bytes, size_t alignment, CUdeviceptr address, unsigned long long flags),
            (out, bytes, alignment, address, flags))
SUSPENDABLE(cuMemAddressFree, "cuMemAddressFree", 10020, 0, (CUdeviceptr at, size_t bytes), (at, bytes))
SUSPENDABLE(cuMemSetAccess, "cuMemSetAccess", 10020, 0,
            (CUdeviceptr at, size_t bytes, const void *access, size_t count), (at, bytes, access, count))
SUSPENDABLE(cuMemAdvise, "cuMemAdvise", 8000, 0, (CUdeviceptr at, size_t bytes, int advice, CUdevice device),
            (at, bytes, advice, device))
SUSPENDABLE(cuMemAdvise_v2, "cuMemAdvise", 12020, 0, (CUdeviceptr at, size_t bytes, int advice, CUmemLocation location),
            (at, bytes, advice, location))
SUSPENDABLE(cuMemRangeGetAttribute, "cuMemRangeGetAttribute", 8000, 0,
            (void *data, size_t size, int attribute, CUdeviceptr at, size_t bytes), (data, size, attribute, at, bytes))
SUSPENDABLE(cuDeviceGetDefaultMemPool, "cuDeviceGetDefaultMemPool", 11020, 0, (CUmempool * out, CUdevice device),
            (out, device))
SUSPENDABLE(cuDeviceGetMemPool, "cuDeviceGetMemPool", 11020, 0, (CUmempool * out, CUdevice device), (out, device))
SUSPENDABLE(cuDeviceSetMemPool, "cuDeviceSetMemPool", 11020, 0, (CUdevice device, CUmempool pool), (device, pool))
SUSPENDABLE(cuMemPoolTrimTo, "cuMemPoolTrimTo", 11020, 0, (CUmempool pool, size_t keep), (pool, keep))
SUSPENDABLE(cuMemPoolSetAttribute, "cuMemPoolSetAttribute", 11020, 0, (CUmempool pool, int attribute, void *value),
            (pool, attribute, value))
SUSPENDABLE(cuMemPoolGetAttribute, "cuMemPoolGetAttribute", 11020, 0, (CUmempool pool, int attribute, void *value),
            (pool, attribute, value))
SUSPENDABLE(cuMemPoolSetAccess, "cuMemPoolSetAccess", 11020, 0, (CUmempool pool, const void *access, size_t count),
            (pool, access, count))
SUSPENDABLE(cuDeviceGraphMemTrim, "cuDeviceGraphMemTrim", 11040, 0, (CUdevice device), (device))
SUSPENDABLE(cuTexObjectCreate, "cuTexObjectCreate", 5000, 0,
            (unsigned long long *out, const void *resource, const void *texture, const void *view),
            (out, resource, texture, view))
SUSPENDABLE(cuTexObjectDestroy, "cuTexObjectDestroy", 5000, 0, (unsigned long long object), (object))
SUSPENDABLE(cuSurfObjectCreate, "cuSurfObjectCreate", 5000, 0, (unsigned long long *out, const void *resource),
            (out, resource))
SUSPENDABLE(cuSurfObjectDestroy, "cuSurfObjectDestroy", 5000, 0, (unsigned long long object), (object))

/* graphs */
SUSPENDABLE(cuGraphCreate, "cuGraphCreate", 10000, 0, (CUgraph * out, unsigned flags), (out, flags))
SUSPENDABLE(cuGraphDestroy, "cuGraphDestroy", 10000, 0, (CUgraph graph), (graph))
SUSPENDABLE(cuGraphInstantiate, "cuGraphInstantiate", 10000, 0,
            (CUgraphExec * out, CUgraph graph, CUgraphNode *error, char *log, size_t size),
            (out, graph, error, log, size))
SUSPENDABLE(cuGraphInstantiate_v2, "cuGraphInstantiate", 11000, 0,
            (CUgraphExec * out, CUgraph graph, CUgraphNode *error, char *log, size_t size),
            (out, graph, error, log, size))
SUSPENDABLE(cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags", 11040, 0,
            (CUgraphExec * out, CUgraph graph, unsigned long long flags), (out, graph, flags))
SUSPENDABLE(cuGraphInstantiateWithParams, "cuGraphInstantiateWithParams", 12000, 0,
            (CUgraphExec * out, CUgraph graph, void *params), (out, graph, params))
SUSPENDABLE(cuGraphInstantiateWithParams_ptsz, "cuGraphInstantiateWithParams", 12000, 1,
            (CUgraphExec * out, CUgraph graph, void *params), (out, graph, params))
SUSPENDABLE(cuGraphExecUpdate, "cuGraphExecUpdate", 10020, 0,
            (CUgraphExec exec, CUgraph graph, CUgraphNode *error, int *outcome), (exec, graph, error, outcome))
SUSPENDABLE(cuGraphExecUpdate_v2, "cuGraphExecUpdate", 12000, 0, (CUgraphExec exec, CUgraph graph, void *outcome),
            (exec, graph, outcome))
SUSPENDABLE(cuGraphExecKernelNodeSetParams, "cuGraphExecKernelNodeSetParams", 10010, 0,
            (CUgraphExec exec, CUgraphNode node, const void *params), (exec, node, params))
SUSPENDABLE(cuGraphExecKernelNodeSetParams_v2, "cuGraphExecKernelNodeSetParams", 12000, 0,
            (CUgraphExec exec, CUgraphNode node, const void *params), (exec, node, params))
SUSPENDABLE(cuGraphExecDestroy, "cuGraphExecDestroy", 10000, 0, (CUgraphExec exec), (exec))

/* the process's ties to others, none of which survives a checkpoint */
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

/* ---- with handwritten wrappers, or only called ---- */

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

/* handle_calls.c, array_calls.c */
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

/* ---- calls that put work on a GPU ----

   The 32-bit forms from before CUDA 3.2 (such as cuMemcpyHtoD without _v2) cannot hold a 64-bit address and are not
   listed. */

#define GRID unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared

STREAMED(cuLaunchKernel, "cuLaunchKernel", 4000, 7000, (CUfunction f, GRID, CUstream s, void **params, void **extra),
         (f, gx, gy, gz, bx, by, bz, shared, s, params, extra), s)
STREAMED(cuLaunchKernelEx, "cuLaunchKernelEx", 11060, 11060,
         (const CUlaunchConfig *config, CUfunction f, void **params, void **extra), (config, f, params, extra),
         config ? config->hStream : NULL)
STREAMED(cuLaunchCooperativeKernel, "cuLaunchCooperativeKernel", 9000, 9000,
         (CUfunction f, GRID, CUstream s, void **params), (f, gx, gy, gz, bx, by, bz, shared, s, params), s)
SINGLE(cuLaunchCooperativeKernelMultiDevice, "cuLaunchCooperativeKernelMultiDevice", 9000,
       (CUlaunchParams * list, unsigned devices, unsigned flags), (list, devices, flags),
       list &&devices ? list->hStream : NULL)
SINGLE(cuLaunch, "cuLaunch", 2000, (CUfunction f), (f), NULL)
SINGLE(cuLaunchGrid, "cuLaunchGrid", 2000, (CUfunction f, int w, int h), (f, w, h), NULL)
SINGLE(cuLaunchGridAsync, "cuLaunchGridAsync", 2000, (CUfunction f, int w, int h, CUstream s), (f, w, h, s), s)
STREAMED(cuGraphLaunch, "cuGraphLaunch", 10000, 10000, (CUgraphExec exec, CUstream s), (exec, s), s)
STREAMED(cuGraphUpload, "cuGraphUpload", 11010, 11010, (CUgraphExec exec, CUstream s), (exec, s), s)

IMPLICIT(cuMemcpy, "cuMemcpy", 4000, 7000, (CUdeviceptr to, CUdeviceptr from, size_t bytes), (to, from, bytes))
IMPLICIT(cuMemcpyPeer, "cuMemcpyPeer", 4000, 7000,
         (CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t bytes),
         (to, there, from, here, bytes))
IMPLICIT(cuMemcpyHtoD_v2, "cuMemcpyHtoD", 3020, 7000, (CUdeviceptr to, const void *from, size_t bytes),
         (to, from, bytes))
IMPLICIT(cuMemcpyDtoH_v2, "cuMemcpyDtoH", 3020, 7000, (void *to, CUdeviceptr from, size_t bytes), (to, from, bytes))
IMPLICIT(cuMemcpyDtoD_v2, "cuMemcpyDtoD", 3020, 7000, (CUdeviceptr to, CUdeviceptr from, size_t bytes),
         (to, from, bytes))
IMPLICIT(cuMemcpyDtoA_v2, "cuMemcpyDtoA", 3020, 7000, (CUarray to, size_t at, CUdeviceptr from, size_t bytes),
         (to, at, from, bytes))
IMPLICIT(cuMemcpyAtoD_v2, "cuMemcpyAtoD", 3020, 7000, (CUdeviceptr to, CUarray from, size_t at, size_t bytes),
         (to, from, at, bytes))
IMPLICIT(cuMemcpyHtoA_v2, "cuMemcpyHtoA", 3020, 7000, (CUarray to, size_t at, const void *from, size_t bytes),
         (to, at, from, bytes))
IMPLICIT(cuMemcpyAtoH_v2, "cuMemcpyAtoH", 3020, 7000, (void *to, CUarray from, size_t at, size_t bytes),
         (to, from, at, bytes))
IMPLICIT(cuMemcpyAtoA_v2, "cuMemcpyAtoA", 3020, 7000,
         (CUarray to, size_t at, CUarray from, size_t from_at, size_t bytes), (to, at, from, from_at, bytes))
IMPLICIT(cuMemcpy2D_v2, "cuMemcpy2D", 3020, 7000, (const void *copy), (copy))
IMPLICIT(cuMemcpy2DUnaligned_v2, "cuMemcpy2DUnaligned", 3020, 7000, (const void *copy), (copy))
IMPLICIT(cuMemcpy3D_v2, "cuMemcpy3D", 3020, 7000, (const void *copy), (copy))
IMPLICIT(cuMemcpy3DPeer, "cuMemcpy3DPeer", 4000, 7000, (const void *copy), (copy))

STREAMED(cuMemcpyAsync, "cuMemcpyAsync", 4000, 7000, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream s),
         (to, from, bytes, s), s)
STREAMED(cuMemcpyPeerAsync, "cuMemcpyPeerAsync", 4000, 7000,
         (CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t bytes, CUstream s),
         (to, there, from, here, bytes, s), s)
STREAMED(cuMemcpyHtoDAsync_v2, "cuMemcpyHtoDAsync", 3020, 7000,
         (CUdeviceptr to, const void *from, size_t bytes, CUstream s), (to, from, bytes, s), s)
STREAMED(cuMemcpyDtoHAsync_v2, "cuMemcpyDtoHAsync", 3020, 7000, (void *to, CUdeviceptr from, size_t bytes, CUstream s),
         (to, from, bytes, s), s)
STREAMED(cuMemcpyDtoDAsync_v2, "cuMemcpyDtoDAsync", 3020, 7000,
         (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream s), (to, from, bytes, s), s)
STREAMED(cuMemcpyHtoAAsync_v2, "cuMemcpyHtoAAsync", 3020, 7000,
         (CUarray to, size_t at, const void *from, size_t bytes, CUstream s), (to, at, from, bytes, s), s)
STREAMED(cuMemcpyAtoHAsync_v2, "cuMemcpyAtoHAsync", 3020, 7000,
         (void *to, CUarray from, size_t at, size_t bytes, CUstream s), (to, from, at, bytes, s), s)
STREAMED(cuMemcpy2DAsync_v2, "cuMemcpy2DAsync", 3020, 7000, (const void *copy, CUstream s), (copy, s), s)
STREAMED(cuMemcpy3DAsync_v2, "cuMemcpy3DAsync", 3020, 7000, (const void *copy, CUstream s), (copy, s), s)
STREAMED(cuMemcpy3DPeerAsync, "cuMemcpy3DPeerAsync", 4000, 7000, (const void *copy, CUstream s), (copy, s), s)
STREAMED(cuMemcpyBatchAsync, "cuMemcpyBatchAsync", 12080, 12080,
         (CUdeviceptr * to, CUdeviceptr *from, size_t *sizes, size_t count, void *attributes, size_t *indices, size_t n,
          size_t *failed, CUstream s),
         (to, from, sizes, count, attributes, indices, n, failed, s), s)
STREAMED(cuMemcpyBatchAsync_v2, "cuMemcpyBatchAsync", 13000, 13000,
         (CUdeviceptr * to, CUdeviceptr *from, size_t *sizes, size_t count, void *attributes, size_t *indices, size_t n,
          CUstream s),
         (to, from, sizes, count, attributes, indices, n, s), s)
STREAMED(cuMemcpy3DBatchAsync, "cuMemcpy3DBatchAsync", 12080, 12080,
         (size_t count, void *list, size_t *failed, unsigned long long flags, CUstream s),
         (count, list, failed, flags, s), s)
STREAMED(cuMemcpy3DBatchAsync_v2, "cuMemcpy3DBatchAsync", 13000, 13000,
         (size_t count, void *list, unsigned long long flags, CUstream s), (count, list, flags, s), s)
STREAMED(cuMemBatchDecompressAsync, "cuMemBatchDecompressAsync", 12060, 12060,
         (void *list, size_t count, unsigned flags, size_t *failed, CUstream s), (list, count, flags, failed, s), s)

IMPLICIT(cuMemsetD8_v2, "cuMemsetD8", 3020, 7000, (CUdeviceptr to, unsigned char value, size_t n), (to, value, n))
IMPLICIT(cuMemsetD16_v2, "cuMemsetD16", 3020, 7000, (CUdeviceptr to, unsigned short value, size_t n), (to, value, n))
IMPLICIT(cuMemsetD32_v2, "cuMemsetD32", 3020, 7000, (CUdeviceptr to, unsigned value, size_t n), (to, value, n))
IMPLICIT(cuMemsetD2D8_v2, "cuMemsetD2D8", 3020, 7000,
         (CUdeviceptr to, size_t pitch, unsigned char value, size_t w, size_t h), (to, pitch, value, w, h))
IMPLICIT(cuMemsetD2D16_v2, "cuMemsetD2D16", 3020, 7000,
         (CUdeviceptr to, size_t pitch, unsigned short value, size_t w, size_t h), (to, pitch, value, w, h))
IMPLICIT(cuMemsetD2D32_v2, "cuMemsetD2D32", 3020, 7000,
         (CUdeviceptr to, size_t pitch, unsigned value, size_t w, size_t h), (to, pitch, value, w, h))
STREAMED(cuMemsetD8Async, "cuMemsetD8Async", 3020, 7000, (CUdeviceptr to, unsigned char value, size_t n, CUstream s),
         (to, value, n, s), s)
STREAMED(cuMemsetD16Async, "cuMemsetD16Async", 3020, 7000, (CUdeviceptr to, unsigned short value, size_t n, CUstream s),
         (to, value, n, s), s)
STREAMED(cuMemsetD32Async, "cuMemsetD32Async", 3020, 7000, (CUdeviceptr to, unsigned value, size_t n, CUstream s),
         (to, value, n, s), s)
STREAMED(cuMemsetD2D8Async, "cuMemsetD2D8Async", 3020, 7000,
         (CUdeviceptr to, size_t pitch, unsigned char value, size_t w, size_t h, CUstream s),
         (to, pitch, value, w, h, s), s)
STREAMED(cuMemsetD2D16Async, "cuMemsetD2D16Async", 3020, 7000,
         (CUdeviceptr to, size_t pitch, unsigned short value, size_t w, size_t h, CUstream s),
         (to, pitch, value, w, h, s), s)
STREAMED(cuMemsetD2D32Async, "cuMemsetD2D32Async", 3020, 7000,
         (CUdeviceptr to, size_t pitch, unsigned value, size_t w, size_t h, CUstream s), (to, pitch, value, w, h, s), s)

STREAMED(cuMemPrefetchAsync, "cuMemPrefetchAsync", 8000, 8000,
         (CUdeviceptr at, size_t bytes, CUdevice device, CUstream s), (at, bytes, device, s), s)
STREAMED(cuMemPrefetchAsync_v2, "cuMemPrefetchAsync", 12020, 12020,
         (CUdeviceptr at, size_t bytes, CUmemLocation location, unsigned flags, CUstream s),
         (at, bytes, location, flags, s), s)
STREAMED(cuMemPrefetchBatchAsync, "cuMemPrefetchBatchAsync", 13000, 13000,
         (CUdeviceptr * at, size_t *sizes, size_t count, CUmemLocation *locations, size_t *indices, size_t n,
          unsigned long long flags, CUstream s),
         (at, sizes, count, locations, indices, n, flags, s), s)
STREAMED(cuMemDiscardBatchAsync, "cuMemDiscardBatchAsync", 13000, 13000,
         (CUdeviceptr * at, size_t *sizes, size_t count, unsigned long long flags, CUstream s),
         (at, sizes, count, flags, s), s)
STREAMED(cuMemDiscardAndPrefetchBatchAsync, "cuMemDiscardAndPrefetchBatchAsync", 13000, 13000,
         (CUdeviceptr * at, size_t *sizes, size_t count, CUmemLocation *locations, size_t *indices, size_t n,
          unsigned long long flags, CUstream s),
         (at, sizes, count, locations, indices, n, flags, s), s)
STREAMED(cuMemcpyWithAttributesAsync, "cuMemcpyWithAttributesAsync", 13020, 13020,
         (CUdeviceptr to, CUdeviceptr from, size_t bytes, void *attributes, CUstream s),
         (to, from, bytes, attributes, s), s)
STREAMED(cuMemcpy3DWithAttributesAsync, "cuMemcpy3DWithAttributesAsync", 13020, 13020,
         (void *copy, unsigned long long flags, CUstream s), (copy, flags, s), s)
STREAMED(cuFabricCpyBatchAsync, "cuFabricCpyBatchAsync", 13050, 13050,
         (size_t count, void *copies, unsigned long long flags, CUstream s), (count, copies, flags, s), s)
STREAMED(cuMemMapArrayAsync, "cuMemMapArrayAsync", 11010, 11010, (void *list, unsigned count, CUstream s),
         (list, count, s), s)

STREAMED(cuStreamBatchMemOp, "cuStreamBatchMemOp", 8000, 8000, (CUstream s, unsigned count, void *list, unsigned flags),
         (s, count, list, flags), s)
STREAMED(cuStreamBatchMemOp_v2, "cuStreamBatchMemOp", 11070, 11070,
         (CUstream s, unsigned count, void *list, unsigned flags), (s, count, list, flags), s)
STREAMED(cuStreamWriteValue32, "cuStreamWriteValue32", 8000, 8000,
         (CUstream s, CUdeviceptr at, uint32_t value, unsigned flags), (s, at, value, flags), s)
STREAMED(cuStreamWriteValue32_v2, "cuStreamWriteValue32", 11070, 11070,
         (CUstream s, CUdeviceptr at, uint32_t value, unsigned flags), (s, at, value, flags), s)
STREAMED(cuStreamWriteValue64, "cuStreamWriteValue64", 9000, 9000,
         (CUstream s, CUdeviceptr at, uint64_t value, unsigned flags), (s, at, value, flags), s)
STREAMED(cuStreamWriteValue64_v2, "cuStreamWriteValue64", 11070, 11070,
         (CUstream s, CUdeviceptr at, uint64_t value, unsigned flags), (s, at, value, flags), s)
#undef GRID

#undef SUSPENDABLE
#undef COUNTED
#undef WRAPPED
#undef WATCHED
#undef CALLED
#undef STREAMED
#undef IMPLICIT
#undef SINGLE
