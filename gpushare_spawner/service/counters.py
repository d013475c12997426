"""What the culler has done since the service was started. For the metrics only: no decision depends on it."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from gpushare_spawner.model.tier import Tier

Component = Literal["agent", "hub", "session", "round"]


class Counters:
    """Counts idle actions, notices and failures. ``last_round``: end of the last round in seconds since the epoch."""

    def __init__(self) -> None:
        self.actions: Counter[Tier] = Counter()
        self.notices: Counter[Tier] = Counter()
        self.withdrawn: Counter[Tier] = Counter()
        """Notices that were withdrawn."""
        self.failures: Counter[Component] = Counter()
        self.last_round: float | None = None
        """None: no round has ended yet."""

    def acted(self, tier: Tier) -> None:
        self.actions[tier] += 1

    def notified(self, tier: Tier) -> None:
        self.notices[tier] += 1

    def withdrew(self, tier: Tier) -> None:
        self.withdrawn[tier] += 1

    def failed(self, component: Component) -> None:
        self.failures[component] += 1

    def round_done(self, at: float) -> None:
        self.last_round = at
