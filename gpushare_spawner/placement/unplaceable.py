"""Reasons why no GPU can take a placement request, as data. The sentences are in `wording.spawn_failures`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpushare_spawner.model.share import Share
from gpushare_spawner.placement.capacity import FreeCapacity, Lacking, Obstacle
from gpushare_spawner.placement.request import PlacementRequest


class Reason(StrEnum):
    """Reason why no GPU can take a request."""

    NO_GPUS = "no-gpus"
    """No agent reports any GPU."""
    NO_MODEL = "no-model"
    """No GPU is of a model that the template requests."""
    INELIGIBLE = "ineligible"
    """Taints or labels exclude the template's pods from the nodes that could take the share."""
    UNHEALTHY = "unhealthy"
    """The share would fit if all GPUs were healthy."""
    CORDONED = "cordoned"
    """The share would fit if no GPU were cordoned."""
    TOO_BIG = "too-big"
    """The share is larger than the capacity of any empty node."""
    NODES_TOO_SMALL = "nodes-too-small"
    """Nodes have the GPUs, but too little CPU or memory even if nothing ran there."""
    FULL = "full"
    """The share would fit, but other sessions have the units now."""
    NODES_FULL = "nodes-full"
    """GPUs have the units, but their nodes lack free CPU or memory, or run their maximum of pods."""
    NOT_ADMITTED = "not-admitted"
    """Only nodes that just rejected a pod of this request have the units."""


PASSING = frozenset({Reason.FULL, Reason.UNHEALTHY, Reason.CORDONED, Reason.NODES_FULL, Reason.NOT_ADMITTED})


@dataclass(frozen=True)
class Shortage:
    """Shortage of a node resource on nodes with enough free GPU units."""

    lacking: Lacking
    """PODS, CPU or MEMORY; MOST_CPU or MOST_MEMORY for nodes that are too small."""
    nodes: int
    most_left: int
    """The largest amount that is free on one of these nodes, or that it has in all: pods, millicores or bytes."""


@dataclass(frozen=True)
class Unplaceable:
    """Explanation why no GPU can take a share."""

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
    """GPUs of the models that the template requests."""
    models: tuple[str, ...] = ()
    """NO_MODEL: the models of the cluster, sorted."""
    cpu: int = 0
    """Millicores that were requested."""
    memory: int = 0
    """Bytes of host memory that were requested."""
    shortages: tuple[Shortage, ...] = ()
    """NODES_FULL: the shortages of nodes with enough free GPU units; the shortage of most nodes first.
    NODES_TOO_SMALL: the same for nodes with suitable GPUs.
    """
    left_out: tuple[str, ...] = ()
    """NOT_ADMITTED: the excluded nodes, sorted."""

    @property
    def may_pass(self) -> bool:
        """Whether waiting can help: until a session ends or a GPU becomes healthy. Other reasons need an admin."""
        return self.reason in PASSING


def explain(capacity: FreeCapacity, request: PlacementRequest) -> Unplaceable:
    """Return why no GPU can take this request. The request must not be placed."""
    share = request.share
    obstacles, fitting = capacity.obstacles(request.demand, request.node)
    if not obstacles and not fitting:
        return Unplaceable(Reason.NO_GPUS, share)
    if not fitting and all(obstacle.lacking is Lacking.MODEL for obstacle in obstacles):
        models = {model for obstacle in obstacles for model in obstacle.models}
        return Unplaceable(Reason.NO_MODEL, share, models=tuple(sorted(models)))
    suitable = sum(obstacle.suitable * nodes for obstacle, nodes in obstacles.items())
    lacking = {obstacle.lacking for obstacle in obstacles}
    if fitting and request.left_out:
        return Unplaceable(Reason.NOT_ADMITTED, share, suitable=suitable, left_out=tuple(sorted(request.left_out)))
    shortages = _shortages(obstacles, (Lacking.CPU, Lacking.MEMORY, Lacking.PODS))
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
        full = [
            obstacle for obstacle in obstacles if obstacle.lacking in (Lacking.UNITS, Lacking.HEALTH, Lacking.CORDON)
        ]
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
    too_small = _shortages(obstacles, (Lacking.MOST_CPU, Lacking.MOST_MEMORY))
    if too_small:
        return Unplaceable(
            Reason.NODES_TOO_SMALL,
            share,
            suitable=suitable,
            shortages=too_small,
            cpu=request.cpu,
            memory=request.memory,
        )
    most_units = max(obstacle.most_units for obstacle in obstacles)
    most_count = max(obstacle.most_count for obstacle in obstacles)
    return Unplaceable(Reason.TOO_BIG, share, most_units=most_units, most_count=most_count, suitable=suitable)


def _shortages(obstacles: Mapping[Obstacle, int], kinds: Iterable[Lacking]) -> tuple[Shortage, ...]:
    shortages = []
    for lacking in kinds:
        nodes = {obstacle: count for obstacle, count in obstacles.items() if obstacle.lacking is lacking}
        if nodes:
            most = max(obstacle.left for obstacle in nodes)
            shortages.append(Shortage(lacking, sum(nodes.values()), most))
    return tuple(sorted(shortages, key=lambda shortage: -shortage.nodes))
