"""A CUDA program that works in bursts for ever: adds to a buffer, checks it, and prints a line for each round."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import gpushare_simgpu

from tests.native.simgpu_program import cu as cuda

WORDS = 1 << 20


def checked(result: tuple[Any, ...]) -> Any:
    """What a driver call returns besides success."""
    if result[0] != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver says {result[0]}")
    return result[1] if len(result) == 2 else None


def main() -> None:
    """Never returns."""
    checked(cuda.cuInit(0))
    checked(cuda.cuCtxSetCurrent(checked(cuda.cuDevicePrimaryCtxRetain(checked(cuda.cuDeviceGet(0))))))
    ptx = gpushare_simgpu.KERNELS.read_bytes() + b"\0"
    module = checked(cuda.cuModuleLoadData(ptx))
    add = checked(cuda.cuModuleGetFunction(module, b"add_u32"))
    buffer = checked(cuda.cuMemAlloc(4 * WORDS))
    checked(cuda.cuMemsetD32(buffer, 0, WORDS))
    found = ctypes.c_uint32()
    rounds = 0
    while True:
        rounds += 1
        arguments = ((int(buffer), WORDS, 1), (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32))
        checked(cuda.cuLaunchKernel(add, 256, 1, 1, 256, 1, 1, 0, 0, arguments, 0))
        checked(cuda.cuCtxSynchronize())
        checked(cuda.cuMemcpyDtoH(ctypes.addressof(found), int(buffer) + 4 * (rounds % WORDS), 4))
        if found.value != rounds:
            raise RuntimeError(f"{found.value} in the buffer instead of {rounds}")
        print(rounds, flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
