"""When the arbiter hears that bursts of a session begin and end: at once while the session's CPU budget lasts.

Beyond it the arbiter hears the last state of each process, a little later, and not every change: the session's
connections are read all the same, so that no process loses its connection because the agent is slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from gpushare_spawner.model.protocol.frames import Frame, Kind

BURST_FRAMES = frozenset({Kind.BUSY, Kind.IDLE})

Key = TypeVar("Key")


class CpuBudget(Protocol):
    """The CPU time of the agent that a session may take."""

    def spare_in(self) -> float:
        """Seconds until there is more left than the session's connections need to be read; 0: there is now."""

    def charge(self, work: Callable[[], None]) -> None:
        """Do the work and count its CPU time."""


class BurstFrames(Generic[Key]):
    """The frames of a session's processes on its GPUs that the arbiter has not heard. ``Key``: a process on a GPU."""

    def __init__(
        self,
        budget: CpuBudget,
        tell: Callable[[Key, Frame], None],
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
    ) -> None:
        """``tell``: the arbiter hears a frame."""
        self._budget = budget
        self._tell = tell
        self._call_later = call_later
        self._held: dict[Key, tuple[Frame, ...]] = {}
        """The longest held first."""
        self._timer: asyncio.TimerHandle | None = None

    def received(self, key: Key, frame: Frame) -> None:
        """Tell the arbiter of a BUSY or an IDLE, now or later."""
        if not self._held and not self._budget.spare_in():
            self._tell(key, frame)  # whoever reads counts the time
            return
        held = self._held.get(key, ())
        # IDLE has the busy time of the whole lease, so a pair in between can be left out
        self._held[key] = (frame,) if held and held[0].kind is frame.kind else (*held[:1], frame)
        self._schedule()

    def catch_up(self, key: Key) -> None:
        """Tell the arbiter what is held of a process, before another of its frames."""
        for frame in self._held.pop(key, ()):
            self._tell(key, frame)

    def forget(self, key: Key) -> None:
        """The process has left."""
        self._held.pop(key, None)

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = self._call_later(self._budget.spare_in(), self._next)

    def _next(self) -> None:
        """Tell of one process in an iteration of the event loop, so that other sessions have their turn."""
        self._timer = None
        if self._held and not self._budget.spare_in():
            key = next(iter(self._held))
            self._budget.charge(lambda: self.catch_up(key))
        if self._held:
            self._schedule()
