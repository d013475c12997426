"""Who would get what now if everybody wanted the GPU, and who owns what after somebody left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from gpushare_spawner.placement.holding import Holding


def guaranteed_units(capacity: int, holdings: Iterable[Holding]) -> dict[str, int]:
    """Guaranteed units of each session on one GPU of ``capacity`` units.

    Owned units come first, as far as each session's tier leaves them. What is left of the capacity goes to borrowed
    units, the oldest session first. As long as the owned units fit into the capacity, the sum never exceeds it.
    """
    oldest_first = sorted(holdings, key=lambda holding: holding.age)
    guaranteed = {holding.session: min(holding.owned_units, holding.effective_units) for holding in oldest_first}
    left = max(0, capacity - sum(guaranteed.values()))
    for holding in oldest_first:
        more = min(left, holding.effective_units - guaranteed[holding.session])
        guaranteed[holding.session] += more
        left -= more
    return guaranteed


def settle(capacities: Mapping[str, int], holdings: Iterable[Holding]) -> dict[str, int]:
    """New ``borrowed_units`` of the sessions that come to own borrowed units, because their owner is gone.

    ``capacities`` has the units of each GPU by UUID. The oldest borrower is served first. A session on several GPUs
    owns the same on each of them, so it gains what all of them can give. Sessions that gain nothing are left out.
    """
    oldest_first = sorted(holdings, key=lambda holding: holding.age)
    owned: defaultdict[str, int] = defaultdict(int)
    for holding in oldest_first:
        for gpu in holding.gpus:
            owned[gpu] += holding.owned_units
    settled: dict[str, int] = {}
    for holding in oldest_first:
        gain = min([holding.borrowed_units, *(capacities.get(gpu, 0) - owned[gpu] for gpu in holding.gpus)])
        if gain > 0:
            settled[holding.session] = holding.borrowed_units - gain
            for gpu in holding.gpus:
                owned[gpu] += gain
    return settled
