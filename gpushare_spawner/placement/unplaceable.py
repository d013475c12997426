"""Why no GPU can take a placement request: data. The sentences are in `wording.refusals`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpushare_spawner.model.share import Share
from gpushare_spawner.placement.capacity import FreeCapacity, Lacking, Obstacle
from gpushare_spawner.placement.request import PlacementRequest


class Reason(StrEnum):
    """What stands in the way."""

    NO_GPUS = "no-gpus"
    """No agent reports any GPU."""
    NO_MODEL = "no-model"
    """There are GPUs, but none of the models that the template asks for."""
    INELIGIBLE = "ineligible"
    """The nodes that could take the share keep the template's pods out, by taints or labels."""
    UNHEALTHY = "unhealthy"
    """The share would fit if all GPUs were healthy."""
    CORDONED = "cordoned"
    """The share would fit if no GPU were cordoned."""
    TOO_BIG = "too-big"
    """More than any node could ever give, even if it were empty."""
    NODES_TOO_SMALL = "nodes-too-small"
    """Nodes have the GPUs, and would have too little CPU or memory even if nothing ran there."""
    FULL = "full"
    """It would fit, but other sessions have the units now."""
    NODES_FULL = "nodes-full"
    """GPUs have the units, but their nodes have not enough CPU or memory free, or run as many pods as they may."""
    NOT_ADMITTED = "not-admitted"
    """Only nodes that have just not admitted a pod of this request have the units."""


PASSING = frozenset({Reason.FULL, Reason.UNHEALTHY, Reason.CORDONED, Reason.NODES_FULL, Reason.NOT_ADMITTED})


@dataclass(frozen=True)
class Shortage:
    """Nodes whose GPUs have the units, and that lack something else."""

    lacking: Lacking
    """PODS, CPU or MEMORY; MOST_CPU or MOST_MEMORY for nodes that are too small."""
    nodes: int
    most_left: int
    """The most that one of them has left, or has at all: pods, millicores or bytes."""


@dataclass(frozen=True)
class Unplaceable:
    """No GPU can take a share."""

    reason: Reason
    share: Share
    best_units: int = 0
    """FULL: most units (of 1 %) that are free on one suitable GPU."""
    best_count: int = 0
    """FULL: most whole GPUs that are free on one node."""
    most_units: int = 0
    """TOO_BIG: most units that one suitable GPU can give."""
    most_count: int = 0
    """TOO_BIG: most suitable healthy GPUs of one model on one node."""
    suitable: int = 0
    """GPUs of the models that the template asks for."""
    models: tuple[str, ...] = ()
    """NO_MODEL: the models that there are, sorted."""
    cpu: int = 0
    """Millicores that were requested."""
    memory: int = 0
    """Bytes of host memory that were requested."""
    shortages: tuple[Shortage, ...] = ()
    """NODES_FULL: what is missing on the nodes whose GPUs have the units; the shortage of most nodes first.
    NODES_TOO_SMALL: the same of the nodes whose GPUs would do."""
    left_out: tuple[str, ...] = ()
    """NOT_ADMITTED: those nodes, sorted."""

    @property
    def may_pass(self) -> bool:
        """Whether waiting can help: a session has to leave, or a GPU to become healthy. The rest needs an admin."""
        return self.reason in PASSING


def explain(capacity: FreeCapacity, request: PlacementRequest) -> Unplaceable:
    """Return why no GPU can take this request; meant for a request that was not placed."""
    share = request.share
    found, fitting = capacity.obstacles(request.demand, request.node)
    if not found and not fitting:
        return Unplaceable(Reason.NO_GPUS, share)
    if not fitting and all(obstacle.lacking is Lacking.MODEL for obstacle in found):
        models = {model for obstacle in found for model in obstacle.models}
        return Unplaceable(Reason.NO_MODEL, share, models=tuple(sorted(models)))
    suitable = sum(obstacle.suitable * nodes for obstacle, nodes in found.items())
    lacking = {obstacle.lacking for obstacle in found}
    if fitting and request.left_out:
        return Unplaceable(Reason.NOT_ADMITTED, share, suitable=suitable, left_out=tuple(sorted(request.left_out)))
    shortages = _shortages(found, (Lacking.CPU, Lacking.MEMORY, Lacking.PODS))
    if shortages and not fitting:
        return Unplaceable(
            Reason.NODES_FULL,
            share,
            suitable=suitable,
            shortages=shortages,
            cpu=request.cpu,
            memory=request.memory,
        )
    if fitting or Lacking.UNITS in lacking:
        full = [obstacle for obstacle in found if obstacle.lacking in (Lacking.UNITS, Lacking.HEALTH, Lacking.CORDON)]
        units = max((obstacle.free_units for obstacle in full), default=0)
        count = max((obstacle.free_count for obstacle in full), default=0)
        if fitting:
            units, count = max(units, share.units), max(count, share.count)
        return Unplaceable(Reason.FULL, share, best_units=max(units, 0), best_count=count, suitable=suitable)
    if Lacking.CORDON in lacking:
        return Unplaceable(Reason.CORDONED, share, suitable=suitable)
    if Lacking.HEALTH in lacking:
        return Unplaceable(Reason.UNHEALTHY, share, suitable=suitable)
    if Lacking.ELIGIBLE in lacking:
        return Unplaceable(Reason.INELIGIBLE, share, suitable=suitable)
    too_small = _shortages(found, (Lacking.MOST_CPU, Lacking.MOST_MEMORY))
    if too_small:
        return Unplaceable(
            Reason.NODES_TOO_SMALL,
            share,
            suitable=suitable,
            shortages=too_small,
            cpu=request.cpu,
            memory=request.memory,
        )
    most_units = max(obstacle.most_units for obstacle in found)
    most_count = max(obstacle.most_count for obstacle in found)
    return Unplaceable(Reason.TOO_BIG, share, most_units=most_units, most_count=most_count, suitable=suitable)


def _shortages(found: Mapping[Obstacle, int], kinds: Iterable[Lacking]) -> tuple[Shortage, ...]:
    shortages = []
    for lacking in kinds:
        nodes = {obstacle: count for obstacle, count in found.items() if obstacle.lacking is lacking}
        if nodes:
            most = max(obstacle.left for obstacle in nodes)
            shortages.append(Shortage(lacking, sum(nodes.values()), most))
    return tuple(sorted(shortages, key=lambda shortage: -shortage.nodes))
