"""GPU work that adds up to use of a share, and work that is too short. Pure: time comes in as an argument."""

from __future__ import annotations

from dataclasses import dataclass

from gpushare_spawner.model.tier import UseRule

REGULAR = 3
"""Short GPU work so often is a pattern, less is chance."""
WAITED = 10.0
"""Seconds. GPU work that waits for a lease for this long counts as use: its length cannot be known."""
ROUNDING = 1e-6
"""Seconds."""


class UseCount:
    """Adds up a session's GPU work until it counts as use of its share, see `UseRule`."""

    def __init__(self, at: float, gpu_seconds: float, ended: float | None) -> None:
        """Begin at the instant ``at``. ``gpu_seconds`` and ``ended``: the session's GPU seconds and the end of its last
        GPU work then. Instants are seconds since the epoch."""
        self.at = at
        self.gpu_seconds = gpu_seconds
        self._ended = ended
        self._sum = 0.0
        self._waiting_since: float | None = None

    def add(self, at: float, gpu_seconds: float, busy: bool, ended: float | None, rule: UseRule) -> bool:
        """Add the GPU work until ``at``, and return whether it counts as use.

        ``busy``: work runs or waits. Work since the last call is taken to have come at ``at``, so that no part of it is
        forgotten yet.
        """
        forgotten = max(0.0, at - self.at) * rule.min_use / rule.window
        self._sum = max(0.0, self._sum - forgotten) + max(0.0, gpu_seconds - self.gpu_seconds)
        enough = self._sum >= min(rule.min_use, rule.window) - ROUNDING
        self._sum = min(self._sum, rule.min_use)
        if not busy or (ended is not None and (self._ended is None or ended > self._ended)):
            self._waiting_since = None
        if busy and self._waiting_since is None:
            self._waiting_since = at
        self.at, self.gpu_seconds, self._ended = at, gpu_seconds, ended
        return enough or (self._waiting_since is not None and at - self._waiting_since >= WAITED)

    def counts_from(self, rule: UseRule) -> float:
        """Return from how many GPU seconds of the session on its work counts as use."""
        return self.gpu_seconds + max(0.0, min(rule.min_use, rule.window) - self._sum)


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
