"""What the culler has done since the service was started. For the metrics only: no decision depends on it."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from gpushare_spawner.model.tier import Tier

Where = Literal["agent", "hub", "session", "round"]


class Counters:
    """Counts up, and remembers when the last round ended (seconds since the epoch; None: not yet)."""

    def __init__(self) -> None:
        self.steps: Counter[Tier] = Counter()
        self.announcements: Counter[Tier] = Counter()
        self.withdrawals: Counter[Tier] = Counter()
        self.failures: Counter[Where] = Counter()
        self.last_round: float | None = None

    def stepped(self, tier: Tier) -> None:
        self.steps[tier] += 1

    def announced(self, tier: Tier) -> None:
        self.announcements[tier] += 1

    def withdrew(self, tier: Tier) -> None:
        self.withdrawals[tier] += 1

    def failed(self, where: Where) -> None:
        self.failures[where] += 1

    def round_done(self, at: float) -> None:
        self.last_round = at
