"""One job of the oversubscription benchmark: CPU and GPU phases in turn on one working set, like a training job's.

Started by benchmarks.oversubscription with its shape in a JSON file. It says "ready", waits for a line, works, and
says how long it took. Where a first-come scheduler is in force it asks that before it launches.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gpushare_simgpu

WANT, RELEASED, GO, GIVE_WAY = b"w", b"r", b"g", b"t"
PR_SET_TIMERSLACK = 29


@dataclass(frozen=True)
class Phase:
    """A GPU phase and the CPU phase after it."""

    gaps: list[float]
    """Host time after each kernel."""
    cpu: float


@dataclass(frozen=True)
class Shape:
    """A job, in seconds and bytes as they are on the scaled-down simulated GPU."""

    working_set: int
    kernel: float
    """Seconds that one kernel keeps the device busy when its pages are there; it touches the whole working set."""
    startup: float
    """CPU time before the first GPU work."""
    contention: float
    """By how much longer CPU phases take while the other job is in one too."""
    phases: list[Phase]


class Pacer:
    """Keeps the job's own pace: what this machine adds to kernels and sleeps is taken off the next host time.

    That are some tenths of a millisecond each, for sleeping, waking and Python; scaled up they would be minutes.
    """

    def __init__(self, kernel: float) -> None:
        self._kernel = kernel
        self._latency = float("inf")
        """The least that a launch and its synchronisation ever took beside the kernel."""
        self._late = 0.0

    def launched(self, took: float) -> None:
        """A kernel was launched and waited for."""
        self._latency = min(self._latency, max(0.0, took - self._kernel))
        self._late += self._latency

    def until(self, seconds: float) -> float:
        """When a pause of so long should end, on the monotonic clock."""
        taken = min(self._late, seconds)
        self._late -= taken
        return time.monotonic() + seconds - taken

    def woke(self, planned: float) -> None:
        """A pause that should have ended then is over."""
        self._late += max(0.0, time.monotonic() - planned)


class Cores:
    """The machine's CPU cores, which all jobs share in their CPU phases: one byte for each job, 1 while it is in
    one."""

    STEP = 0.004
    """Seconds between two looks at what the others do."""

    def __init__(self, path: Path, number: int, contention: float) -> None:
        with path.open("r+b") as file:
            self._busy = mmap.mmap(file.fileno(), 0)
        self._number = number
        self._contention = contention

    def work(self, seconds: float, sleep: Callable[[float], None]) -> None:
        """A CPU phase that takes so long alone. `sleep` waits until an instant of the monotonic clock."""
        self._busy[self._number] = 1
        now = time.monotonic()
        while seconds > 0:
            others = sum(self._busy[:]) - 1
            slower = 1 + self._contention * others
            until = now + min(self.STEP, seconds * slower)
            sleep(until)
            before, now = now, time.monotonic()
            seconds -= (now - before) / slower
        self._busy[self._number] = 0


class Token:
    """The first-come scheduler as one of its clients sees it; without a socket there is none, and all calls do
    nothing."""

    def __init__(self, connection: socket.socket | None, notice: float) -> None:
        self._connection = connection
        self._notice = notice
        """Seconds without GPU work after which the token is given back."""
        self._held = False
        self._unused_since = float("inf")

    def take(self) -> None:
        """Before a launch: have the token, or wait for it."""
        if self._connection is None:
            return
        self._unused_since = float("inf")
        if self._held and self._told_within(0):
            self._release()
        if not self._held:
            self._connection.send(WANT)
            while self._connection.recv(1) != GO:
                pass
            self._held = True

    def unused(self) -> None:
        """A GPU phase is over: from now on the token is not used."""
        self._unused_since = time.monotonic()

    def sleep(self, until: float) -> None:
        """A pause on the CPU: the token is given back when it was seen to be unused, or when its time is over."""
        while self._connection is not None and self._held and time.monotonic() < until:
            noticed = self._unused_since + self._notice
            if self._told_within(min(noticed, until) - time.monotonic()) or time.monotonic() >= noticed:
                self._release()
        time.sleep(max(0.0, until - time.monotonic()))

    def done(self) -> None:
        if self._held:
            self._release()

    def _told_within(self, seconds: float) -> bool:
        assert self._connection is not None
        readable, _, _ = select.select([self._connection], [], [], max(0.0, seconds))
        return bool(readable) and self._connection.recv(1) == GIVE_WAY

    def _release(self) -> None:
        assert self._connection is not None
        self._connection.send(RELEASED)
        self._held = False


def main() -> None:
    """Work as the arguments say: the shape, whether to allocate managed memory, the scheduler's descriptor and notice.

    Before it ends it says how long it took, in seconds.
    """
    described = json.loads(Path(sys.argv[1]).read_text())
    shape = Shape(**described | {"phases": [Phase(**phase) for phase in described["phases"]]})
    managed, descriptor, notice = sys.argv[2] == "managed", int(sys.argv[3]), float(sys.argv[4])
    connection = socket.socket(fileno=descriptor) if descriptor >= 0 else None
    token = Token(connection, notice)
    cores = Cores(Path(sys.argv[5]), int(sys.argv[6]), shape.contention)
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)

    from cuda.bindings import driver as cuda

    def checked(result: tuple[object, ...]) -> object:
        if result[0] != cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the driver says {result[0]}")
        return result[1] if len(result) == 2 else None

    checked(cuda.cuInit(0))
    checked(cuda.cuCtxSetCurrent(checked(cuda.cuDevicePrimaryCtxRetain(checked(cuda.cuDeviceGet(0))))))
    ptx = gpushare_simgpu.KERNELS.read_bytes() + b"\0"
    touch = checked(cuda.cuModuleGetFunction(checked(cuda.cuModuleLoadData(ptx)), b"touch"))
    if managed:
        memory = checked(cuda.cuMemAllocManaged(shape.working_set, cuda.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value))
    else:
        memory = checked(cuda.cuMemAlloc(shape.working_set))
    arguments = (
        (int(memory), shape.working_set, round(shape.kernel * 1e9)),  # type: ignore[call-overload]
        (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64),
    )
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    token.sleep(began + shape.startup)
    pacer = Pacer(shape.kernel)
    for phase in shape.phases:
        for gap in phase.gaps:
            token.take()
            launched = time.monotonic()
            checked(cuda.cuLaunchKernel(touch, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0))
            checked(cuda.cuCtxSynchronize())
            pacer.launched(time.monotonic() - launched)
            until = pacer.until(gap)
            token.sleep(until)
            pacer.woke(until)
        token.unused()
        cores.work(phase.cpu, token.sleep)
    token.done()
    print(time.monotonic() - began, flush=True)
    with contextlib.suppress(OSError):
        if connection is not None:
            connection.close()
    # Other jobs still run: leave without the driver's and the interpreter's slow way out.
    sys.stdin.readline()
    os._exit(0)


if __name__ == "__main__":
    main()
