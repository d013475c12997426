"""How long a client is typically quiet between two bursts, and whether it is worth waiting for it."""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW = 7
"""Gaps remembered. Odd, so that the median is one of them; few, so that a new phase of a program is soon learned."""


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

    0 when its gaps are unknown or longer than the hand-off costs. Otherwise as long as the hand-off costs: whatever
    the gap turns out to be, at most twice the time is lost that knowing it beforehand would have lost (the ski-rental
    argument; disk schedulers idle for the same reason: BFQ, Valente & Checconi 2010).
    """
    if typical_gap is None or typical_gap >= hand_off_seconds:
        return 0.0
    return hand_off_seconds
