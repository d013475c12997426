"""The CUDA driver by ctypes, as small test programs want it; and the lines that they exchange with their test.

ctypes finds each function by dlsym, as a program does that loads the driver itself.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import sys
from typing import Any

import gpushare_simgpu

PTX = gpushare_simgpu.KERNELS
MIB = 1 << 20
IS_MANAGED, MEMORY_TYPE, RANGE_SIZE = 8, 2, 12


def say(value: Any) -> None:
    """A line to the test."""
    print(json.dumps(value), flush=True)


def hear() -> Any:
    """A line from the test; the program ends with the test."""
    line = sys.stdin.readline()
    if not line:
        os._exit(3)
    return json.loads(line)


class CudaError(Exception):
    """A driver call failed."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}: {code}")
        self.code = code


class Driver:
    """One GPU's primary context, current to the thread that made it."""

    def __init__(self, device: int = 0, enter: bool = True) -> None:
        self.library = c.CDLL("libcuda.so.1")
        self.device = device
        self("cuInit", c.c_uint(0))
        if enter:
            self.enter()

    def result(self, name: str, *arguments: Any) -> int:
        return int(getattr(self.library, name)(*arguments))

    def __call__(self, name: str, *arguments: Any) -> None:
        code = self.result(name, *arguments)
        if code:
            raise CudaError(name, code)

    def enter(self) -> None:
        self.context = c.c_void_p()
        self("cuDevicePrimaryCtxRetain", c.byref(self.context), c.c_int(self.device))
        self("cuCtxSetCurrent", self.context)

    def load(self) -> None:
        module = c.c_void_p()
        self("cuModuleLoadData", c.byref(module), c.c_char_p(PTX.read_bytes()))
        self.module = module

    def kernel(self, name: str) -> c.c_void_p:
        if not hasattr(self, "module"):
            self.load()
        function = c.c_void_p()
        self("cuModuleGetFunction", c.byref(function), self.module, c.c_char_p(name.encode()))
        return function

    def launch(self, function: c.c_void_p, *arguments: Any, stream: Any = None, suffix: str = "") -> None:
        pointers = (c.c_void_p * len(arguments))(*(c.cast(c.pointer(a), c.c_void_p) for a in arguments))
        one = c.c_uint(1)
        self("cuLaunchKernel" + suffix, function, one, one, one, one, one, one, c.c_uint(0), stream, pointers, None)

    def spin(self, seconds: float, stream: Any = None) -> None:
        self.launch(self.kernel("spin"), c.c_uint64(int(seconds * 1e9)), stream=stream)

    def fill(self, at: int, count: int, value: int, stream: Any = None) -> None:
        self.launch(self.kernel("fill_u32"), c.c_uint64(at), c.c_uint64(count), c.c_uint32(value), stream=stream)

    def alloc(self, size: int) -> int:
        at = c.c_uint64()
        self("cuMemAlloc_v2", c.byref(at), c.c_size_t(size))
        return at.value

    def alloc_async(self, size: int, stream: Any = None) -> int:
        at = c.c_uint64()
        self("cuMemAllocAsync", c.byref(at), c.c_size_t(size), stream)
        return at.value

    def free(self, at: int) -> None:
        self("cuMemFree_v2", c.c_uint64(at))

    def free_async(self, at: int, stream: Any = None) -> None:
        self("cuMemFreeAsync", c.c_uint64(at), stream)

    def write(self, at: int, data: bytes) -> None:
        self("cuMemcpyHtoD_v2", c.c_uint64(at), c.c_char_p(data), c.c_size_t(len(data)))

    def read(self, at: int, size: int) -> bytes:
        data = c.create_string_buffer(size)
        self("cuMemcpyDtoH_v2", data, c.c_uint64(at), c.c_size_t(size))
        return data.raw

    def stream(self, flags: int = 1) -> c.c_void_p:
        stream = c.c_void_p()
        self("cuStreamCreate", c.byref(stream), c.c_uint(flags))
        return stream

    def synchronize(self) -> None:
        self("cuCtxSynchronize")

    def memory(self) -> tuple[int, int]:
        available, total = c.c_size_t(), c.c_size_t()
        self("cuMemGetInfo_v2", c.byref(available), c.byref(total))
        return available.value, total.value

    def total(self) -> int:
        total = c.c_size_t()
        self("cuDeviceTotalMem_v2", c.byref(total), c.c_int(self.device))
        return total.value

    def attribute(self, attribute: int, at: int) -> int:
        value = c.c_uint64(0)
        self("cuPointerGetAttribute", c.byref(value), c.c_int(attribute), c.c_uint64(at))
        return value.value

    def uuid(self) -> bytes:
        raw = c.create_string_buffer(16)
        self("cuDeviceGetUuid", raw, c.c_int(self.device))
        return raw.raw
