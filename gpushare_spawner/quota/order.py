"""Admission of servers to accounts, recent use over quota, and the order of waiting spawns.

Spawns in quota come first, then the others by fair share. reclaim.py chooses the sessions that make way. As in Kueue's
admission fair sharing, usage decays with a half-life and is divided by the weight, and a spawn pays an entry penalty
when it is admitted. As in KAI, usage is measured as a fraction of the whole cluster; of several resources the dominant
share counts, as in DRF (Ghodsi et al., NSDI 2011).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Generic, TypeVar

from gpushare_spawner.model.quota import NOTHING, Resource, ResourceAmounts
from gpushare_spawner.model.template import Template
from gpushare_spawner.quota.accounts import Account, Left, QuotaAccounts, QuotaUsage, pool_of


class Limit(Enum):
    """Limits of a quota that can reject a server."""

    MAXIMUM = "maximum"
    """Maximum amount of a resource."""
    SERVERS = "servers"
    """Maximum number of servers with a GPU."""
    USER_SERVERS = "user-servers"
    """Maximum number of the user's servers with a GPU."""
    PRIORITY = "priority"
    """Priorities of templates."""
    GUARANTEE = "guarantee"
    """Guarantee, for a server that cannot be reclaimed."""


@dataclass(frozen=True)
class LimitExceeded:
    """The limit that another server would exceed."""

    account: Account
    """The server's account, or the group with the limit that contains it."""
    limit: Limit
    most: int
    """The limit, in the unit of `ResourceAmounts`, or as a number of servers."""
    used: int
    """Current use."""
    resource: Resource = Resource.GPU
    """The resource of a maximum."""


@dataclass(frozen=True)
class Admission:
    """The result of an account's admission check for another server."""

    account: Account
    lacking: Sequence[Resource] = ()
    """The resources of which it needs more than is left of the guarantees."""
    left: ResourceAmounts = NOTHING
    """The most of each resource that another server in quota can have."""
    refused: LimitExceeded | None = None
    """None if the account admits the server."""
    needs: ResourceAmounts = NOTHING
    """What the server needs."""

    @property
    def in_quota(self) -> bool:
        """Whether the server would be in quota."""
        return not self.lacking


def admit(
    usage: QuotaUsage, account: Account, user: str, needs: ResourceAmounts, template: Template | None = None
) -> Admission:
    """Return the admission of a user's server: every group that contains the account must admit it too.

    ``template``: whose priority must be allowed; if its servers cannot be reclaimed, they must be within the guarantee.
    """
    left = usage.left(account)
    refused = _refused(usage, account, user) if needs.units else None
    refused = refused or exceeded_amounts(usage, account, needs)
    if template is not None and needs.units and refused is None:
        for level in account.path:
            if template.priority not in level.quota.priorities:
                refused = LimitExceeded(level, Limit.PRIORITY, 0, 0)
        if not template.reclaimable:
            left = usage.left_beside(account)
            refused = refused or beyond_guarantee(usage, account, needs)
    return Admission(account, left.lacking(account, needs), left.of(account), refused, needs)


def beyond_guarantee(usage: QuotaUsage, account: Account, needs: ResourceAmounts) -> LimitExceeded | None:
    """Return the limit on a server that cannot be reclaimed, if it would be beyond the guarantee with these amounts."""
    left = usage.left_beside(account)
    if not left.lacking(account, needs):
        return None
    return LimitExceeded(account, Limit.GUARANTEE, left.of(account).units, 0)


def _refused(usage: QuotaUsage, account: Account, user: str) -> LimitExceeded | None:
    """Return the limit on servers that one more server with a GPU would exceed, or None."""
    for level in account.path:
        of_user, of_all = level.quota.per_user.servers, level.quota.servers
        if of_user is not None and (mine := usage.servers(level, user)) >= of_user:
            return LimitExceeded(level, Limit.USER_SERVERS, of_user, mine)
        if of_all is not None and (servers := usage.servers(level)) >= of_all:
            return LimitExceeded(level, Limit.SERVERS, of_all, servers)
    return None


def exceeded_amounts(usage: QuotaUsage, account: Account, needs: ResourceAmounts) -> LimitExceeded | None:
    """Return the maximum that these amounts more would exceed, or None."""
    for level in account.path:
        for resource, most, used, more in zip(Resource, level.quota.maxima, usage.used(level), needs, strict=True):
            if most is not None and more and used + more > most:
                return LimitExceeded(level, Limit.MAXIMUM, most, used, resource)
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

    def advance(self, now: float, over_quota: Mapping[str, ResourceAmounts], capacity: ResourceAmounts) -> None:
        """Update the averages. ``now``: seconds on any clock that all calls share.

        ``over_quota``: amounts over quota of each account since the last call; ``capacity``: of the whole cluster.
        """
        passed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now if self._at is None else max(self._at, now)
        remaining = self._remaining_part(passed)
        if remaining == 1.0:
            return
        self._used = {key: used * remaining for key, used in self._used.items() if used * remaining > 1e-9}
        for account, amounts in over_quota.items():
            self._add(account, amounts, capacity, 1.0 - remaining)

    def clock_was_set(self, by: float) -> None:
        """Adjust to a step of the clock that `advance` uses. The step does not count as elapsed time."""
        if self._at is not None:
            self._at += by

    def past(self, account: str, amounts: ResourceAmounts, capacity: ResourceAmounts, seconds: float) -> None:
        """Add use over quota that began ``seconds`` ago, after a restart of the hub."""
        self._add(account, amounts, capacity, 1.0 - self._remaining_part(max(0.0, seconds)))

    def admitted(self, account: str, amounts: ResourceAmounts, capacity: ResourceAmounts) -> None:
        """Add the entry penalty of a spawn admitted over quota."""
        self._used[account] = self.used(account) + self.penalty(amounts, capacity)

    def used(self, account: str) -> float:
        """Return the average fraction of the cluster that the account has used over quota."""
        return self._used.get(account, 0.0)

    def penalty(self, amounts: ResourceAmounts, capacity: ResourceAmounts) -> float:
        """Return the entry penalty of a spawn."""
        return amounts.part_of(capacity) * (1.0 - self._remaining_part(PREPAID_SECONDS))

    def _add(self, account: str, amounts: ResourceAmounts, capacity: ResourceAmounts, weight: float) -> None:
        self._used[account] = self.used(account) + amounts.part_of(capacity) * weight

    def _remaining_part(self, seconds: float) -> float:
        return math.pow(0.5, seconds / self.half_life)


def rank(weight: float, used: float) -> float:
    """Return the rank in the order of service of an account. The lowest rank is served first; weight 0 is last."""
    return used / weight if weight > 0 else math.inf


Spawn = TypeVar("Spawn")


@dataclass(frozen=True)
class Asking(Generic[Spawn]):
    """A waiting spawn and its needs."""

    spawn: Spawn
    account: Account
    needs: ResourceAmounts
    """On all its GPUs together."""
    reclaimable: bool = True
    """See `Template.reclaimable`."""


def ordered(
    asking: Iterable[Asking[Spawn]],
    usage: QuotaUsage,
    fair: FairShare,
    capacity: ResourceAmounts,
    excess: Callable[[], Mapping[str, float]] = lambda: {},
) -> list[Spawn]:
    """Return the spawns in the order of service. ``asking`` is in order of arrival.

    A spawn is in quota if it fits into its account's guarantee together with the account's earlier spawns. Spawns in
    quota come first, in order of arrival. After them, the outermost group with the least recent use over quota relative
    to its weight is always served next, within it the team or user with the least, and so on; each spawn that is served
    counts immediately. Those of accounts that lack units of their entitlement come before the others. ``capacity``: the
    amounts of the whole cluster. ``excess``: returns `Entitlements.excess`.
    """
    first, others = divided(asking, usage)
    following = [request for _, request in _FairOrder(usage.accounts, fair, capacity).of(list(enumerate(others)))]
    if len({request.account.key for request in following}) > 1:
        counted = defaultdict(float, excess())
        for request in first:
            counted[request.account.key] += request.needs.units
        before: list[Asking[Spawn]] = []
        after: list[Asking[Spawn]] = []
        for request in following:
            lacks = lacks_half(request, counted)
            counted[request.account.key] += request.needs.units * lacks
            (before if lacks else after).append(request)
        following = before + after
    return [request.spawn for request in (*first, *following)]


def lacks_half(request: Asking[Spawn], excess: Mapping[str, float]) -> bool:
    """Return whether a spawn's account lacks at least half of its units. ``excess``: see `Entitlements.excess`.

    With a smaller part, the account would be farther from its entitlement with the server than without it.
    """
    return -excess[request.account.key] >= request.needs.units / 2 > 0


def divided(asking: Iterable[Asking[Spawn]], usage: QuotaUsage) -> tuple[list[Asking[Spawn]], list[Asking[Spawn]]]:
    """Return the spawns in quota and the spawns over quota, both in order of arrival."""
    left: dict[str, Left] = {}
    first: list[Asking[Spawn]] = []
    others: list[Asking[Spawn]] = []
    for request in asking:
        pool = pool_of(request.account)
        if pool not in left:
            left[pool] = usage.left(request.account).copy()
        in_quota = left[pool].take(request.account, request.needs)
        if not in_quota and not request.reclaimable:
            # it is admitted only within the guarantee, and another server will be over quota then
            in_quota = not usage.left_beside(request.account).lacking(request.account, request.needs)
        (first if in_quota else others).append(request)
    return first, others


Numbered = tuple[int, Asking[Spawn]]
"""A waiting spawn with its number in the order of arrival."""


@dataclass(frozen=True)
class _FairOrder:
    """The order of spawns over quota, among the teams and users of each group."""

    accounts: QuotaAccounts
    fair: FairShare
    capacity: ResourceAmounts

    def of(self, asking: Sequence[Numbered[Spawn]], depth: int = 0) -> Iterator[Numbered[Spawn]]:
        """Yield the spawns of one group in order. ``depth``: the number of groups around it, and itself.

        The group's own servers are an entry beside its teams and users, with weight 1.
        """
        entries: dict[str, list[Numbered[Spawn]]] = {}
        for number, request in asking:
            entry = request.account.entry(depth)
            entries.setdefault(entry.key if entry is not None else "", []).append((number, request))
        heap: list[tuple[float, int, Asking[Spawn], float, float, Iterator[Numbered[Spawn]]]] = []
        for key, requests in entries.items():
            account = requests[0][1].account
            entry = account.entry(depth)
            used = self._used(entry or account, alone=entry is None)
            weight = entry.quota.weight if entry is not None else 1.0
            several = any(request.account.key != key for _, request in requests)
            spawns = self.of(requests, depth + 1) if key and several else iter(requests)
            number, request = next(spawns)
            heap.append((rank(weight, used), number, request, used, weight, spawns))
        heapq.heapify(heap)
        while heap:
            _, number, request, used, weight, spawns = heapq.heappop(heap)
            yield number, request
            following = next(spawns, None)
            if following is not None:
                used += self.fair.penalty(request.needs, self.capacity)
                heapq.heappush(heap, (rank(weight, used), *following, used, weight, spawns))

    def _used(self, account: Account, alone: bool) -> float:
        """Return recent use, with that of the accounts within unless ``alone``."""
        within = () if alone else self.accounts.within(account)
        return self.fair.used(account.key) + sum(self.fair.used(key) for key in within)
