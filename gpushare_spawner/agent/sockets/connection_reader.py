"""Reads the connections of one session in turn, so that no session delays another one.

The event loop serves all sessions. In one turn of it a session has `PER_TURN` frames read, whatever the number of its
connections; over time it has what its budget allows. Connections that have more wait in a queue, and the first of it is
read first. What frames mean: conversation.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gpushare_spawner.rate_limit import Budget

FRAMES_PER_SECOND = 4000
"""Frames a second that a session may send in the long run; bursts begin and end some hundred times a second at most."""
FRAMES_IN_STORE = 2000
"""Frames that it may send at once after a pause."""
LONGEST_DEBT = 1.0
"""Seconds after which a session that sent too much is read again, however much it sent."""
PER_TURN = 16
"""Frames of a session in one iteration of the event loop; a frame with a higher cost counts for more."""
PER_CONNECTION = 4
"""Of these, frames of one connection before the next one is read."""


CPU_SHARE = 0.25
"""Part of a core that a session's frames may take in the long run: some take longer the more processes there are."""
KEPT_FOR_READING = FRAMES_IN_STORE / 2
"""What BUSY and IDLE leave of the budget. A program whose bursts begin and end 150 times a second sends 300 frames, and
beside 50 sessions the arbiter takes 0.8 ms for each: the arbiter then hears of fewer (burst_frames.py), and the frames
are read all the same. A program that is not read loses its connection: its socket's buffer holds 278 frames."""
MOST_CPU_COST = 200
"""Frames that one frame costs at most for its CPU time: the agent may have collected garbage meanwhile."""


class Reader(Protocol):
    """A connection that has something to read."""

    def read_one(self) -> float | None:
        """Deal with one frame. The frame's cost, in frames; None if there is nothing more to read."""

    def hold(self) -> None:
        """Do not call `readable` until `go_on`."""

    def go_on(self) -> None:
        """Call `readable` when there is something to read."""


class FairReading:
    """The budget of one session, and the queue of its connections that have more to read than the budget allows."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cpu_seconds: Callable[[], float] = time.thread_time) -> None:
        """``cpu_seconds``: the CPU time of the thread that reads."""
        self._loop = loop
        self._cpu_seconds = cpu_seconds
        self._budget = Budget(loop.time, FRAMES_PER_SECOND, FRAMES_IN_STORE, LONGEST_DEBT * FRAMES_PER_SECOND)
        self._left: float = PER_TURN
        self._queue: deque[Reader] = deque()
        self._due: asyncio.Handle | None = None

    def readable(self, reader: Reader) -> None:
        """A connection has something to read."""
        if self._queue or not self._read(reader):
            reader.hold()
            self._queue.append(reader)
            self._schedule()

    def forget(self, reader: Reader) -> None:
        """The connection has ended."""
        if reader in self._queue:
            self._queue.remove(reader)

    def spare_in(self) -> float:
        """Seconds until more is left of the budget than reading needs; 0: it is now."""
        return self._budget.wait(KEPT_FOR_READING)

    def charge(self, work: Callable[[], None]) -> None:
        """Do work for the session that follows from its frames, and count its CPU time."""
        begun = self._cpu_seconds()
        work()
        self._budget.spend(self._cost_since(begun))

    def _cost_since(self, begun: float) -> float:
        """Return what CPU time costs, in frames. ``begun``: the thread's CPU time before."""
        return min((self._cpu_seconds() - begun) * FRAMES_PER_SECOND / CPU_SHARE, MOST_CPU_COST)

    def _read(self, reader: Reader) -> bool:
        """Read a few frames. False if there may be more, and it is the others' turn."""
        for _ in range(PER_CONNECTION):
            if self._left <= 0 or self._budget.wait():
                return False
            begun = self._cpu_seconds()
            cost = reader.read_one()
            if cost is None:
                return True
            cost = max(cost, self._cost_since(begun))
            self._budget.spend(cost)
            self._left -= cost
        # the event loop calls again where there is more
        return not self._queue

    def _schedule(self) -> None:
        if self._due is None:
            wait = self._budget.wait()
            self._due = self._loop.call_later(wait, self._next_turn) if wait else self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._due = None
        self._left = PER_TURN
        for _ in range(len(self._queue)):
            if self._left <= 0 or self._budget.wait():
                break
            reader = self._queue.popleft()
            self._queue.append(reader)
            if self._read(reader) and reader in self._queue:
                self._queue.remove(reader)
                reader.go_on()
        if self._queue:
            self._schedule()
