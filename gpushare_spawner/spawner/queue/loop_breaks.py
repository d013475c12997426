"""Breaks in long work, so that it does not block the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

LONGEST_SECONDS = 0.004
"""For which the event loop is kept without a break, as far as the pieces of the work allow. Ours: the hub's own
callbacks take about as long."""


class LoopBreaks:
    """Lets other tasks of the event loop run while one task has much to do."""

    def __init__(self, longest: float = LONGEST_SECONDS, clock: Callable[[], float] = time.perf_counter) -> None:
        """``longest``: seconds of work between two breaks; ``clock``: returns seconds."""
        self._longest = longest
        self._clock = clock
        self._since = clock()

    async def pause_if_due(self) -> None:
        """Let others run, if the last break is too long ago."""
        if self._clock() - self._since >= self._longest:
            await asyncio.sleep(0)
            self._since = self._clock()

    async def through(self, pieces: Iterable[object]) -> None:
        """Do all pieces of some work, with breaks between them."""
        for _ in pieces:
            await self.pause_if_due()
