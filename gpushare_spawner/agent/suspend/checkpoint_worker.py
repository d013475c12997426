"""The worker program that calls the driver's checkpoint functions (CUDA 12.8 and driver 570).

The functions are cuCheckpointProcessLock, ...Checkpoint, ...Restore, ...Unlock and ...GetState. A call can hang
indefinitely, so the agent makes none itself: checkpoints.py starts this program, and kills it if a call takes too long.
The worker reads one request per line from standard input and writes its answer to a line on standard output, both as
JSON. It ends at the end of its input, and is killed when the agent ends: a call must not overlap with the next agent's
calls. To start quickly, it creates no CUDA context and imports little.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.processes import ProcessName

SUCCESS, OUT_OF_MEMORY, NOT_PERMITTED = 0, 2, 800


NO_DRIVER, NO_FUNCTIONS, ENDED = -1, -2, -6
"""Our own codes, in addition to the driver's: libcuda.so.1 cannot be loaded; it is too old for the checkpoint
functions; the process has ended."""


_SINCE = 12080
"""The first CUDA version with these functions, in cuGetProcAddress's format."""


_ADDRESS_SUCCESS = 0
"""CU_GET_PROC_ADDRESS_SUCCESS."""


_ARGUMENTS = 64
"""Bytes of each CUcheckpoint*Args; unused bytes must be 0."""


_PR_SET_PDEATHSIG = 1
"""include/uapi/linux/prctl.h."""


_NAMES = {"lock": "Lock", "checkpoint": "Checkpoint", "restore": "Restore", "unlock": "Unlock"}


class Driver:
    """The driver's checkpoint functions. `error`: why the functions are unavailable; 0 if they are available."""

    def __init__(self) -> None:
        self.error = SUCCESS
        self._functions: dict[str, Callable[..., int]] = {}
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            self.error = NO_DRIVER
            return
        # Initialize the driver here: calls then take milliseconds instead of seconds. Without persistence mode this is
        # required, because a restore fails if no process has the GPU open (issues 25 and 44 of NVIDIA/cuda-checkpoint).
        self.error = library.cuInit(0)
        for name in [*_NAMES.values(), "GetState"]:
            pointer = _address(library, f"cuCheckpointProcess{name}")
            if pointer is None:
                self.error = NO_FUNCTIONS
                return
            argument = ctypes.c_void_p
            self._functions[name] = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, argument)(pointer)

    def call(self, name: str, pid: int, timeout_ms: int = 0) -> int:
        """Lock, checkpoint, restore or unlock a process. Returns the driver's code."""
        if self.error:
            return self.error
        arguments = (ctypes.c_uint8 * _ARGUMENTS)()
        ctypes.c_uint32.from_buffer(arguments).value = timeout_ms  # first field of CUcheckpointLockArgs
        return self._functions[_NAMES[name]](pid, ctypes.addressof(arguments))

    def state(self, pid: int) -> tuple[int, int]:
        """Return the driver's code and the process's CUprocessState."""
        if self.error:
            return self.error, 0
        state = ctypes.c_int()
        return self._functions["GetState"](pid, ctypes.addressof(state)), state.value


def _address(library: ctypes.CDLL, name: str) -> int | None:
    """Return the address of the named function; None if the driver is too old for it."""
    find = getattr(library, "cuGetProcAddress_v2", None)
    if find is None:
        return None
    pointer, status = ctypes.c_void_p(), ctypes.c_int()
    arguments = name.encode(), ctypes.byref(pointer), _SINCE, ctypes.c_uint64(0), ctypes.byref(status)
    if find(*arguments) != SUCCESS or status.value != _ADDRESS_SUCCESS:
        return None
    return pointer.value


def answer(driver: Driver, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out one request: {"call": ..., "process": ..., "timeout_ms": ...}.

    If the request names no process, it applies to the worker itself. The driver takes a pid. The pid's process is
    compared immediately before and after the call: a later process with the same pid is unlocked immediately. The other
    calls do nothing to a process that was not locked.
    """
    name, value = request["call"], 0
    process = ProcessName(**request["process"]) if "process" in request else processes.named(os.getpid())
    if process is None or not processes.alive(process):
        code = ENDED
    elif name == "state":
        code, value = driver.state(process.pid)
    else:
        code = driver.call(name, process.pid, request.get("timeout_ms", 0))
        if name == "lock" and not processes.alive(process):
            driver.call("unlock", process.pid)
            code = ENDED
    return {"code": code, "value": value}


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. Exits immediately if the parent has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    """Answer requests until the input ends. The argument is the pid of the parent process."""
    end_with(int(sys.argv[1]))
    driver = Driver()
    for line in sys.stdin:
        print(json.dumps(answer(driver, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
