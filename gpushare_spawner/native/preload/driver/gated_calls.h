/* Every driver call that puts work on a GPU, in words that make both its declaration and its wrapper (gated_calls.c).

   STREAMED(name, asked-for name, CUDA version of this ABI, that of the _ptsz twin, parameters, arguments, stream)
       takes a stream; the twin `name_ptsz` means the thread's own default stream where the stream is 0.
   IMPLICIT(name, asked-for name, version, version of the _ptds twin, parameters, arguments)
       works in the default stream; the twin `name_ptds` in the thread's own.
   SINGLE(name, asked-for name, version, parameters, arguments, stream)
       has no twin.

   32-bit forms from before CUDA 3.2 (cuMemcpyHtoD without _v2 and the like) cannot hold a 64-bit address and are not
   here. */

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
#undef STREAMED
#undef IMPLICIT
#undef SINGLE
