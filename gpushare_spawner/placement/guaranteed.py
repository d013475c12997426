"""Who would get what now if everybody wanted the GPU, and who owns what after somebody left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from gpushare_spawner.placement.allocation import Allocation


def guaranteed_units(capacity: int, allocations: Iterable[Allocation]) -> dict[str, int]:
    """Guaranteed units of each session on one GPU of ``capacity`` units.

    Owned units come first, as far as each session's tier leaves them. What is left of the capacity goes to borrowed
    units, the oldest session first. As long as the owned units fit into the capacity, the sum never exceeds it.
    """
    oldest_first = sorted(allocations, key=lambda allocation: allocation.age)
    guaranteed = {
        allocation.session: min(allocation.owned_units, allocation.effective_units) for allocation in oldest_first
    }
    left = max(0, capacity - sum(guaranteed.values()))
    for allocation in oldest_first:
        more = min(left, allocation.effective_units - guaranteed[allocation.session])
        guaranteed[allocation.session] += more
        left -= more
    return guaranteed


def settle(capacities: Mapping[str, int], allocations: Iterable[Allocation]) -> dict[str, int]:
    """New ``borrowed_units`` of the sessions that come to own borrowed units, because their owner is gone.

    ``capacities`` has the units of each GPU by UUID. The oldest borrower is served first. A session on several GPUs
    owns the same on each of them, so it gains what all of them can give. Sessions that gain nothing are left out.
    What a session yields is kept: it counts as owned, and nobody gains it.
    """
    oldest_first = sorted(allocations, key=lambda allocation: allocation.age)
    owned: defaultdict[str, int] = defaultdict(int)
    for allocation in oldest_first:
        for gpu in allocation.gpus:
            owned[gpu] += allocation.share_units if allocation.yields else allocation.owned_units
    settled: dict[str, int] = {}
    for allocation in oldest_first:
        if allocation.yields:
            continue
        gain = min([allocation.borrowed_units, *(capacities.get(gpu, 0) - owned[gpu] for gpu in allocation.gpus)])
        if gain > 0:
            settled[allocation.session] = allocation.borrowed_units - gain
            for gpu in allocation.gpus:
                owned[gpu] += gain
    return settled
