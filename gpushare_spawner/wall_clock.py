"""The machine's wall clock, and the steps by which it was set.

Instants in reports, records and the hub's database are of this clock. If NTP or an admin sets the clock, a duration
between an instant before and an instant after is wrong by that step. Parts that keep instants therefore move them by
the step, so that durations stay correct. Deadlines that people set are not moved.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

STEP = 5.0
"""Smallest step in seconds. NTP corrects less without a step, and idle actions come minutes after work."""
MOST_STEPS = 16
"""Steps that `WallClock.since_set` remembers."""


def since_boot() -> float:
    """Return seconds since the machine started, including time in suspension. This clock cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class WallClock:
    """Seconds since the epoch. Each reading detects whether the clock was set since the last reading."""

    def __init__(
        self, wall: Callable[[], float] = lambda: time.time(), steady: Callable[[], float] = since_boot
    ) -> None:
        self._wall, self._steady = wall, steady
        self.was_set: Callable[[float], None] = lambda by: None
        """Callback that gets the seconds of a step, before the first reading after the step returns."""
        self.offset = wall() - steady()
        """Difference between the two clocks at the last reading, in seconds."""
        self.moved = 0.0
        """Seconds by which the clock was set between the creation of this object and the last reading."""
        self._steps: deque[tuple[float, float]] = deque(maxlen=MOST_STEPS)

    @classmethod
    def of(cls, clock: Callable[[], float] | None) -> WallClock:
        """Return the machine's clock for None, else a clock without steps that reads `clock`."""
        return cls() if clock is None else cls(clock, clock)

    def __call__(self) -> float:
        now = self._wall()
        before, self.offset = self.offset, now - self._steady()
        by = self.offset - before
        if abs(by) >= STEP:
            # the reading without the step is later than all instants from before the step
            self._steps.append((now - by, by))
            self.moved += by
            self.was_set(by)
        return now

    def since_set(self, instant: float) -> float:
        """Return an instant of another program, moved by the steps since the program recorded it.

        After a step back, an instant counts as recorded before the step only if it is later than now, because the
        program can also have recorded it since. The instant can then seem later than it was, and its session less idle.
        """
        now = self()
        for end, by in self._steps:
            if (instant <= end) if by > 0 else (instant > now):
                instant += by
        return instant
