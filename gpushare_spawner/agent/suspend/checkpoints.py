"""The driver's checkpoint functions (cuCheckpointProcess*, CUDA 12.8 and driver 570 or later).

A call can hang indefinitely, so the agent makes no call itself. `DriverCheckpoints` starts workers
(checkpoint_worker.py), and kills a worker if its call takes too long. The state of the process then remains as it is,
and another call can continue from there. steps.py defines the order of the calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.processes import ProcessName

log = logging.getLogger(__name__)


START_WITHIN = 30.0
"""Seconds beyond its own timeout after which a call that moves no memory counts as hung.

The worker may first need to start and initialize the driver: 2.7 s were measured on a machine with 8 GPUs (NVIDIA/nvcf,
pull request 263).
"""
GIVE_UP = 60.0
"""Seconds after which a call that moves memory counts as hung, in addition to the time for its bytes."""
SLOWEST = 200e6
"""Bytes per second; a slower checkpoint counts as hung.

80 GB in 15 s were measured on an H100 (NVIDIA/cuda-checkpoint, issue 29).
"""
IDLE_WORKERS = 2
"""Number of worker processes that keep running between calls."""
STOPPED_FOR = 1.0
"""Seconds for which a process must be stopped before a call for it is abandoned: each system call of a traced process
stops it briefly."""
CHECK_EVERY = 0.1
"""Seconds between two checks of whether a process is stopped."""


class Code(IntEnum):
    """Result of a call: the driver's CUresult, or one of our own codes below 0."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    NO_DEVICE = 100
    OPERATING_SYSTEM = 304
    ILLEGAL_STATE = 401
    NOT_READY = 600
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801
    UNKNOWN = 999
    NO_DRIVER = -1
    NO_FUNCTIONS = -2
    HANGS = -3
    NO_WORKER = -4
    STOPPED = -5
    ENDED = -6

    @classmethod
    def _missing_(cls, number: object) -> Code:
        return cls.UNKNOWN


class ProcessState(IntEnum):
    """CUprocessState of the driver."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


@dataclass(frozen=True)
class CheckpointResult:
    """The outcome of a call."""

    code: Code
    number: int = 0
    """The driver's number, for the log."""
    state: ProcessState = ProcessState.RUNNING
    """Result of `state` only."""

    @property
    def ok(self) -> bool:
        return self.code is Code.SUCCESS

    def __str__(self) -> str:
        return self.code.name if self.code is not Code.UNKNOWN else f"CUDA error {self.number}"


class DriverCheckpoints:
    """Makes the calls in worker processes, each of which runs one call at a time.

    A process that has ended is never mistaken for a later process with its pid: the answer is ENDED, and nothing is
    done. Pids are in the agent's pid namespace.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """Store the environment without starting a worker.

        `environment`: the environment of the worker processes; it names the driver's folder if necessary.
        """
        self._command = [sys.executable, "-m", "gpushare_spawner.agent.suspend.checkpoint_worker", str(os.getpid())]
        # All GPUs are visible to the worker, regardless of the agent's environment, and nothing is preloaded.
        hidden = ("CUDA_VISIBLE_DEVICES", "LD_PRELOAD")
        self._environment = {name: value for name, value in environment.items() if name not in hidden}
        self._idle: list[Process] = []
        self._busy: set[Process] = set()
        self._closed = False

    async def lock(self, process: ProcessName, timeout: float) -> CheckpointResult:
        """Wait at most `timeout` seconds for the process's work to end, and block new work."""
        within, timeout_ms = timeout + START_WITHIN, max(1, round(timeout * 1000))
        return await self._unless_stopped(within, process, call="lock", timeout_ms=timeout_ms)

    async def checkpoint(self, process: ProcessName, size: int) -> CheckpointResult:
        """Move its device memory, of about `size` bytes, to host memory, and release its contexts."""
        return await self._unless_stopped(GIVE_UP + size / SLOWEST, process, call="checkpoint")

    async def restore(self, process: ProcessName, size: int) -> CheckpointResult:
        """Move its device memory, of about `size` bytes, back.

        Enough GPU memory must be free. With some drivers, a process can never be restored once a restore has failed for
        lack of memory.
        """
        return await self._unless_stopped(GIVE_UP + size / SLOWEST, process, call="restore")

    async def unlock(self, process: ProcessName) -> CheckpointResult:
        """Unblock a process's work."""
        return await self._unless_stopped(START_WITHIN, process, call="unlock")

    async def state(self, process: ProcessName | None = None) -> CheckpointResult:
        """Return the state of a process; None: the calling process, to query the driver's features."""
        return await self._call(START_WITHIN, call="state", **({} if process is None else {"process": process}))

    async def close(self) -> None:
        """End the worker processes.

        If a call is running, its process stays in the state that the driver has reached.
        """
        self._closed = True
        for worker in [*self._idle, *self._busy]:
            _kill(worker)
            await worker.communicate()
        self._idle.clear()

    async def _unless_stopped(self, within: float, process: ProcessName, **request: Any) -> CheckpointResult:
        """Make a call that a thread of the process answers, unless the process is stopped.

        The driver would carry out the call when the stopped process continues, regardless of the memory that is free by
        then.
        """
        pid = process.pid
        if await _stays_stopped(pid):
            return CheckpointResult(Code.STOPPED)
        call = asyncio.ensure_future(self._call(within, process=process, **request))
        try:
            while not (await asyncio.wait([call], timeout=CHECK_EVERY))[0]:
                if processes.stopped(pid) and await _stays_stopped(pid) and not call.done():
                    return CheckpointResult(Code.STOPPED)
            return call.result()
        finally:
            call.cancel()
            await asyncio.wait([call])

    async def _call(self, within: float, **request: Any) -> CheckpointResult:
        worker = answer = None
        try:
            async with asyncio.timeout(within):
                worker = await self._worker()
                self._busy.add(worker)
                answer = await _ask(worker, request)
        except TimeoutError:
            return CheckpointResult(Code.HANGS)
        except OSError as error:
            log.error("a process for the driver's checkpoint functions cannot be started: %s", error)
            return CheckpointResult(Code.NO_WORKER)
        finally:
            if worker is not None:
                self._busy.discard(worker)
                if answer is None or self._closed or len(self._idle) >= IDLE_WORKERS:
                    _kill(worker)
                else:
                    self._idle.append(worker)
        return answer or CheckpointResult(Code.HANGS if self._closed else Code.UNKNOWN)

    async def _worker(self) -> Process:
        while self._idle:
            worker = self._idle.pop()
            if worker.returncode is None:
                return worker
        return await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=self._environment, start_new_session=True
        )


async def _stays_stopped(pid: int) -> bool:
    """Return whether a process is stopped at each check for STOPPED_FOR."""
    loop = asyncio.get_running_loop()
    until = loop.time() + STOPPED_FOR
    while processes.stopped(pid):
        if loop.time() >= until:
            return True
        await asyncio.sleep(CHECK_EVERY)
    return False


async def _ask(worker: Process, request: dict[str, Any]) -> CheckpointResult | None:
    """Send a request and return the answer; None if the worker has ended."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(request, default=asdict).encode() + b"\n")
        await worker.stdin.drain()
        line = await worker.stdout.readline()
    except (BrokenPipeError, ConnectionResetError):
        return None
    if not line:
        return None
    answer = json.loads(line)
    number = answer["code"]
    state = ProcessState(answer["value"]) if number == Code.SUCCESS else ProcessState.RUNNING
    return CheckpointResult(Code(number), number, state)


def _kill(worker: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        worker.kill()
