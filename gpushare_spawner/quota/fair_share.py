"""What accounts used over quota recently: the order of those who ask for more.

As in Kueue's admission fair sharing, usage decays with a half-life, is divided by the weight, and a spawn that is
admitted pays an entry penalty at once. As in KAI, it is measured in parts of the whole cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from gpushare_spawner.quota.account import Account

PREPAID_SECONDS = 300.0
"""What a spawn over quota pays when it is admitted: its use of so long. Without it all spawns of one account that wait
together would be admitted before the first one counts. Kueue's sampling interval, for which it adds the same."""


class FairShare:
    """The part of the cluster that each account has used over quota, on average over time.

    Recent use counts more. The average is exact where it is brought up to date before each change.
    Accounts are named by their keys.
    """

    def __init__(self, half_life: float) -> None:
        """``half_life``: seconds after which use counts half."""
        self.half_life = half_life
        self._used: dict[str, float] = {}
        self._at: float | None = None

    @classmethod
    def restored(cls, half_life: float, used: Mapping[str, float], at: float) -> FairShare:
        """Return averages as they were at an instant, by `all_used`; the next `advance` counts on from there."""
        fair = cls(half_life)
        fair._used, fair._at = dict(used), at
        return fair

    @property
    def all_used(self) -> Mapping[str, float]:
        """The part of the cluster that each account has used over quota, on average."""
        return MappingProxyType(self._used)

    def advance(self, now: float, over_quota: Mapping[str, int], capacity: int) -> None:
        """Bring the averages up to date. ``now``: seconds on any clock that all calls share.

        ``over_quota``: units over quota of each account since the last call; ``capacity``: units of all GPUs.
        """
        passed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now if self._at is None else max(self._at, now)
        kept = self._kept(passed)
        if kept == 1.0:
            return
        self._used = {key: used * kept for key, used in self._used.items() if used * kept > 1e-9}
        for account, units in over_quota.items():
            self._add(account, units, capacity, 1.0 - kept)

    def clock_was_set(self, by: float) -> None:
        """Follow a step of the clock that `advance` is given: it is no time that passed."""
        if self._at is not None:
            self._at += by

    def past(self, account: str, units: int, capacity: int, seconds: float) -> None:
        """Count use over quota that began so many seconds ago and has not been counted: after a restart of the hub."""
        self._add(account, units, capacity, 1.0 - self._kept(max(0.0, seconds)))

    def admitted(self, account: str, units: int, capacity: int) -> None:
        """Count the entry penalty of a spawn over quota."""
        self._used[account] = self.used(account) + self.penalty(units, capacity)

    def used(self, account: str) -> float:
        """Return the part of the cluster that the account has used over quota, on average."""
        return self._used.get(account, 0.0)

    def penalty(self, units: int, capacity: int) -> float:
        """Return the entry penalty of a spawn of so many units."""
        return _part(units, capacity) * (1.0 - self._kept(PREPAID_SECONDS))

    def _add(self, account: str, units: int, capacity: int, weight: float) -> None:
        self._used[account] = self.used(account) + _part(units, capacity) * weight

    def _kept(self, seconds: float) -> float:
        return math.pow(0.5, seconds / self.half_life)


def rank(account: Account, used: float) -> float:
    """Return the place of an account among those that ask for more: the least first, weight 0 last."""
    return used / account.quota.weight if account.quota.weight > 0 else math.inf


def _part(units: int, capacity: int) -> float:
    # lent units can be in use twice, so the part can be more than 1
    return units / capacity if capacity > 0 else 0.0
