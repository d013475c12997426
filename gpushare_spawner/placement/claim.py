"""What is kept free for a request that waits, and on which node least has to become free for it."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.placement.capacity import FreeCapacity, Rated
from gpushare_spawner.placement.node import GpuCapacity, NodeCapacity, Requested
from gpushare_spawner.placement.request import ByLayer, Demand, PlacementRequest, layer_on

RATED_AT_ONCE = 100
"""Nodes that are rated in one piece: about 1 ms."""


@dataclass(frozen=True)
class NodeHold:
    """GPUs of a node that are kept for a request: nobody else gets what comes free there."""

    node: str
    gpus: tuple[str, ...]
    """UUIDs."""
    units: int
    """Units of 1 % on each of them."""
    requested: Requested
    """CPU, memory and pods of the node."""
    layer: LayerName = LayerName.NATIVE
    """The sharing layer of the request. All of a GPU that has sessions of another layer is kept: they must end."""
    by_layer: ByLayer = ()
    """See `Demand.by_layer`."""

    @classmethod
    def of(cls, request: PlacementRequest, node: str, gpus: tuple[str, ...]) -> NodeHold:
        """The claim of a request for these GPUs."""
        requested = Requested(request.cpu, request.memory, 1)
        return cls(node, gpus, request.share.units, requested, request.layer, request.by_layer)

    def layer_on(self, model: str) -> LayerName:
        """The sharing layer of the request on GPUs of this model."""
        return layer_on(model, self.layer, self.by_layer)


@dataclass(frozen=True)
class LeastLacking:
    """Rates nodes that could take a demand if sessions there ended: those on which least has to become free come first.

    What lacks CPU, memory or pods comes last: how much of them a session's end frees is not known.
    """

    def admits(self, demand: Demand, node: NodeCapacity) -> bool:
        """Whether the node could take the demand if all sessions there ended: its healthy GPUs, its CPU and memory."""
        could_have = node.resources.sessions_can_leave(demand.cpu, demand.memory)
        return could_have and node.name not in demand.ineligible and bool(_candidates(demand, node))

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        """How many kinds of resources lack, how many units lack, and the first by index."""
        lacking, gpus = min(_candidates(demand, node), key=lambda found: (found[0], found[1][0].preference))
        free = node.resources
        short = free.lacks_cpu(demand.cpu) + free.lacks_memory(demand.memory) + free.lacks_pods()
        return Rated((short, lacking, gpus[0].rank), tuple(gpu.uuid for gpu in gpus))


LEAST_LACKING = LeastLacking()


def cheapest_claim(capacity: FreeCapacity, request: PlacementRequest) -> NodeHold | None:
    """Return the GPUs of which least has to become free for a request to fit; None: it can fit nowhere."""
    best = capacity.best(request.demand, LEAST_LACKING, request.left_out, request.node)
    return NodeHold.of(request, best.node, best.gpus) if best is not None else None


def able_nodes(capacity: FreeCapacity, request: PlacementRequest) -> Set[str]:
    """Return the nodes that could take a request if all sessions there ended."""
    return capacity.admitted(request.demand, LEAST_LACKING, request.node)


def looking_for_claim(capacity: FreeCapacity, request: PlacementRequest) -> Iterator[None]:
    """Do in pieces what `cheapest_claim` and `able_nodes` need."""
    while not request.node and capacity.prepare(request.demand, LEAST_LACKING, RATED_AT_ONCE):
        yield


def _candidates(demand: Demand, node: NodeCapacity) -> list[tuple[int, list[GpuCapacity]]]:
    """Units that lack, and the GPUs on which least lacks, for each model that will do."""
    found = []
    for model, gpus in node.healthy.items():
        able = [gpu for gpu in gpus if gpu.capacity >= demand.units]
        if demand.count and demand.accepts(model) and len(able) >= demand.count:
            able.sort(key=lambda gpu: (max(0, demand.units - gpu.free), gpu.preference))
            chosen = able[: demand.count]
            found.append((sum(max(0, demand.units - gpu.free) for gpu in chosen), chosen))
    return found
