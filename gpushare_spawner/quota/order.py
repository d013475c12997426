"""Admission of servers to accounts, recent use over quota, and the order of waiting spawns.

Spawns in quota come first, then the others by fair share. reclaim.py chooses the sessions that make way. As in Kueue's
admission fair sharing, usage decays with a half-life and is divided by the weight, and a spawn pays an entry penalty
when it is admitted. As in KAI, usage is measured as a fraction of the whole cluster.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Generic, TypeVar

from gpushare_spawner.quota.accounts import Account, Left, QuotaUsage, pool_of


class Limit(Enum):
    """Limits of a quota that can reject a server."""

    MAXIMUM = "maximum"
    """Maximum units of the account."""
    DEPARTMENT = "department"
    """Maximum units of the account's department."""
    SERVERS = "servers"
    """Maximum number of the account's servers."""
    USER_SERVERS = "user-servers"
    """Maximum number of the user's servers in the account."""


@dataclass(frozen=True)
class LimitExceeded:
    """The limit that another server would exceed."""

    limit: Limit
    most: int
    """The limit: units or servers."""
    used: int
    """Current use."""


@dataclass(frozen=True)
class Admission:
    """The result of an account's admission check for another server."""

    account: Account
    in_quota: bool
    left: int = 0
    """Maximum units of another server in quota."""
    refused: LimitExceeded | None = None
    """None if the account admits the server."""


def admit(usage: QuotaUsage, account: Account, user: str, units: int) -> Admission:
    """Return the admission of a user's server. ``units``: over all its GPUs."""
    left = usage.left(account).of(account)
    return Admission(account, units <= left, left, _refused(usage, account, user, units))


def _refused(usage: QuotaUsage, account: Account, user: str, units: int) -> LimitExceeded | None:
    quota = account.quota
    if quota.per_user.servers is not None:
        mine = sum(charge.user == user for charge in usage.sessions(account))
        if mine >= quota.per_user.servers:
            return LimitExceeded(Limit.USER_SERVERS, quota.per_user.servers, mine)
    if quota.servers is not None:
        servers = sum(1 for _ in usage.sessions(account))
        if servers >= quota.servers:
            return LimitExceeded(Limit.SERVERS, quota.servers, servers)
    return exceeded_units(usage, account, units)


def exceeded_units(usage: QuotaUsage, account: Account, units: int) -> LimitExceeded | None:
    """Return the limit that ``units`` more would exceed, or None."""
    quota = account.quota
    if quota.maximum_units is not None and usage.used(account) + units > quota.maximum_units:
        return LimitExceeded(Limit.MAXIMUM, quota.maximum_units, usage.used(account))
    department = usage.accounts.department(account)
    if department is not None and department.maximum_units is not None:
        used = usage.used_by_department(account)
        if used + units > department.maximum_units:
            return LimitExceeded(Limit.DEPARTMENT, department.maximum_units, used)
    return None


PREPAID_SECONDS = 300.0
"""Entry penalty of a spawn admitted over quota, as seconds of its use. Without the penalty, all waiting spawns of one
account would be admitted before the first one counts. Kueue's penalty is its sampling interval, which is as long."""


class FairShare:
    """The fraction of the cluster that each account has used over quota, averaged over time.

    Recent use has more weight. The average is exact if it is updated before each change. Accounts are identified by
    their keys.
    """

    def __init__(self, half_life: float) -> None:
        """Create empty averages. ``half_life``: seconds after which the weight of use has halved."""
        self.half_life = half_life
        self._used: dict[str, float] = {}
        self._at: float | None = None

    @classmethod
    def restored(cls, half_life: float, used: Mapping[str, float], at: float) -> FairShare:
        """Return averages restored from `all_used` of the instant ``at``. The next `advance` continues from there."""
        fair = cls(half_life)
        fair._used, fair._at = dict(used), at
        return fair

    @property
    def all_used(self) -> Mapping[str, float]:
        """The average fraction of the cluster that each account has used over quota."""
        return MappingProxyType(self._used)

    def advance(self, now: float, over_quota: Mapping[str, int], capacity: int) -> None:
        """Update the averages. ``now``: seconds on any clock that all calls share.

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
        """Adjust to a step of the clock that `advance` uses. The step does not count as elapsed time."""
        if self._at is not None:
            self._at += by

    def past(self, account: str, units: int, capacity: int, seconds: float) -> None:
        """Add use over quota that began ``seconds`` ago, after a restart of the hub."""
        self._add(account, units, capacity, 1.0 - self._kept(max(0.0, seconds)))

    def admitted(self, account: str, units: int, capacity: int) -> None:
        """Add the entry penalty of a spawn admitted over quota."""
        self._used[account] = self.used(account) + self.penalty(units, capacity)

    def used(self, account: str) -> float:
        """Return the average fraction of the cluster that the account has used over quota."""
        return self._used.get(account, 0.0)

    def penalty(self, units: int, capacity: int) -> float:
        """Return the entry penalty of a spawn of ``units``."""
        return _part(units, capacity) * (1.0 - self._kept(PREPAID_SECONDS))

    def _add(self, account: str, units: int, capacity: int, weight: float) -> None:
        self._used[account] = self.used(account) + _part(units, capacity) * weight

    def _kept(self, seconds: float) -> float:
        return math.pow(0.5, seconds / self.half_life)


def rank(account: Account, used: float) -> float:
    """Return an account's rank in the order of service. The lowest rank is served first; weight 0 is last."""
    return used / account.quota.weight if account.quota.weight > 0 else math.inf


def _part(units: int, capacity: int) -> float:
    # lent units can be in use twice, so the fraction can exceed 1
    return units / capacity if capacity > 0 else 0.0


Spawn = TypeVar("Spawn")


@dataclass(frozen=True)
class Asking(Generic[Spawn]):
    """A waiting spawn and the units that it requests."""

    spawn: Spawn
    account: Account
    units: int
    """Units on all its GPUs together."""


def ordered(asking: Iterable[Asking[Spawn]], usage: QuotaUsage, fair: FairShare, capacity: int) -> list[Spawn]:
    """Return the spawns in the order of service. ``asking`` is in order of arrival.

    A spawn is in quota if it fits into its account's guarantee together with the account's earlier spawns. Spawns in
    quota come first, in order of arrival. After them, the account with the least recent use over quota relative to its
    weight is always served next; each spawn that is served counts immediately. ``capacity``: units of all GPUs.
    """
    first, others = divided(asking, usage)
    beyond: dict[str, deque[tuple[int, Asking[Spawn]]]] = {}
    for number, request in enumerate(others):
        beyond.setdefault(request.account.key, deque()).append((number, request))
    return [request.spawn for request in first] + list(_by_fair_share(beyond, fair, capacity))


def divided(asking: Iterable[Asking[Spawn]], usage: QuotaUsage) -> tuple[list[Asking[Spawn]], list[Asking[Spawn]]]:
    """Return the spawns in quota and the spawns over quota, both in order of arrival."""
    left: dict[str, Left] = {}
    first: list[Asking[Spawn]] = []
    others: list[Asking[Spawn]] = []
    for request in asking:
        pool = pool_of(request.account)
        if pool not in left:
            left[pool] = usage.left(request.account).copy()
        (first if left[pool].take(request.account, request.units) else others).append(request)
    return first, others


def _by_fair_share(
    beyond: dict[str, deque[tuple[int, Asking[Spawn]]]], fair: FairShare, capacity: int
) -> Iterable[Spawn]:
    used = {key: fair.used(key) for key in beyond}
    heap = [(rank(waiting[0][1].account, used[key]), waiting[0][0], key) for key, waiting in beyond.items()]
    heapq.heapify(heap)
    while heap:
        _, _, key = heapq.heappop(heap)
        waiting = beyond[key]
        _, request = waiting.popleft()
        yield request.spawn
        if waiting:
            used[key] += fair.penalty(request.units, capacity)
            number, following = waiting[0]
            heapq.heappush(heap, (rank(following.account, used[key]), number, key))
