"""Calls cuCheckpointProcess* and NVML as an agent does, without cuInit.

It is a program of its own, so that it can be killed. It is told lines of JSON: a call and its arguments. For each it
says a line: the name of the error, the value, and the seconds that the call took. With a number as its argument it
becomes the user of that number first. It uses ctypes only, so that it starts quickly.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class RunningProcess(ctypes.Structure):
    """nvmlProcessInfo_t"""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute", ctypes.c_uint),
    ]


def arguments(first: int = 0) -> Any:
    """The 64 bytes that a call takes, with the first number in them."""
    return (ctypes.c_uint64 * 8)(first)


def shown(nvml: ctypes.CDLL, index: int) -> dict[str, Any]:
    """MiB used on a GPU, and by which processes, as NVML has it."""
    device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    count, processes = ctypes.c_uint(64), (RunningProcess * 64)()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0
    assert nvml.nvmlDeviceGetMemoryInfo(device, memory) == 0
    assert nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), processes) == 0
    listed = {one.pid: one.used >> 20 for one in processes[: count.value]}
    return {"used": memory[2] >> 20, "processes": listed}


def main() -> None:
    cuda, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
    if len(sys.argv) > 1:
        os.setgroups([])
        os.setgid(int(sys.argv[1]))
        os.setuid(int(sys.argv[1]))
    assert nvml.nvmlInit_v2() == 0
    told = ctypes.c_int()
    calls: dict[str, Callable[..., int]] = {
        "lock": lambda pid, timeout_ms=0: cuda.cuCheckpointProcessLock(pid, arguments(timeout_ms)),
        "checkpoint": lambda pid: cuda.cuCheckpointProcessCheckpoint(pid, arguments()),
        "restore": lambda pid: cuda.cuCheckpointProcessRestore(pid, arguments()),
        "unlock": lambda pid: cuda.cuCheckpointProcessUnlock(pid, None),
        "state": lambda pid: cuda.cuCheckpointProcessGetState(pid, ctypes.byref(told)),
        "thread": lambda pid: cuda.cuCheckpointProcessGetRestoreThreadId(pid, ctypes.byref(told)),
    }
    for line in sys.stdin:
        name, *rest = json.loads(line)
        began = time.monotonic()
        if name == "shown":
            answer: list[Any] = ["CUDA_SUCCESS", shown(nvml, *rest)]
        else:
            error = ctypes.c_char_p()
            result = calls[name](*rest)
            assert cuda.cuGetErrorName(result, ctypes.byref(error)) == 0
            answer = [(error.value or b"").decode(), told.value]
        print(json.dumps([*answer, time.monotonic() - began]), flush=True)


if __name__ == "__main__":
    main()
