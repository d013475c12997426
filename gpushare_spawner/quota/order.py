"""The order of spawns that wait: those in quota first, then the others by fair share."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gpushare_spawner.quota.account import Account
from gpushare_spawner.quota.fair_share import FairShare, rank
from gpushare_spawner.quota.usage import Left, QuotaUsage, pool_of

Spawn = TypeVar("Spawn")


@dataclass(frozen=True)
class Asking(Generic[Spawn]):
    """A spawn that waits, and what it asks for."""

    spawn: Spawn
    account: Account
    units: int
    """Over all its GPUs."""


def ordered(asking: Iterable[Asking[Spawn]], usage: QuotaUsage, fair: FairShare, capacity: int) -> list[Spawn]:
    """Return the spawns in the order in which they are served. ``asking``: first come first.

    In quota is each that its account's guarantee holds beside the earlier ones of the account; these come first, in the
    order in which they came. Of the others the account with the least use over quota recently, by its weight, is served
    next; what it is served counts at once. ``capacity``: units of all GPUs.
    """
    first, others = divided(asking, usage)
    beyond: dict[str, deque[tuple[int, Asking[Spawn]]]] = {}
    for number, one in enumerate(others):
        beyond.setdefault(one.account.key, deque()).append((number, one))
    return [one.spawn for one in first] + list(_by_fair_share(beyond, fair, capacity))


def divided(asking: Iterable[Asking[Spawn]], usage: QuotaUsage) -> tuple[list[Asking[Spawn]], list[Asking[Spawn]]]:
    """Return the spawns that are in quota, and those over quota; in both the first come first."""
    left: dict[str, Left] = {}
    first: list[Asking[Spawn]] = []
    others: list[Asking[Spawn]] = []
    for one in asking:
        pool = pool_of(one.account)
        if pool not in left:
            left[pool] = usage.left(one.account).copy()
        (first if left[pool].take(one.account, one.units) else others).append(one)
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
        _, one = waiting.popleft()
        yield one.spawn
        if waiting:
            used[key] += fair.penalty(one.units, capacity)
            number, following = waiting[0]
            heapq.heappush(heap, (rank(following.account, used[key]), number, key))
