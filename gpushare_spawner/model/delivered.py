"""GPU time that a session was entitled to while others competed for its GPUs, and that it received. Pure data.

The arbiter counts (`arbiter/`), the agent keeps the sums over restarts, and report, notebook and metrics show them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

FIRST_BOUND = 0.001
"""Seconds; every shorter wait is counted as this long: a lease costs about a millisecond anyway."""
STEP = 1.5
"""Ratio of two neighbouring bounds: a quantile is at most 50 % above the true value, and never below it."""
BOUNDS = tuple(FIRST_BOUND * STEP**place for place in range(40))
"""Upper bounds of the counted ranges in seconds: 1 ms to two hours. Longer waits count as the last."""


class Waits:
    """Counts waits for a lease by length, in a fixed amount of memory."""

    def __init__(self) -> None:
        self._counts = [0] * len(BOUNDS)

    def add(self, seconds: float) -> None:
        """Count one wait. A request that was granted at once (0 s) is no wait, and is not counted."""
        if seconds > 0 and not math.isnan(seconds):
            self._counts[min(bisect_left(BOUNDS, seconds), len(BOUNDS) - 1)] += 1

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of waits in each range of `BOUNDS`, without the empty ranges at the end."""
        last = next((place for place in range(len(BOUNDS) - 1, -1, -1) if self._counts[place]), -1)
        return tuple(self._counts[: last + 1])


@dataclass(frozen=True)
class Delivered:
    """Sums over the time in which others competed for the session's GPUs; several GPUs add up."""

    entitled_seconds: float = 0.0
    """GPU seconds that its guaranteed units gave it a right to."""
    delivered_seconds: float = 0.0
    """GPU seconds that it received in that time."""
    waits: tuple[int, ...] = ()
    """Waits for a lease, by the ranges of `BOUNDS`."""

    def plus(self, other: Delivered) -> Delivered:
        """Return the sums of both."""
        return Delivered(
            self.entitled_seconds + other.entitled_seconds,
            self.delivered_seconds + other.delivered_seconds,
            _added(self.waits, other.waits, 1),
        )

    def minus(self, other: Delivered) -> Delivered:
        """Return what has been added since `other`; no sum is below 0."""
        return Delivered(
            max(0.0, self.entitled_seconds - other.entitled_seconds),
            max(0.0, self.delivered_seconds - other.delivered_seconds),
            _added(self.waits, other.waits, -1),
        )

    @property
    def wait_count(self) -> int:
        """The number of waits."""
        return sum(self.waits)

    def wait_quantile(self, part: float) -> float:
        """Return the wait in seconds that `part` (0 to 1) of all waits did not exceed; 0 where there was no wait.

        The value is the upper bound of a range: up to 50 % more than the true one (see `STEP`).
        """
        wanted, seen = part * self.wait_count, 0
        for bound, count in zip(BOUNDS, self.waits, strict=False):
            seen += count
            if count and seen >= wanted:
                return bound
        return 0.0


NOTHING = Delivered()
"""No competition so far."""


def _added(ours: tuple[int, ...], theirs: tuple[int, ...], sign: int) -> tuple[int, ...]:
    length = min(max(len(ours), len(theirs)), len(BOUNDS))
    padded = [(*counts, *[0] * (length - len(counts)))[:length] for counts in (ours, theirs)]
    return tuple(max(0, one + sign * other) for one, other in zip(*padded, strict=True))
