"""How often somebody may do something."""

from __future__ import annotations

import math
from collections.abc import Callable


class Budget:
    """A token bucket: `rate` tokens a second, at most `store` saved up, and never more than `debt` overdrawn.

    The bound on the debt is a promise: after at most `debt` / `rate` seconds of silence it may do something again,
    however much it did before.
    """

    def __init__(self, clock: Callable[[], float], rate: float, store: float, debt: float = math.inf) -> None:
        self._clock, self._rate, self._store, self._debt = clock, rate, store, debt
        self._left, self._at = store, clock()

    def spend(self, cost: float = 1) -> bool:
        """Take so much, even where there is less; False if nothing is left then."""
        self._left = max(-self._debt, self._now() - cost)
        return self._left > 0

    def wait(self, keep: float = 0) -> float:
        """Seconds until something may be spent again, and more than `keep` is left; 0 if it may now."""
        left = self._now() - keep
        # slightly more than 0: sums of floats are not exact
        return (1e-3 - left) / self._rate if left <= 0 else 0.0

    def _now(self) -> float:
        now = self._clock()
        self._left = min(self._store, self._left + (now - self._at) * self._rate)
        self._at = now
        return self._left
