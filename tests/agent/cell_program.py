"""A kernel that runs cells: each line of its input is a number of bursts, and milliseconds of each and after each."""

from __future__ import annotations

import ctypes
import sys
import time

import gpushare_simgpu

from tests.agent.cuda_program import checked
from tests.native.simgpu_program import cu as cuda


def main() -> None:
    """Answers each line when its work is done."""
    checked(cuda.cuInit(0))
    checked(cuda.cuCtxSetCurrent(checked(cuda.cuDevicePrimaryCtxRetain(checked(cuda.cuDeviceGet(0))))))
    module = checked(cuda.cuModuleLoadData(gpushare_simgpu.KERNELS.read_bytes() + b"\0"))
    spin = checked(cuda.cuModuleGetFunction(module, b"spin"))
    print("ready", flush=True)
    for line in sys.stdin:
        bursts, milliseconds, pause = map(int, line.split())
        for _ in range(bursts):
            arguments = ((milliseconds * 1_000_000,), (ctypes.c_uint64,))
            checked(cuda.cuLaunchKernel(spin, 256, 1, 1, 256, 1, 1, 0, 0, arguments, 0))
            checked(cuda.cuCtxSynchronize())
            time.sleep(pause / 1000)
        print("done", flush=True)


if __name__ == "__main__":
    main()
