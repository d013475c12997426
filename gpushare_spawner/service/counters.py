"""Counters of the service since its start. For the metrics only: no decision depends on them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import Literal

from gpushare_spawner.model.share import Tier
from gpushare_spawner.service.history.store import Wait, WaitOutcome

WAIT_BOUNDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Upper bounds of the buckets of waits in seconds: from an immediate placement to an hour in the queue."""


Component = Literal["agent", "hub", "session", "round"]


class SpawnWaits:
    """The waits of a template's spawns, by length."""

    def __init__(self) -> None:
        self._buckets = [0] * (len(WAIT_BOUNDS) + 1)
        self.seconds = 0.0
        """Sum of all waits."""

    def add(self, seconds: float) -> None:
        self._buckets[bisect_left(WAIT_BOUNDS, seconds)] += 1
        self.seconds += seconds

    def cumulative(self) -> list[int]:
        """Return the numbers of waits of at most each of `WAIT_BOUNDS`, and the number of all waits."""
        return list(accumulate(self._buckets))


class Counters:
    """Counts idle actions, notices, failures, and waits of spawns."""

    def __init__(self) -> None:
        self.actions: Counter[Tier] = Counter()
        self.notices: Counter[Tier] = Counter()
        self.withdrawn: Counter[Tier] = Counter()
        """Notices that were withdrawn."""
        self.failures: Counter[Component] = Counter()
        self.waits: dict[str, SpawnWaits] = {}
        """Waits of spawns that got a GPU, by template."""
        self.given_up: Counter[str] = Counter()
        """Spawns that got no GPU, by template."""
        self.last_round: float | None = None
        """End of the last round in seconds since the epoch; None if no round has ended yet."""

    def waited(self, wait: Wait) -> None:
        if wait.outcome is WaitOutcome.STARTED:
            self.waits.setdefault(wait.template, SpawnWaits()).add(wait.seconds)
        else:
            self.given_up[wait.template] += 1
