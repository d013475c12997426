"""How often somebody may do something."""

from __future__ import annotations

from collections.abc import Callable


class Budget:
    """How much a session may do: `rate` a second, at most `store` saved up."""

    def __init__(self, clock: Callable[[], float], rate: float, store: float) -> None:
        self._clock, self._rate, self._store = clock, rate, store
        self._left, self._at = store, clock()

    def spend(self, cost: float = 1) -> bool:
        """Take so much, even where there is less; False if nothing is left then."""
        now = self._clock()
        self._left = min(self._store, self._left + (now - self._at) * self._rate) - cost
        self._at = now
        return self._left > 0
