"""Breaks in long work, so that it does not block the event loop."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable

LONGEST_SECONDS = 0.004
"""For which the event loop is kept without a break, as far as the pieces of the work allow. Ours: the hub's own
callbacks take about as long."""


class LoopBreaks:
    """Lets other tasks of the event loop run while one task has much to do."""

    def __init__(
        self,
        longest: float = LONGEST_SECONDS,
        clock: Callable[[], float] = time.perf_counter,
        makes_lasting_objects: bool = False,
    ) -> None:
        """``longest``: seconds of work between two breaks; ``clock``: returns seconds.

        ``makes_lasting_objects``: the work makes very many objects that stay, the first reading of a large cluster for
        instance. Python's garbage collector, which would block the event loop for as long as it walks them, leaves out
        all objects that exist at a break. An object that nothing refers to is freed all the same; only cycles that
        were garbage at that moment are not. So use it for work that is done once.
        """
        self._longest = longest
        self._clock = clock
        self._since = clock()
        self._makes_lasting_objects = makes_lasting_objects

    async def pause_if_due(self) -> None:
        """Let others run, if the last break is too long ago."""
        if self._clock() - self._since >= self._longest:
            if self._makes_lasting_objects:
                gc.freeze()
            await asyncio.sleep(0)
            self._since = self._clock()

    async def through(self, pieces: Iterable[object]) -> None:
        """Do all pieces of some work, with breaks between them."""
        for _ in pieces:
            await self.pause_if_due()
