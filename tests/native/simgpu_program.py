"""What the programs of the simulator's tests begin with: NVIDIA's own bindings, and a few lines around them."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import gpushare_simgpu

# The bindings look for libcuda.so.1 by cuda.pathfinder, whose import takes two thirds of theirs. Hundreds of programs
# begin so. The loader alone finds the library in LD_LIBRARY_PATH too.
_pathfinder: Any = ModuleType("cuda.pathfinder")
_pathfinder.load_nvidia_dynamic_lib = lambda name: SimpleNamespace(_handle_uint=ctypes.CDLL(f"lib{name}.so.1")._handle)
sys.modules.setdefault("cuda.pathfinder", _pathfinder)

from cuda.bindings import driver as cu  # noqa: E402

if sys.modules["cuda.pathfinder"] is _pathfinder:
    del sys.modules["cuda.pathfinder"]

__all__ = [
    "PTX",
    "Machine",
    "Stats",
    "check",
    "code",
    "ctypes",
    "cu",
    "host",
    "listen",
    "np",
    "os",
    "place",
    "say",
    "stats",
    "sys",
    "time",
]


class _Numpy:
    """numpy, imported at its first use: half of the programs need none, and its import takes longer than they do."""

    def __getattr__(self, name: str) -> Any:
        import numpy

        return getattr(numpy, name)


np: Any = _Numpy()
PTX = gpushare_simgpu.KERNELS
ARGUMENTS = {
    "fill_u32": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32),
    "add_u32": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32),
    "saxpy_f32": (ctypes.c_uint64, ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p),
    "checksum_u32": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p),
    "spin": (ctypes.c_uint64,),
    "touch": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64),
}


def check(result: tuple[Any, ...]) -> Any:
    """The values of a call that has to succeed."""
    if result[0] != cu.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{result[0]!r}")
    return result[1] if len(result) == 2 else result[1:]


def code(result: tuple[Any, ...]) -> str:
    """The name of a call's error code."""
    return str(result[0].name)


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def listen() -> Any:
    return json.loads(sys.stdin.readline())


def place(kind: str, number: int = 0) -> Any:
    """A location as CUDA 12 and later name it: ("device", 0) or ("host", 0)."""
    location = cu.CUmemLocation()
    location.type = getattr(cu.CUmemLocationType, f"CU_MEM_LOCATION_TYPE_{kind.upper()}")
    location.id = number
    return location


def host(address: Any, count: int, kind: Any = "u4") -> Any:
    """Managed or pinned memory as the host sees it."""
    size = count * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(int(address)), dtype=kind)


class Stats(ctypes.Structure):
    """simgpu_stats, as the README of gpushare-simgpu has it."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "kernels", "busy_ns", "fault_ns", "faulted_in", "first_touched", "fault_evicted", "prefetched_in",
            "prefetched_out", "prefetch_evicted", "plain_evicted", "copied_in", "copied_out", "remote", "memory",
            "memory_free", "memory_managed", "checkpointed", "restored",
        )
    ]  # fmt: skip


def stats(gpu: int = 0) -> dict[str, int]:
    found = Stats()
    assert ctypes.CDLL("libcuda.so.1").simgpu_stats(gpu, ctypes.byref(found), ctypes.sizeof(found)) == 0
    return {name: getattr(found, name) for name, *_ in Stats._fields_}


class Machine:
    """One device's primary context, current in this thread, with the kernels loaded."""

    def __init__(self, device: int = 0) -> None:
        check(cu.cuInit(0))
        self.device = check(cu.cuDeviceGet(device))
        self.context = check(cu.cuDevicePrimaryCtxRetain(self.device))
        check(cu.cuCtxSetCurrent(self.context))
        self.module = check(cu.cuModuleLoadData(PTX.read_bytes() + b"\0"))
        self.kernels = {name: check(cu.cuModuleGetFunction(self.module, name.encode())) for name in ARGUMENTS}

    def launch(self, name: str, *arguments: Any, stream: Any = 0, grid: int = 32, block: int = 256) -> None:
        values = tuple(
            int(a) if kind is not ctypes.c_float else a for a, kind in zip(arguments, ARGUMENTS[name], strict=True)
        )
        check(cu.cuLaunchKernel(self.kernels[name], grid, 1, 1, block, 1, 1, 0, stream, (values, ARGUMENTS[name]), 0))

    def managed(self, size: int) -> Any:
        return check(cu.cuMemAllocManaged(size, cu.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value))

    def plain(self, size: int) -> Any:
        return check(cu.cuMemAlloc(size))

    def stream(self, flags: int = 0) -> Any:
        return check(cu.cuStreamCreate(flags))

    def event(self, flags: int = 0) -> Any:
        return check(cu.cuEventCreate(flags))

    def synchronize(self) -> None:
        check(cu.cuCtxSynchronize())

    def read(self, address: Any, count: int, kind: Any = "u4") -> Any:
        """Copy from the device."""
        out = np.empty(count, dtype=kind)
        check(cu.cuMemcpyDtoH(out.ctypes.data, address, out.nbytes))
        return out

    def write(self, address: Any, data: Any) -> None:
        check(cu.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))

    def prefetch(self, address: Any, size: int, where: Any, stream: Any = 0) -> None:
        check(cu.cuMemPrefetchAsync(address, size, where, 0, stream))
