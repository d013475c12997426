"""How far the suspension or resumption of one session has come, and why the next step is not possible."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.sockets.connection import Connection
from gpushare_spawner.model.protocol.frames import Frame

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


class Source(Protocol):
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
