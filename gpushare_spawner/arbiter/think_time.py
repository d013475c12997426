"""How long a client is typically quiet between two bursts, and whether it is worth waiting for it."""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW = 7
"""Gaps remembered. Odd, so that the median is one of them; few, so that a new phase of a program is soon learned."""

CLEARLY_LONGER = 4
"""A gap that is so many times as long as the typical one is of another kind: the phase, or the cell, is over."""


class TypicalSpan:
    """The median of the last few spans: a minute between cells does not spoil the milliseconds within one."""

    def __init__(self) -> None:
        self._spans: deque[float] = deque(maxlen=WINDOW)

    def learn(self, seconds: float) -> None:
        """One more span, in seconds; negative ones are noise of the clock and count as 0."""
        self._spans.append(max(0.0, seconds))

    @property
    def seconds(self) -> float | None:
        """The typical span; None: nothing learned yet."""
        return median(self._spans) if self._spans else None


def patience(typical_gap: float | None, hand_off_seconds: float) -> float:
    """Seconds of quiet for which a holder keeps the GPU although somebody waits.

    0 when its gaps are unknown or longer than the hand-off costs. Otherwise until this gap is clearly no typical one, and
    never longer than the hand-off costs: so at most two hand-offs' worth is lost, whatever the gap turns out to be. (The
    ski-rental argument, sharpened by what is known of the gaps; disk schedulers idle for the same reason: BFQ, Valente &
    Checconi 2010.)
    """
    if typical_gap is None or typical_gap >= hand_off_seconds:
        return 0.0
    return min(hand_off_seconds, CLEARLY_LONGER * typical_gap)
