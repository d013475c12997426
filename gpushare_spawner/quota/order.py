"""Admission of servers to accounts, recent use over quota, and the order of waiting spawns.

Spawns in quota come first, then the others by fair share. Which sessions make way: reclaim.py. As in Kueue's
admission fair sharing, usage decays with a half-life, is divided by the weight, and a spawn that is admitted pays an
entry penalty at once. As in KAI, it is measured in parts of the whole cluster.
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
    """Units that the account can use."""
    DEPARTMENT = "department"
    """Units that the account's department can use."""
    SERVERS = "servers"
    """Servers of the account."""
    USER_SERVERS = "user-servers"
    """Servers of the user in the account."""


@dataclass(frozen=True)
class LimitExceeded:
    """Limit that one more server would exceed."""

    limit: Limit
    most: int
    """The limit: units or servers."""
    used: int
    """Present use."""


@dataclass(frozen=True)
class Admission:
    """Admission of one more server."""

    account: Account
    in_quota: bool
    left: int = 0
    """The most units that one more server can have in quota."""
    refused: LimitExceeded | None = None
    """None if the account admits it."""


def admit(usage: QuotaUsage, account: Account, user: str, units: int) -> Admission:
    """Return the admission of a server of this user with so many units, over all its GPUs."""
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
    """Return the limit that so many more units would exceed; None if they exceed none."""
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
"""Entry penalty of an admitted spawn over quota: its use for so long. Without it all waiting spawns of one account
would be admitted before the first counts. Equals Kueue's sampling interval, for which Kueue adds the same."""


class FairShare:
    """Part of the cluster that each account has used over quota, on average over time.

    Recent use counts more. The average is exact if it is updated before each change. Accounts are named by their keys.
    """

    def __init__(self, half_life: float) -> None:
        """Create empty averages. ``half_life``: seconds after which use counts half."""
        self.half_life = half_life
        self._used: dict[str, float] = {}
        self._at: float | None = None

    @classmethod
    def restored(cls, half_life: float, used: Mapping[str, float], at: float) -> FairShare:
        """Return averages restored from `all_used` at an instant. The next `advance` continues from there."""
        fair = cls(half_life)
        fair._used, fair._at = dict(used), at
        return fair

    @property
    def all_used(self) -> Mapping[str, float]:
        """The part of the cluster that each account has used over quota, on average."""
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
        """Follow a step of the clock of `advance`, which is no elapsed time."""
        if self._at is not None:
            self._at += by

    def past(self, account: str, units: int, capacity: int, seconds: float) -> None:
        """Count use over quota that began so many seconds ago, after a restart of the hub."""
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
    """Return the rank of an account in the order of service: the least first, weight 0 last."""
    return used / account.quota.weight if account.quota.weight > 0 else math.inf


def _part(units: int, capacity: int) -> float:
    # lent units can be in use twice, so the part can be more than 1
    return units / capacity if capacity > 0 else 0.0


Spawn = TypeVar("Spawn")


@dataclass(frozen=True)
class Asking(Generic[Spawn]):
    """Waiting spawn with its request."""

    spawn: Spawn
    account: Account
    units: int
    """Units over all its GPUs."""


def ordered(asking: Iterable[Asking[Spawn]], usage: QuotaUsage, fair: FairShare, capacity: int) -> list[Spawn]:
    """Return the spawns in the order of service. ``asking``: in order of arrival.

    A spawn is in quota if its account's guarantee holds it beside the account's earlier spawns. Spawns in quota come
    first, in order of arrival. Then the account with the least recent use over quota, by its weight, is served next;
    each service counts at once. ``capacity``: units of all GPUs.
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
