"""How much GPU work counts as use of a share, and what is known of work that is too short. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

REGULAR = 3
"""Short GPU work so often is a pattern, less is chance."""


@dataclass(frozen=True)
class UseRule:
    """How much GPU work counts as use."""

    min_use: float = 0.0
    """GPU seconds in the window; 0: all GPU work counts."""
    window: float = 300.0
    """Seconds."""


@dataclass(frozen=True)
class ShortWork:
    """GPU work since the last use of a share, too short to count as use."""

    times: int
    rule: UseRule
    longest_gap: float
    """Seconds, at most, between two of these, or between the use and the first of them."""

    def kept(self, after: float, idle: float) -> bool:
        """Return whether it would have kept a share that is taken after so many seconds without any GPU work.

        ``idle``: seconds since the last use.
        """
        return self.times >= REGULAR and idle >= after > self.longest_gap
