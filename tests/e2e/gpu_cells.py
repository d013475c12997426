"""Cells that use the GPU through NVIDIA's own Python bindings; they print what the tests look at."""

from __future__ import annotations

SETUP = """
import hashlib, os, time
import numpy as np
from cuda.bindings import driver as cuda
import gpushare_simgpu

def check(result):
    error, *values = result
    if error != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(str(error))
    return values[0] if len(values) == 1 else values

check(cuda.cuInit(0))
device = check(cuda.cuDeviceGet(0))
check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(device))))
ptx = gpushare_simgpu.KERNELS.read_bytes() + b"\\0"
module = check(cuda.cuModuleLoadData(ptx))

def launch(name, *arguments):
    values, types = zip(*arguments)
    function = check(cuda.cuModuleGetFunction(module, name))
    check(cuda.cuLaunchKernel(function, 256, 1, 1, 256, 1, 1, 0, 0, (values, types), 0))

def spin(seconds):
    import ctypes
    launch(b"spin", (int(seconds * 1e9), ctypes.c_uint64))
    check(cuda.cuCtxSynchronize())

def add(pointer, count, value):
    import ctypes
    arguments = [(int(pointer), ctypes.c_uint64), (count, ctypes.c_uint64), (value, ctypes.c_uint32)]
    launch(b"add_u32", *arguments)
    check(cuda.cuCtxSynchronize())

print(os.getpid())
"""

WRITE_BUFFER = """
count = {mebibytes} * 2**20 // 4
rng = np.random.default_rng({seed})
expected = rng.integers(0, 2**32, count, dtype=np.uint32)
buffer = check(cuda.cuMemAlloc(count * 4))
check(cuda.cuMemcpyHtoD(buffer, expected.ctypes.data, count * 4))
add(buffer, count, 7)
expected = expected + np.uint32(7)
print("written")
"""
"""Random bytes go to the GPU, where a kernel changes every one of their words; `expected` is what must be there now."""

READ_BUFFER = """
seen = np.empty(count, dtype=np.uint32)
check(cuda.cuMemcpyDtoH(seen.ctypes.data, buffer, count * 4))
print("intact" if np.array_equal(seen, expected) else f"{np.count_nonzero(seen != expected)} of {count} words differ")
"""

WORK_ON_BUFFER = """
add(buffer, count, 1)
expected = expected + np.uint32(1)
print("worked")
"""
