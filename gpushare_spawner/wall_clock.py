"""The clock that people read, and by how much somebody has set it.

Instants in reports, records and the hub's database are of this clock. A duration between two of them is wrong by the
step that the clock made in between: NTP that corrects a wrong clock, or an admin. Whoever keeps instants moves them by
that step, so that durations stay what they were. Deadlines that people set stay the instants that they are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

STEP = 5.0
"""Seconds. NTP moves a clock by less without a step at once, and idle actions come minutes after work."""
MOST_STEPS = 16
"""Steps that `WallClock.since_set` remembers."""


def since_boot() -> float:
    """Return seconds since the machine started, with those in which it was suspended. Nobody can set this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class WallClock:
    """Seconds since the epoch. Each reading finds out whether the clock was set since the last one."""

    def __init__(
        self, wall: Callable[[], float] = lambda: time.time(), steady: Callable[[], float] = since_boot
    ) -> None:
        self._wall, self._steady = wall, steady
        self.was_set: Callable[[float], None] = lambda by: None
        """Called with the seconds of a step, before the first reading after it is returned."""
        self.offset = wall() - steady()
        """Between the two clocks, at the last reading."""
        self.moved = 0.0
        """Seconds by which the clock was set since this object was made, by the last reading."""
        self._steps: deque[tuple[float, float]] = deque(maxlen=MOST_STEPS)

    @classmethod
    def of(cls, clock: Callable[[], float] | None) -> WallClock:
        """Return the machine's clock for None, and one that nobody sets for another."""
        return cls() if clock is None else cls(clock, clock)

    def __call__(self) -> float:
        now = self._wall()
        before, self.offset = self.offset, now - self._steady()
        by = self.offset - before
        if abs(by) >= STEP:
            # what the clock would say without the step is later than all that was written before it
            self._steps.append((now - by, by))
            self.moved += by
            self.was_set(by)
        return now

    def since_set(self, instant: float) -> float:
        """Return an instant that another program wrote, as it would have written it after the steps since then.

        After a step back an instant is taken for one before it only where it is later than now: the program can have
        written it since. It then seems later than it was, and what it dates less idle.
        """
        now = self()
        for end, by in self._steps:
            if (instant <= end) if by > 0 else (instant > now):
                instant += by
        return instant
