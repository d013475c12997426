"""Obstacles that keep nodes from a demand, and the reasons why no GPU can take a request. Pure data.

capacity.py counts the obstacles of all nodes, and `capacity.explain` sums them up. It leaves unhealthy and cordoned
GPUs out of a node's free units (`GpuCapacity.offered` in node.py). The sentences are in `wording.spawn_failures`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from gpushare_spawner.model.share import Share
from gpushare_spawner.placement.node import NodeCapacity
from gpushare_spawner.placement.request import UNCONDITIONAL, Conditions, Demand


class Lacking(IntEnum):
    """Resource that a node lacks. The first of several is named."""

    NAMED = 0
    """The demand names neither the node nor any of its GPUs."""
    MODEL = 1
    """None of its GPUs is of a suitable model."""
    ELIGIBLE = 2
    """Its taints or labels keep the pod out."""
    CAPACITY = 3
    """It could not take the demand even if it were empty: too few GPUs, or too few units on them."""
    MOST_CPU = 4
    """It would have too little CPU even if nothing ran there."""
    MOST_MEMORY = 5
    """It would have too little memory even if nothing ran there."""
    HEALTH = 6
    """It could take the demand if it were empty and all its GPUs were healthy."""
    CORDON = 7
    """It could take the demand if it were empty and none of its GPUs were cordoned."""
    UNITS = 8
    """Its GPUs are allocated to others, or the conditions of the demand or of these sessions keep them apart."""
    PODS = 9
    """It runs its maximum of pods."""
    CPU = 10
    MEMORY = 11


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Reason why a node cannot take a demand. Nodes in the same situation have equal obstacles."""

    lacking: Lacking
    models: tuple[str, ...] = ()
    """MODEL: the models that it has, sorted."""
    suitable: int = 0
    """GPUs of suitable models, including unhealthy GPUs."""
    most_units: int = 0
    """The most units that one suitable GPU could give if it were empty."""
    most_count: int = 0
    """GPUs of one model, healthy and not cordoned, that could give the units if they were empty."""
    free_units: int = 0
    """The most units that are free on one of these GPUs."""
    free_count: int = 0
    """Whole GPUs of one model that are free."""
    left: int = 0
    """PODS, CPU (millicores), MEMORY (bytes): free on the node. MOST_CPU, MOST_MEMORY: free on the empty node."""


def fits(demand: Demand, node: NodeCapacity) -> bool:
    """Return whether a node can take a demand now."""
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
    named = [gpu for gpu in node.gpus if demand.conditions.name(gpu.uuid, node.name)]
    if not named:
        return Obstacle(Lacking.NAMED)
    suitable = [gpu for gpu in named if demand.accepts(gpu.model)]
    if not suitable:
        return Obstacle(Lacking.MODEL, models=tuple(sorted({gpu.model for gpu in node.gpus})))
    able = [gpu for gpu in suitable if gpu.capacity >= demand.units]
    if_healthy = max(Counter(gpu.model for gpu in able).values(), default=0)
    able = [gpu for gpu in able if gpu.healthy]
    if_uncordoned = max(Counter(gpu.model for gpu in able).values(), default=0)
    able = [gpu for gpu in able if gpu.offered]
    counts = Counter(gpu.model for gpu in able)
    free = Counter(gpu.model for gpu in able if gpu.free >= demand.units)
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
        free_count=max(free.values(), default=0),
        left=max(0, left.get(lacking) or 0),
    )


def _units_free(demand: Demand, node: NodeCapacity) -> bool:
    if not demand.count:
        return True
    for model, free in node.most_free.items():
        # the most free units come first
        enough = len(free) >= demand.count and free[demand.count - 1] >= demand.least_units
        if enough and demand.accepts(model) and (not demand.last_units or free[demand.count - 2] >= demand.units):
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
    NEIGHBOURS = "neighbours"
    """The share would fit but for its rules for other sessions on its GPUs, or for theirs."""
    NOT_NAMED = "not-named"
    """No agent reports the GPU or the nodes that the template names."""
    NOT_ADMITTED = "not-admitted"
    """Only nodes that just rejected a pod of this request have the units."""


PASSING = frozenset(
    {Reason.FULL, Reason.UNHEALTHY, Reason.CORDONED, Reason.NODES_FULL, Reason.NEIGHBOURS, Reason.NOT_ADMITTED}
)


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
    conditions: Conditions = UNCONDITIONAL
    """NEIGHBOURS, NOT_NAMED and FULL: the conditions of the request that have an effect now."""

    @property
    def may_pass(self) -> bool:
        """Whether waiting can help: until a session ends or a GPU becomes healthy. Other reasons need an admin."""
        return self.reason in PASSING
