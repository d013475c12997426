"""One session's process in benchmarks.shares: kernels of one length, queued ahead, without end or at a steady rate.

It says "ready" and its pid, waits for a line, and works until it is ended.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections import deque
from typing import Any

import gpushare_simgpu
from cuda.bindings import driver as cuda

SECOND = 1_000_000_000


def checked(result: tuple[Any, ...]) -> Any:
    """What a driver call returns besides success."""
    if result[0] != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver says {result[0]}")
    return result[1] if len(result) == 2 else None


def main() -> None:
    """Never returns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernel", type=float, required=True, help="seconds")
    parser.add_argument("--ahead", type=int, default=4, help="launches that are queued")
    parser.add_argument("--memory", type=int, default=0, help="bytes that each kernel touches")
    parser.add_argument("--every", type=float, default=0.0, help="seconds from one batch of launches to the next")
    options = parser.parse_args()
    checked(cuda.cuInit(0))
    checked(cuda.cuCtxSetCurrent(checked(cuda.cuDevicePrimaryCtxRetain(checked(cuda.cuDeviceGet(0))))))
    ptx = gpushare_simgpu.KERNELS.read_bytes() + b"\0"
    module = checked(cuda.cuModuleLoadData(ptx))
    length = round(options.kernel * SECOND)
    if options.memory:
        buffer = int(checked(cuda.cuMemAlloc(options.memory)))
        function = checked(cuda.cuModuleGetFunction(module, b"touch"))
        arguments: Any = ((buffer, options.memory, length), (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64))
    else:
        function = checked(cuda.cuModuleGetFunction(module, b"spin"))
        arguments = ((length,), (ctypes.c_uint64,))

    def launch() -> None:
        checked(cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0))

    print("ready", os.getpid(), flush=True)
    sys.stdin.readline()
    if options.every:
        due = time.monotonic()
        while True:
            for _ in range(options.ahead):
                launch()
            checked(cuda.cuCtxSynchronize())
            due += options.every
            time.sleep(max(0.0, due - time.monotonic()))
    # an event for each tenth of a millisecond of queue would cost more than it tells
    stride = max(1, options.ahead // 8)
    behind: deque[Any] = deque()
    spare: list[Any] = []
    while True:
        for _ in range(stride):
            launch()
        event = spare.pop() if spare else checked(cuda.cuEventCreate(cuda.CUevent_flags.CU_EVENT_BLOCKING_SYNC))
        checked(cuda.cuEventRecord(event, 0))
        behind.append(event)
        while len(behind) * stride >= options.ahead:
            oldest = behind.popleft()
            checked(cuda.cuEventSynchronize(oldest))
            spare.append(oldest)


if __name__ == "__main__":
    main()
