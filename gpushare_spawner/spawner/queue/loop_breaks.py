"""Breaks in long work, so that it does not block the event loop."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable

LONGEST_SECONDS = 0.004
"""Longest work without a break for the event loop, as far as the pieces of the work allow. Ours: the hub's own
callbacks take about as long.
"""


MOST_FREEZES = 5000
"""Breaks at which objects are excluded from garbage collection. Measured: the first read of 100,000 GPUs has 2,000 to
3,500. A hub with failing first reads excludes no more than that.
"""


class LastingObjects:
    """Exclusion of long-lived objects from garbage collection during the first read of a large cluster.

    Python's garbage collector would block the event loop while it traverses the many new objects. An object without
    references is freed all the same; only cycles that were garbage at that moment are not. So the exclusion happens at
    most `MOST_FREEZES` times.
    """

    def __init__(self) -> None:
        self._left = MOST_FREEZES

    def exclude(self) -> None:
        """Exclude all existing objects from garbage collection."""
        if self._left:
            self._left -= 1
            # the youngest generation first: its garbage is freed, and tuples of numbers and strings need no collector
            # at all
            gc.collect(0)
            gc.freeze()


class LoopBreaks:
    """Breaks in which other tasks of the event loop run during one long task."""

    def __init__(
        self,
        longest: float = LONGEST_SECONDS,
        clock: Callable[[], float] = time.perf_counter,
        lasting: LastingObjects | None = None,
    ) -> None:
        """Start the clock. ``longest``: seconds of work between two breaks; ``clock``: returns seconds.

        ``lasting``: excludes the objects of the work from garbage collection at each break; None: no exclusion.
        """
        self._longest = longest
        self._clock = clock
        self._since = clock()
        self._lasting = lasting

    async def pause_if_due(self) -> None:
        """Let other tasks run if the last break is too long ago."""
        if self._clock() - self._since >= self._longest:
            if self._lasting is not None:
                self._lasting.exclude()
            await asyncio.sleep(0)
            self._since = self._clock()

    async def through(self, pieces: Iterable[object]) -> None:
        """Run all pieces of some work, with breaks between them."""
        for _ in pieces:
            await self.pause_if_due()
