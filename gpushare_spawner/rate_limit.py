"""A limit of the rate of requests."""

from __future__ import annotations

import math
from collections.abc import Callable


class Budget:
    """A token bucket: `rate` tokens a second, at most `store` saved up, and never more than `debt` overdrawn.

    After at most `debt` / `rate` seconds without a request, the next request is allowed, whatever was spent before.
    """

    def __init__(self, clock: Callable[[], float], rate: float, store: float, debt: float = math.inf) -> None:
        self._clock, self._rate, self._store, self._debt = clock, rate, store, debt
        self._left, self._at = store, clock()

    def spend(self, cost: float = 1) -> bool:
        """Take `cost` tokens, even if fewer are left. Returns False if none is left after that."""
        self._left = max(-self._debt, self._now() - cost)
        return self._left > 0

    def wait(self, keep: float = 0) -> float:
        """Return the seconds until more than `keep` tokens are left; 0 if they are left now."""
        left = self._now() - keep
        # slightly more than 0: sums of floats are not exact
        return (1e-3 - left) / self._rate if left <= 0 else 0.0

    def _now(self) -> float:
        now = self._clock()
        self._left = min(self._store, self._left + (now - self._at) * self._rate)
        self._at = now
        return self._left
