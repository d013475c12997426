"""How long a client is typically quiet between two bursts, and whether it is worth waiting for it."""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW = 7
"""Spans remembered. Odd, so that the median is one of them; few, so that a new phase of a program is soon learned."""

CLEARLY_LONGER = 4
"""A pause that is so many times as long as the typical short one is of another kind: the phase, or the cell, is
over."""


class RecentSpans:
    """The last few spans of a kind, in seconds."""

    def __init__(self) -> None:
        self._spans: deque[float] = deque(maxlen=WINDOW)

    def learn(self, seconds: float) -> None:
        """One more span, in seconds; negative ones are noise of the clock and count as 0."""
        self._spans.append(max(0.0, seconds))

    @property
    def typical(self) -> float | None:
        """Their median: one minute among milliseconds does not spoil it. None: nothing learned yet."""
        return median(self._spans) if self._spans else None

    def patience(self, hand_off_seconds: float) -> float:
        """If these are a holder's pauses: seconds of quiet for which it keeps the GPU although another client waits.

        Pauses are of two kinds, those between a program's kernels and those between its phases, or its user's cells; it
        is the short ones, shorter than a hand-off, that are worth waiting for. So: until this pause is clearly none of
        them, if the hand-offs that are saved by it make up for the waiting, by the part of the pauses that were short.
        0 where there were none, or none is known. Never longer than the hand-off costs, so at most two hand-offs'
        worth is lost, whatever the pause turns out to be. (The ski-rental argument, sharpened by what is known of the
        pauses; disk schedulers idle for the same reason: BFQ, Valente & Checconi 2010.)
        """
        short = [span for span in self._spans if span < hand_off_seconds]
        if not short:
            return 0.0
        waited = min(hand_off_seconds, CLEARLY_LONGER * median(short))
        saved = hand_off_seconds * len(short) / len(self._spans)
        return waited if waited <= saved else 0.0
