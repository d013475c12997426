"""Why one node cannot take a demand now, as data. unplaceable.py sums these up over all nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum

from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.placement.node_capacity import NodeCapacity
from gpushare_spawner.placement.request import Demand


class Lacking(IntEnum):
    """What a node lacks; of several the first is named."""

    MODEL = 1
    """None of its GPUs is of a model that will do."""
    ELIGIBLE = 2
    """Its taints or labels keep the pod out."""
    CAPACITY = 3
    """Even if it were empty it could not take the demand: too few GPUs, or too few units on them."""
    MOST_CPU = 4
    """Even if nothing ran there it would have too little CPU."""
    MOST_MEMORY = 5
    """Even if nothing ran there it would have too little memory."""
    HEALTH = 6
    """It could take the demand if it were empty and all its GPUs were healthy."""
    CORDON = 7
    """It could take the demand if it were empty and none of its GPUs were cordoned."""
    UNITS = 8
    """Its GPUs are allocated to others."""
    PODS = 9
    """It runs as many pods as it may."""
    CPU = 10
    MEMORY = 11


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a node cannot take a demand. Nodes in the same situation give equal obstacles."""

    lacking: Lacking
    models: tuple[str, ...] = ()
    """MODEL: the models that it has, sorted."""
    suitable: int = 0
    """GPUs of models that will do, unhealthy ones too."""
    most_units: int = 0
    """The most units that one of those could give if it were empty."""
    most_count: int = 0
    """GPUs of one model, healthy and not cordoned, that could give the units if they were empty."""
    free_units: int = 0
    """The most units that are free on one of those."""
    free_count: int = 0
    """Whole GPUs of one model that are free."""
    left: int = 0
    """PODS, CPU (millicores), MEMORY (bytes): what the node has left. MOST_CPU, MOST_MEMORY: what it has at all."""


def fits(demand: Demand, node: NodeCapacity) -> bool:
    """Whether a node can take a demand now."""
    return _lacking_resource(demand, node) is None and _units_free(demand, node) and node.name not in demand.ineligible


def obstacle_of(demand: Demand, node: NodeCapacity) -> Obstacle:
    """Return why a node cannot take a demand now. Raises ValueError for a node that can."""
    if not _units_free(demand, node):
        lacking = Lacking.UNITS
    elif (resource := _lacking_resource(demand, node)) is not None:
        lacking = resource
    elif node.name in demand.ineligible:
        lacking = Lacking.ELIGIBLE
    else:
        raise ValueError(f"node {node.name} can take {demand}")
    suitable = [gpu for gpu in node.gpus if demand.accepts(gpu.model)]
    if not suitable:
        return Obstacle(Lacking.MODEL, models=tuple(sorted({gpu.model for gpu in node.gpus})))
    able = [gpu for gpu in suitable if gpu.capacity >= demand.units]
    if_healthy = max(Counter(gpu.model for gpu in able).values(), default=0)
    able = [gpu for gpu in able if gpu.healthy]
    if_uncordoned = max(Counter(gpu.model for gpu in able).values(), default=0)
    able = [gpu for gpu in able if gpu.offered]
    counts = Counter(gpu.model for gpu in able)
    whole = Counter(gpu.model for gpu in able if gpu.free >= UNITS_PER_GPU)
    most_count = max(counts.values(), default=0)
    if node.name in demand.ineligible:
        lacking = Lacking.ELIGIBLE
    elif if_healthy < demand.count:
        lacking = Lacking.CAPACITY
    elif not node.resources.can_ever_have(demand.cpu, 0):
        lacking = Lacking.MOST_CPU
    elif not node.resources.can_ever_have(0, demand.memory):
        lacking = Lacking.MOST_MEMORY
    elif if_uncordoned < demand.count:
        lacking = Lacking.HEALTH
    elif most_count < demand.count:
        lacking = Lacking.CORDON
    left = {
        Lacking.PODS: node.resources.pods,
        Lacking.CPU: node.resources.cpu,
        Lacking.MEMORY: node.resources.memory,
        Lacking.MOST_CPU: node.resources.most_cpu,
        Lacking.MOST_MEMORY: node.resources.most_memory,
    }
    return Obstacle(
        lacking,
        suitable=len(suitable),
        most_units=max(gpu.capacity for gpu in suitable),
        most_count=most_count,
        free_units=max((gpu.free for gpu in able), default=0),
        free_count=max(whole.values(), default=0),
        left=max(0, left.get(lacking) or 0),
    )


def _units_free(demand: Demand, node: NodeCapacity) -> bool:
    if not demand.count:
        return True
    for model, free in node.most_free.items():
        if demand.accepts(model) and len(free) >= demand.count and free[demand.count - 1] >= demand.units:
            return True
    return False


def _lacking_resource(demand: Demand, node: NodeCapacity) -> Lacking | None:
    free = node.resources
    if free.lacks_cpu(demand.cpu):
        return Lacking.CPU
    if free.lacks_memory(demand.memory):
        return Lacking.MEMORY
    if free.lacks_pods():
        return Lacking.PODS
    return None
