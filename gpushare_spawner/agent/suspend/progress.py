"""Progress of the suspension or resumption of one session, and the reasons for a failed step.

Meanwhile, `SuspendParts` recalls memory from the other sessions on a GPU. `may_attach` and `why_not` determine whether
processes can be suspended here, given the driver, its functions and the right to use them. steps.py contains the steps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuSource
from gpushare_spawner.agent.session_limit import ExclusiveMemory
from gpushare_spawner.agent.session_records import Store
from gpushare_spawner.agent.session_socket import Connection
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.suspend.checkpoints import CheckpointResult, Code, DriverCheckpoints
from gpushare_spawner.clocks import BackOff
from gpushare_spawner.model.frames import Frame

SOON, LATER = 2.0, 60.0
"""Seconds until the next attempt to suspend a session: after it was busy; after another failure."""
MOMENT = 10.0
"""The longest pause, in seconds, for which other sessions wait for a busy session's memory.

With pauses of 2, 4 and 8 s they wait for 14 s. After that, their allocations fail immediately.
"""
RESUME_AGAIN = 1.0
"""Seconds until the next attempt to resume a session."""


class Step(Enum):
    """The current step in the suspension or resumption of a session."""

    RUNNING = auto()
    ASKING = auto()
    LOCKING = auto()
    SUSPENDING = auto()
    SUSPENDED = auto()
    RESUMING = auto()


class CannotSuspend(Exception):
    """Failure of a suspension: the session keeps running. The message is a sentence with the reason."""

    def __init__(self, reason: str, retry_in: float = LATER) -> None:
        super().__init__(reason)
        self.retry_in = retry_in


class CannotResume(Exception):
    """Failure of a resumption: the session stays suspended for now."""


class CannotRestore(CannotResume):
    """Refusal by the driver, regardless of the free memory."""


@dataclass(eq=False)
class SuspendProgress:
    """The state of one session of engine `suspend`."""

    session: Session
    step: Step = Step.RUNNING
    number: int = 0
    """Number of the last SUSPEND."""
    ready: dict[Connection, Frame] = field(default_factory=dict)
    """Answers to the last SUSPEND."""
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    failed: dict[int, str] = field(default_factory=dict)
    """Reasons why the driver cannot restore processes, by pid."""
    busy: BackOff = field(default_factory=lambda: BackOff(SOON, LATER))
    """Pauses after suspensions that failed because the session was busy."""
    refused: BackOff = field(default_factory=lambda: BackOff(RESUME_AGAIN, LATER))
    """Pauses after resumptions that the driver refused."""
    task: asyncio.Task[None] | None = None
    retry: asyncio.TimerHandle | None = None
    check: asyncio.TimerHandle | None = None
    """Timer for the next check for the end of the suspended processes."""

    def cancel_timers(self) -> None:
        """Cancel the timers of the next attempts and checks."""
        for timer in (self.retry, self.check):
            if timer is not None:
                timer.cancel()

    def of_failed(self) -> str | None:
        """Return a sentence about a process that the driver cannot restore; None if there is none."""
        alive = [pid for pid in self.failed if processes.exists(pid)]
        if not alive:
            return None
        return f"The driver cannot restore process {alive[0]} ({self.failed[alive[0]]}): restart its kernel."


@dataclass(frozen=True)
class SuspendParts:
    """The parts of the agent that suspensions and resumptions use."""

    checkpoints: DriverCheckpoints
    arbitrations: Mapping[str, GpuArbitration]
    """Keyed by GPU UUID."""
    sessions: Mapping[str, Session]
    """Open sessions, by ID."""
    source: GpuSource
    exclusive_memory: ExclusiveMemory
    """The sessions for which free GPU memory is reserved."""
    records: Store
    """Store for the records of processes that outlive their session."""
    lacks_host_memory: Callable[[Session, int], str | None]
    """Function that returns why the given bytes of a session exceed the host memory budgets; None if they fit."""
    save: Callable[[Session], Coroutine[Any, Any, None]]
    """Function that writes a session's record to disk. Raises OSError."""
    news: Callable[[], None]
    """Callback for a changed report."""

    def short_of_memory(self, session: str, gpu: Gpu, lacking: int) -> None:
        """Report missing bytes on a GPU for a session. Does nothing for a session that has ended."""
        if session in self.sessions:
            self.arbitrations[gpu.uuid].short_of_memory(session, lacking)

    @contextlib.asynccontextmanager
    async def use_exclusively(self, session: str, gpu: Gpu) -> AsyncIterator[None]:
        """Prevent other sessions from getting memory on the GPU meanwhile."""
        with self.exclusive_memory.exclusive(gpu.uuid, session):
            others = [
                other.memory.recall_unused(gpu.uuid)
                for other in self.sessions.values()
                if other.id != session and gpu in other.gpus and other.memory is not None and not other.suspended
            ]
            await asyncio.gather(*others)
            yield


_CAP_SYS_PTRACE = 19
"""Bit in include/uapi/linux/capability.h."""

_WHY = {
    Code.NO_DRIVER: "NVML is present, but not the CUDA driver (libcuda.so.1); containers need "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    Code.NO_FUNCTIONS: "the driver has no checkpoint functions; install driver 570 or later",
    Code.NOT_SUPPORTED: "this driver does not support it on this machine",
    Code.NOT_PERMITTED: "the agent lacks the right to attach to it; run the agent as root with CAP_SYS_PTRACE",
    # missing rights can give the same code (NVIDIA/cuda-checkpoint, issue 6)
    Code.OPERATING_SYSTEM: "the operating system refused it, perhaps because the agent lacks CAP_SYS_PTRACE",
    Code.NO_DEVICE: "the driver shows no GPU",
    Code.NOT_INITIALIZED: "it has not initialized CUDA",
    Code.OUT_OF_MEMORY: "there is too little memory",
    Code.HANGS: "the driver did not answer",
    Code.STOPPED: "it is stopped, by Ctrl-Z, SIGSTOP or a debugger",
    Code.NO_WORKER: "the agent could not start the process that queries the driver",
}


def reason_of(answer: CheckpointResult, sentence: str) -> str:
    """Return a sentence with the failed action and the meaning of the driver's answer."""
    why = _WHY.get(answer.code)
    return f"{sentence}: {why}." if why is not None else f"{sentence}: the driver answers {answer}."


def may_attach(proc: Path = Path("/proc")) -> bool:
    """Return whether this process may attach to other users' processes, or at least to its own user's.

    The first needs CAP_SYS_PTRACE. The second is allowed if Yama's ptrace_scope is 0, or there is no Yama. A right that
    cannot be determined counts as present; if it is missing, the driver refuses the call.
    """
    effective = processes.effective_capabilities(proc)
    if effective is None:
        return True
    try:
        scope = int((proc / "sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    return bool(effective >> _CAP_SYS_PTRACE & 1) or scope == 0


async def why_not(checkpoints: DriverCheckpoints, may_attach: bool) -> str | None:
    """Return a sentence with the reason why this machine cannot suspend processes; None if it can.

    The reason is the driver or a missing right of this process.
    """
    answer = await checkpoints.state()
    # the worker has no context; drivers may then answer in these ways
    if not answer.ok and answer.code not in (Code.INVALID_VALUE, Code.NOT_INITIALIZED):
        return reason_of(answer, "Processes cannot be suspended")
    if not may_attach:
        return "Processes cannot be suspended: the agent lacks CAP_SYS_PTRACE; run it as root, or with that capability."
    return None
