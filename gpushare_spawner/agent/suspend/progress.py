"""How far the suspension or resumption of one session has come, and why the next step is not possible.

The other sessions on a GPU, while one session is suspended or resumed there.

Whether processes can be suspended here, in words: the driver, its functions, the right to use them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState
from gpushare_spawner.agent.memory.session_limit import MemoryHolds
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.sockets.connection import Connection
from gpushare_spawner.agent.suspend.driver import CheckpointResult, Checkpoints, Code
from gpushare_spawner.model.frames import Frame

SOON, LATER = 2.0, 60.0
"""Seconds until a session that could not be suspended is tried again: it was busy; another cause."""
MOMENT = 10.0
"""Seconds. While the pauses of a busy session are no longer, others that need its memory wait until it is tried again:
for 14 s, with pauses of 2, 4 and 8 s. Then it counts as one that stays, and their allocations fail at once."""
RESUME_AGAIN = 1.0
"""Seconds until a session that could not be resumed is tried again."""


@dataclass
class BackOff:
    """Pauses between tries, in seconds: each is twice as long as the one before, up to LATER."""

    first: float
    pause: float = 0.0
    """The last one; 0: there was no failure."""
    until: float = float("-inf")

    def next(self, now: float) -> float:
        """Return the pause after a failure. Where the last one is over for LATER, it begins anew."""
        again = self.pause if now - self.until <= LATER else 0.0
        self.pause = min(LATER, max(self.first, 2 * again))
        self.until = now + self.pause
        return self.pause

    def succeeded(self) -> None:
        """The next failure is a first one."""
        self.pause = 0.0


class Step(Enum):
    """The step of a suspension or resumption that a session is in."""

    RUNNING = auto()
    ASKING = auto()
    LOCKING = auto()
    SUSPENDING = auto()
    SUSPENDED = auto()
    RESUMING = auto()


class CannotSuspend(Exception):
    """The session goes on as it was; the message is the reason, in a sentence."""

    def __init__(self, reason: str, retry_in: float = LATER) -> None:
        super().__init__(reason)
        self.retry_in = retry_in


class CannotResume(Exception):
    """The session stays suspended for now."""


class CannotRestore(CannotResume):
    """The driver refuses it, whatever memory there is."""


class MemoryFigures(Protocol):
    """The driver's figures: NVML."""

    def memory(self, gpu: Gpu) -> GpuState | None:
        """Memory in use, and by which processes; None where the GPU does not answer. May block for milliseconds."""


@dataclass(eq=False)
class SuspendProgress:
    """The state of one session of engine `suspend`."""

    session: Session
    step: Step = Step.RUNNING
    number: int = 0
    """Of the last SUSPEND."""
    ready: dict[Connection, Frame] = field(default_factory=dict)
    """Answers to it."""
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    failed: dict[int, str] = field(default_factory=dict)
    """Processes that the driver cannot restore, by pid, with what it says."""
    busy: BackOff = field(default_factory=lambda: BackOff(SOON))
    """Pauses after suspensions that failed because the session was busy."""
    refused: BackOff = field(default_factory=lambda: BackOff(RESUME_AGAIN))
    """Pauses after resumptions that the driver refused."""
    task: asyncio.Task[None] | None = None
    retry: asyncio.TimerHandle | None = None
    look: asyncio.TimerHandle | None = None
    """When the suspender next checks whether the suspended processes have ended."""

    def cancel_timers(self) -> None:
        """Cancel the next tries and checks."""
        for timer in (self.retry, self.look):
            if timer is not None:
                timer.cancel()

    def of_failed(self) -> str | None:
        """Return in a sentence which process the driver cannot restore; None: there is none."""
        alive = [pid for pid in self.failed if processes.exists(pid)]
        if not alive:
            return None
        return f"The driver cannot restore process {alive[0]} ({self.failed[alive[0]]}): restart its kernel."


class OtherSessions:
    """Asks the arbiters for memory, and keeps other sessions from taking it."""

    def __init__(
        self, arbitrations: Mapping[str, GpuArbitration], sessions: Mapping[str, Session], holds: MemoryHolds
    ) -> None:
        """`arbitrations` are by the GPU's UUID, `sessions` by their ids."""
        self._arbitrations = arbitrations
        self._sessions = sessions
        self._holds = holds

    def short_of_memory(self, session: str, gpu: Gpu, lacking: int) -> None:
        """So many bytes are missing on a GPU for a session. Nothing for one that has ended."""
        if session in self._sessions:
            self._arbitrations[gpu.uuid].short_of_memory(session, lacking)

    @contextlib.contextmanager
    def hold_grants(self, session: str, gpu: Gpu) -> Iterator[None]:
        """While this lasts no other session is granted more memory on the GPU. They may have some in advance."""
        self._holds.begin(gpu.uuid, session)
        try:
            yield
        finally:
            self._holds.end(gpu.uuid, session)

    @contextlib.asynccontextmanager
    async def hold_memory(self, session: str, gpu: Gpu) -> AsyncIterator[None]:
        """While this lasts no other session gets more memory on the GPU."""
        with self.hold_grants(session, gpu):
            others = [
                other.memory.recall_unused(gpu.uuid)
                for other in self._sessions.values()
                if other.id != session and gpu in other.gpus and other.memory is not None and not other.suspended
            ]
            await asyncio.gather(*others)
            yield


_CAP_SYS_PTRACE = 19
"""Bit of include/uapi/linux/capability.h."""

_WHY = {
    Code.NO_DRIVER: "there is no CUDA driver (libcuda.so.1) beside NVML; containers need NVIDIA_DRIVER_CAPABILITIES="
    "compute,utility",
    Code.NO_FUNCTIONS: "the driver has no checkpoint functions; install driver 570 or later",
    Code.NOT_SUPPORTED: "this driver does not support it on this machine",
    Code.NOT_PERMITTED: "the agent lacks the right to attach to it; run the agent as root with CAP_SYS_PTRACE",
    # too few rights can show as this too (NVIDIA/cuda-checkpoint, issue 6)
    Code.OPERATING_SYSTEM: "the operating system refused it, perhaps because the agent lacks CAP_SYS_PTRACE",
    Code.NO_DEVICE: "the driver shows no GPU",
    Code.NOT_INITIALIZED: "it has not initialised CUDA",
    Code.OUT_OF_MEMORY: "there is too little memory",
    Code.HANGS: "the driver did not answer",
    Code.STOPPED: "it is stopped, by Ctrl-Z, SIGSTOP or a debugger",
    Code.NO_WORKER: "the agent could not start the process that asks the driver",
}


def reason_of(answer: CheckpointResult, what: str) -> str:
    """Return a sentence: what cannot be done, and what the driver's answer means."""
    why = _WHY.get(answer.code)
    return f"{what}: {why}." if why is not None else f"{what}: the driver answers {answer}."


@dataclass(frozen=True)
class CheckpointRights:
    """What the kernel lets this process do to others of its user and of other users."""

    traces_all: bool
    """It has CAP_SYS_PTRACE."""
    traces_own: bool
    """It may attach to processes of its own user that are not its children (Yama's ptrace_scope is 0, or there is no
    Yama)."""

    @classmethod
    def read(cls, proc: Path = Path("/proc")) -> CheckpointRights:
        """Those of this process. What cannot be read counts as allowed: the driver says no where it is not."""
        try:
            status = (proc / "self/status").read_text()
            effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
        except (OSError, StopIteration, ValueError):
            return cls(True, True)
        try:
            scope = int((proc / "sys/kernel/yama/ptrace_scope").read_text())
        except (OSError, ValueError):
            scope = 0
        return cls(bool(effective >> _CAP_SYS_PTRACE & 1), scope == 0)


async def why_not(checkpoints: Checkpoints, rights: CheckpointRights) -> str | None:
    """Return in a sentence why this machine's driver cannot suspend processes, or this process may not; None: it
    can."""
    answer = await checkpoints.state()
    # the worker that asks has no context, which drivers may answer in these ways
    if not answer.ok and answer.code not in (Code.INVALID_VALUE, Code.NOT_INITIALIZED):
        return reason_of(answer, "Processes cannot be suspended")
    if not rights.traces_all and not rights.traces_own:
        return "Processes cannot be suspended: the agent lacks CAP_SYS_PTRACE; run it as root, or with that capability."
    return None
