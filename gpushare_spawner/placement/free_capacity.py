"""The GPUs of all nodes, and what is left on GPUs and nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import GpuReport, in_order_of_claim
from gpushare_spawner.placement.capacity_index import Best, CapacityIndexes, Rating, admission
from gpushare_spawner.placement.node_capacity import GpuCapacity, NodeCapacity
from gpushare_spawner.placement.node_resources import UNKNOWN, NodeResources
from gpushare_spawner.placement.obstacle import Obstacle, fits, obstacle_of
from gpushare_spawner.placement.request import Demand

NODES_AT_ONCE = 1000
"""Nodes for which a rating is forgotten in one piece: less than 1 ms."""


class FreeCapacity:
    """What is left on GPUs and nodes, kept up to date by what changes.

    Strategies read it, and find the best node with `best`. Only the ledger changes it.
    """

    def __init__(self) -> None:
        self._gpus: dict[str, GpuCapacity] = {}
        self._nodes: dict[str, NodeCapacity] = {}
        self._told: dict[str, dict[str, GpuReport]] = {}
        self._resources: dict[str, NodeResources] = {}
        self._claims: dict[str, set[str]] = {}
        self._indexes = CapacityIndexes(self._nodes)

    @property
    def gpus(self) -> Mapping[str, GpuCapacity]:
        """Every GPU by its UUID, unhealthy ones too."""
        return MappingProxyType(self._gpus)

    @property
    def nodes(self) -> Mapping[str, NodeCapacity]:
        """Every node that has GPUs, by its name."""
        return MappingProxyType(self._nodes)

    @property
    def version(self) -> int:
        """A number that changes whenever something about a node changes."""
        return self._indexes.version

    def best(
        self, demand: Demand, rating: Rating, left_out: frozenset[str] = frozenset(), only: str = ""
    ) -> Best | None:
        """Return the node with the best rating that can take the demand, and its GPUs; None: no node can.

        An `AdmittingRating` says itself which nodes it rates.

        ``left_out``: nodes that will not do this time. ``only``: the only one that will. Only nodes that have changed
        since the last call with an equal demand and rating are rated again.
        """
        if not only:
            return self._indexes.of(demand, rating).best(left_out)
        node = self._left_for(demand, only)
        if node is None or only in left_out or not admission(rating)(demand, node):
            return None
        return Best(only, rating.rate(demand, node).gpus)

    def admitted(self, demand: Demand, rating: Rating, only: str = "") -> Set[str]:
        """Return the nodes among which `best` chooses."""
        if not only:
            return self._indexes.of(demand, rating).admitted()
        node = self._left_for(demand, only)
        return {only} if node is not None and admission(rating)(demand, node) else frozenset()

    def prepare(self, demand: Demand, rating: Rating, limit: int) -> int:
        """Rate at most ``limit`` nodes for later calls of `best`; return how many are left."""
        return self._indexes.of(demand, rating).refresh(limit)

    def forgetting(self, rating: object) -> Iterator[None]:
        """Forget in pieces what was computed for a rating that will not be asked for again."""
        self._indexes.retire(rating)
        nodes = list(self._nodes.values())
        for start in range(0, len(nodes), NODES_AT_ONCE):
            for node in nodes[start : start + NODES_AT_ONCE]:
                node.derived.pop(rating, None)
            yield

    def prepare_obstacles(self, demand: Demand, limit: int) -> int:
        """Find the obstacles of at most ``limit`` nodes for later calls of `obstacles`; return how many are left."""
        return self._indexes.explain(demand, limit)

    def obstacles(self, demand: Demand, only: str = "") -> tuple[Mapping[Obstacle, int], int]:
        """Return how many nodes have which obstacle, and how many can take the demand; ``only``: of this node alone."""
        if not only:
            return self._indexes.obstacles(demand)
        node = self._left_for(demand, only)
        if node is None:
            return {}, 0
        return ({}, 1) if fits(demand, node) else ({obstacle_of(demand, node): 1}, 0)

    def reports(self, name: str) -> Sequence[GpuReport]:
        """Return the GPUs of a node as they were reported; none for an unknown node."""
        node = self._nodes.get(name)
        return [self._told[name][gpu.uuid] for gpu in node.gpus] if node is not None else []

    # -- for the ledger --

    def put_node(self, name: str, gpus: Iterable[GpuReport]) -> Sequence[str]:
        """Set the GPUs of a node. Return the UUIDs of GPUs that are new or changed: nothing is taken off them yet."""
        told: dict[str, GpuReport] = {}
        for gpu in sorted(gpus, key=lambda gpu: (gpu.index, gpu.uuid)):
            told.setdefault(gpu.uuid, gpu)
        before = self._told.get(name, {})
        if list(map(_essence, before.values())) == list(map(_essence, told.values())):
            return ()
        rebuilt = {name}
        for uuid in before.keys() - told.keys():
            nodes = self._claims[uuid]
            nodes.discard(name)
            rebuilt |= nodes
            if not nodes:
                del self._claims[uuid]
        for uuid in told:
            rebuilt |= self._claims.setdefault(uuid, set())
            self._claims[uuid].add(name)
        if told:
            self._told[name] = told
        else:
            self._told.pop(name, None)
        return [uuid for node in sorted(rebuilt) for uuid in self._rebuild(node)]

    def drop_node(self, name: str) -> Sequence[str]:
        """Forget a node. Return the UUIDs of GPUs that another node has reported too: nothing is taken off them yet."""
        return self.put_node(name, ())

    def set_resources(self, name: str, resources: NodeResources) -> None:
        """Set what is free on a node beside its GPUs; kept for a node that has no GPUs yet."""
        if self._resources.get(name, UNKNOWN) == resources:
            return
        self._resources[name] = resources
        if resources == UNKNOWN:
            del self._resources[name]
        node = self._nodes.get(name)
        if node is not None:
            node.resources = resources
            self._changed(node)

    def update(self, uuid: str, unowned: int, free: int, layer: LayerName | None = None) -> None:
        """Set what is left on a GPU, and the layer of its sessions. Raises KeyError for a GPU that is in no report."""
        gpu = self._gpus[uuid]
        if gpu.mig is not None:
            layer = LayerName.MIG
        if (gpu.unowned, gpu.free, gpu.layer) != (unowned, free, layer):
            gpu.unowned, gpu.free, gpu.layer = unowned, free, layer
            node = self._nodes[gpu.node]
            node.several_layers |= layer not in (None, LayerName.NATIVE)
            self._changed(node)

    def _left_for(self, demand: Demand, name: str) -> NodeCapacity | None:
        node = self._nodes.get(name)
        return node.left_for(demand) if node is not None else None

    def _rebuild(self, name: str) -> Sequence[str]:
        old = self._nodes.pop(name, None)
        for gpu in old.gpus if old is not None else ():
            if self._gpus[gpu.uuid].node == name:
                del self._gpus[gpu.uuid]
        # one GPU that two nodes report is still one GPU
        told = self._told.get(name, {})
        gpus = tuple(_empty(gpu, name) for uuid, gpu in told.items() if self._node_of(uuid) == name)
        if gpus:
            healthy: dict[str, tuple[GpuCapacity, ...]] = {}
            for gpu in gpus:
                self._gpus[gpu.uuid] = gpu
                if gpu.offered:
                    healthy[gpu.model] = (*healthy.get(gpu.model, ()), gpu)
            resources = self._resources.get(name, UNKNOWN)
            several = any(gpu.mig is not None for gpu in gpus)
            node = self._nodes[name] = NodeCapacity(name, gpus, healthy, resources=resources, several_layers=several)
            node.changed()
        self._indexes.changed(name)
        return [gpu.uuid for gpu in gpus]

    def _node_of(self, uuid: str) -> str:
        """Return which of the nodes that report a GPU has it."""
        nodes = self._claims[uuid]
        if len(nodes) == 1:
            return next(iter(nodes))
        return in_order_of_claim({node: self._told[node][uuid] for node in nodes})[0]

    def _changed(self, node: NodeCapacity) -> None:
        node.changed()
        self._indexes.changed(node.name)


def _essence(gpu: GpuReport) -> tuple[object, ...]:
    return (gpu.index, gpu.uuid, gpu.model, gpu.healthy, gpu.cordoned, gpu.capacity_units, gpu.mig, gpu.known_since)


def _empty(gpu: GpuReport, node: str) -> GpuCapacity:
    units = gpu.capacity_units
    rank = (node, gpu.index, gpu.uuid)
    found = GpuCapacity(gpu.uuid, node, gpu.index, gpu.model, gpu.healthy, gpu.cordoned, units, rank, units, units)
    if gpu.mig is not None:
        found.layer, found.mig = LayerName.MIG, gpu.mig.profile
    return found
