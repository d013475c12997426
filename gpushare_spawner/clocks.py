"""The machine's wall clock, and the steps made when it was set.

Instants in reports, records and the hub's database come from this clock. If NTP or an admin sets the clock, a duration
across that step is wrong by its length. Parts that store instants therefore shift them by the step to keep durations
correct. Deadlines that people set are not shifted.

`Budget` limits the rate of requests, and `BackOff` the rate of failing attempts.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

STEP = 5.0
"""Smallest step in seconds. NTP corrects smaller errors gradually, and idle actions happen minutes after work."""
MOST_STEPS = 16
"""Number of steps that `WallClock.since_set` remembers."""


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
        """Callback that receives a step in seconds before the first reading after the step returns."""
        self.offset = wall() - steady()
        """Difference between the two clocks at the last reading, in seconds."""
        self.shift = 0.0
        """Sum of the steps, in seconds, from the creation of this object to the last reading."""
        self._steps: deque[tuple[float, float]] = deque(maxlen=MOST_STEPS)

    @classmethod
    def of(cls, clock: Callable[[], float] | None) -> WallClock:
        """Return the machine's clock for None, or else a clock without steps that reads `clock`."""
        return cls() if clock is None else cls(clock, clock)

    def __call__(self) -> float:
        now = self._wall()
        before, self.offset = self.offset, now - self._steady()
        by = self.offset - before
        if abs(by) >= STEP:
            # the reading without the step is later than all instants from before the step
            self._steps.append((now - by, by))
            self.shift += by
            self.was_set(by)
        return now

    def since_set(self, instant: float) -> float:
        """Return an instant from another program, shifted by the steps since the program recorded it.

        After a backward step, an instant counts as recorded before the step only if it is later than now, because the
        program may have recorded it after the step. The instant can then seem later than it was, and its session less
        idle.
        """
        now = self()
        for end, by in self._steps:
            if (instant <= end) if by > 0 else (instant > now):
                instant += by
        return instant


class Budget:
    """A token bucket: `rate` tokens per second, at most `store` saved, and at most `debt` overdrawn.

    After at most `debt` / `rate` seconds without a request, the next request is allowed, regardless of earlier
    spending.
    """

    def __init__(self, clock: Callable[[], float], rate: float, store: float, debt: float = math.inf) -> None:
        self._clock, self._rate, self._store, self._debt = clock, rate, store, debt
        self._left, self._at = store, clock()

    def spend(self, cost: float = 1) -> bool:
        """Take `cost` tokens, even if fewer are left. Returns False if none are left afterwards."""
        self._left = max(-self._debt, self._now() - cost)
        return self._left > 0

    def wait(self, reserve: float = 0) -> float:
        """Return the seconds until more than `reserve` tokens are left; 0 if they are left now."""
        left = self._now() - reserve
        # slightly more than 0: sums of floats are not exact
        return (1e-3 - left) / self._rate if left <= 0 else 0.0

    def _now(self) -> float:
        now = self._clock()
        self._left = min(self._store, self._left + (now - self._at) * self._rate)
        self._at = now
        return self._left


@dataclass
class BackOff:
    """Pauses between attempts, in seconds: each is twice as long as the previous pause, up to `longest`."""

    first: float
    longest: float
    pause: float = 0.0
    """The last pause; 0 if there was no failure."""
    until: float = -math.inf
    """End of the last pause."""

    def next(self, now: float) -> float:
        """Return the pause after a failure. It starts over once `longest` has passed since the last pause."""
        again = self.pause if now - self.until <= self.longest else 0.0
        self.pause = min(self.longest, max(self.first, 2 * again))
        self.until = now + self.pause
        return self.pause

    def succeeded(self) -> None:
        """Reset the pause."""
        self.pause = 0.0
