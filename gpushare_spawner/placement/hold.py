"""Holds of waiting requests: the GPUs kept for a request, and the node that needs the fewest freed units.

Reservations of placed spawns are in spawner/queue/reservations.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.placement.capacity import FreeCapacity, Rated
from gpushare_spawner.placement.node import GpuCapacity, NodeCapacity, Requested
from gpushare_spawner.placement.request import ByLayer, Demand, PlacementRequest, layer_on

RATED_AT_ONCE = 100
"""Nodes that are rated in one step: about 1 ms."""


@dataclass(frozen=True)
class NodeHold:
    """GPUs of a node that are kept for a request. No other request gets units that become free there."""

    node: str
    gpus: tuple[str, ...]
    """UUIDs."""
    units: int
    """Units of 1 % on each of them."""
    requested: Requested
    """CPU, memory and pods of the node."""
    layer: LayerName = LayerName.NATIVE
    """Sharing layer of the request. A GPU with sessions of another layer is kept whole: these sessions must end."""
    by_layer: ByLayer = ()
    """See `Demand.by_layer`."""

    @classmethod
    def of(cls, request: PlacementRequest, node: str, gpus: tuple[str, ...]) -> NodeHold:
        """Return the hold of a request for these GPUs."""
        requested = Requested(request.cpu, request.memory, 1)
        return cls(node, gpus, request.share.units, requested, request.layer, request.by_layer)

    def layer_on(self, model: str) -> LayerName:
        """Return the sharing layer of the request on GPUs of this model."""
        return layer_on(model, self.layer, self.by_layer)


@dataclass(frozen=True)
class LeastLacking:
    """Rating of nodes that could take a demand if sessions there ended: the fewest needed units come first.

    Nodes that lack CPU, memory or pods come last: the amount that a session's end frees is unknown.
    """

    def admits(self, demand: Demand, node: NodeCapacity) -> bool:
        """Return whether the node could take the demand if all its sessions ended: healthy GPUs, CPU and memory."""
        could_have = node.resources.sessions_can_leave(demand.cpu, demand.memory)
        return could_have and node.name not in demand.ineligible and bool(_candidates(demand, node))

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        """Rate by the kinds of missing resources, then the missing units, then the first GPU by index."""
        lacking, gpus = min(_candidates(demand, node), key=lambda candidate: (candidate[0], candidate[1][0].preference))
        free = node.resources
        short = free.lacks_cpu(demand.cpu) + free.lacks_memory(demand.memory) + free.lacks_pods()
        return Rated((short, lacking, gpus[0].rank), tuple(gpu.uuid for gpu in gpus))


LEAST_LACKING = LeastLacking()


def cheapest_claim(capacity: FreeCapacity, request: PlacementRequest) -> NodeHold | None:
    """Return the GPUs that need the fewest freed units for a request; None if it can fit on no node."""
    best = capacity.best(request.demand, LEAST_LACKING, request.left_out, request.node)
    return NodeHold.of(request, best.node, best.gpus) if best is not None else None


def able_nodes(capacity: FreeCapacity, request: PlacementRequest) -> Set[str]:
    """Return the nodes that could take a request if all sessions there ended."""
    return capacity.admitted(request.demand, LEAST_LACKING, request.node)


def looking_for_claim(capacity: FreeCapacity, request: PlacementRequest) -> Iterator[None]:
    """Prepare `cheapest_claim` and `able_nodes` in steps."""
    while not request.node and capacity.prepare(request.demand, LEAST_LACKING, RATED_AT_ONCE):
        yield


def _candidates(demand: Demand, node: NodeCapacity) -> list[tuple[int, list[GpuCapacity]]]:
    """Return the missing units and the GPUs with the fewest missing units, for each suitable model."""
    candidates = []
    for model, gpus in node.healthy.items():
        able = [gpu for gpu in gpus if gpu.capacity >= demand.units]
        if demand.count and demand.accepts(model) and len(able) >= demand.count:
            able.sort(key=lambda gpu: (max(0, demand.units - gpu.free), gpu.preference))
            chosen = able[: demand.count]
            candidates.append((sum(max(0, demand.units - gpu.free) for gpu in chosen), chosen))
    return candidates
