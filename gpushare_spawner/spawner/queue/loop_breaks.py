"""Breaks in long work, so that it does not block the event loop."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable

LONGEST_SECONDS = 0.004
"""For which the event loop is kept without a break, as far as the pieces of the work allow. Ours: the hub's own
callbacks take about as long."""


MOST_FREEZES = 5000
"""Breaks at which objects are excluded from garbage collection. Measured: the first reading of 100,000 GPUs has 2,000
to 3,500. A hub whose first readings fail again and again excludes no more than that."""


class LastingObjects:
    """Excludes objects that stay from garbage collection, as very many of them are made.

    Python's garbage collector would block the event loop for as long as it walks them. An object that nothing refers
    to is freed all the same; only cycles that were garbage at that moment are not. So it is done `MOST_FREEZES` times
    at most, for work that is done once: the first reading of a large cluster.
    """

    def __init__(self) -> None:
        self._left = MOST_FREEZES

    def exclude(self) -> None:
        """Exclude all objects that there are from garbage collection."""
        if self._left:
            self._left -= 1
            # the youngest first: what is garbage is freed, and tuples of numbers and strings need no collector at all
            gc.collect(0)
            gc.freeze()


class LoopBreaks:
    """Lets other tasks of the event loop run while one task has much to do."""

    def __init__(
        self,
        longest: float = LONGEST_SECONDS,
        clock: Callable[[], float] = time.perf_counter,
        lasting: LastingObjects | None = None,
    ) -> None:
        """``longest``: seconds of work between two breaks; ``clock``: returns seconds.

        ``lasting``: excludes what the work has made from garbage collection at each break; None: nothing does.
        """
        self._longest = longest
        self._clock = clock
        self._since = clock()
        self._lasting = lasting

    async def pause_if_due(self) -> None:
        """Let others run, if the last break is too long ago."""
        if self._clock() - self._since >= self._longest:
            if self._lasting is not None:
                self._lasting.exclude()
            await asyncio.sleep(0)
            self._since = self._clock()

    async def through(self, pieces: Iterable[object]) -> None:
        """Do all pieces of some work, with breaks between them."""
        for _ in pieces:
            await self.pause_if_due()
