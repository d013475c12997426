"""What would be free on some nodes if announced idle actions happened."""

from __future__ import annotations

from dataclasses import replace

from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.placement.allocation import Allocation
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.obstacle import fits
from gpushare_spawner.placement.request import PlacementRequest


class SupposedLedger:
    """Copies of the nodes for which something is supposed. The ledger that they are copied from does not change."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._nodes: dict[str, Ledger] = {}

    def happens(self, session: str, announced: Notice) -> str | None:
        """Count the units that an idle action frees; return their node, None where it frees none."""
        known = self._ledger.allocations.get(session)
        if known is None or not known.gpus:
            return None
        gpu = self._ledger.capacity.gpus.get(known.gpus[0])
        if gpu is None:
            return None
        node = self._node(gpu.node)
        allocation = node.allocations.get(session)
        if allocation is None:
            return None
        if announced.tier is Tier.STOPPED:
            node.remove(session)
        elif announced.effective_units < allocation.effective_units:
            node.replace(allocation.with_effective(announced.effective_units))
        else:
            return None
        return gpu.node

    def place(self, name: str, request: PlacementRequest, node: str) -> bool:
        """Count a request as placed on one node under this name; return whether it fits there."""
        if request.node not in ("", node) or node in request.left_out:
            return False
        ledger = self._node(node)
        if not fits(request.demand, ledger.capacity.nodes[node]):
            return False
        placement = ledger.place(replace(request, node=node))
        if placement is None:
            return False
        units = request.share.units
        ledger.add(Allocation(name, placement.gpus, units, placement.borrowed, units))
        return True

    def _node(self, name: str) -> Ledger:
        if name not in self._nodes:
            self._nodes[name] = self._ledger.of_node(name)
        return self._nodes[name]
