"""Free capacity of GPUs and nodes, and indexes of nodes by rating. obstacles.py: what keeps nodes from a demand.

An index is updated by changes. The ledger (ledger.py) writes the capacity, strategies read it (strategy.py). `explain`
sums up the obstacles of all nodes, as data: the sentences are in `wording.spawn_failures`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import chain, islice, zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import GpuReport, by_first_report
from gpushare_spawner.model.share import NO_NEIGHBOUR_RULES, NeighbourRules
from gpushare_spawner.placement.node import UNKNOWN, GpuCapacity, NodeCapacity, NodeResources
from gpushare_spawner.placement.obstacles import Lacking, Obstacle, Reason, Shortage, Unplaceable, fits, obstacle_of
from gpushare_spawner.placement.request import Demand, PlacementRequest

MOST_ENTRIES = 1_000_000
"""Places and obstacles in all indexes together, of about 450 bytes each; an index counts at least each node once. The
least recently used index is dropped."""


Key = tuple[Any, ...]
"""Sort key of a place; all keys of one rating compare with each other, and a lower one is better."""
Loss = tuple[tuple[int, int], ...]
"""Requests that the cluster can no longer take after a placement: position of the kind of request, and their number.

Kinds without a loss are left out. The rating defines the positions.
"""
Pricing = Callable[[Key, Loss], Key]
"""Returns the key of a place with the price of its loss."""


class Rated(NamedTuple):
    """A place on a node."""

    key: Key
    gpus: tuple[str, ...]
    """UUIDs."""
    loss: Loss = ()


class Rating:
    """How a strategy compares nodes; this one treats all alike. Equal ratings (by ``==``) share an index.

    A rating with a method ``admits(demand, node)`` selects its nodes by it; others rate the nodes that `fits` names. A
    rating with prices is a `PricedRating`.
    """

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        """Rate the best place on an admitted node; equal for equal demands and nodes in equal state."""
        return Rated((), ())


class PricedRating(Rating):
    """Rating of places with a price that depends on the whole cluster and on the `Loss` of a place."""

    @abstractmethod
    def rate_all(self, demand: Demand, node: NodeCapacity) -> Sequence[Rated]:
        """Return the best place for each loss that is possible on an admitted node."""

    @abstractmethod
    def count(self, node: NodeCapacity) -> Sequence[int]:
        """Return the numbers whose sums over all nodes `pricing` needs; equal for nodes in equal state."""

    @abstractmethod
    def pricing(self, totals: Sequence[int]) -> Pricing | None:
        """Return the pricing for the sums of `count` over all nodes; None: no place has a price."""


def admission(rating: Rating) -> Callable[[Demand, NodeCapacity], bool]:
    """Return the filter of the nodes to rate."""
    return getattr(rating, "admits", fits)


def rate_all(rating: Rating, demand: Demand, node: NodeCapacity) -> Sequence[Rated]:
    """Return the places of an admitted node that an index holds."""
    return rating.rate_all(demand, node) if isinstance(rating, PricedRating) else (rating.rate(demand, node),)


UNRATED = Rating()
"""Rating of an index that serves only obstacles."""


class Best(NamedTuple):
    """A node and the UUIDs of its GPUs."""

    node: str
    gpus: tuple[str, ...]


class ChangeLog:
    """Names of changed nodes, in order. The oldest are dropped."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._first = 0

    @property
    def end(self) -> int:
        """Number of changes so far."""
        return self._first + len(self._names)

    def add(self, name: str, retain: int) -> None:
        """Record a change. At least the last ``retain`` changes stay available."""
        self._names.append(name)
        if len(self._names) > 2 * retain + 1000:
            dropped = len(self._names) - retain
            del self._names[:dropped]
            self._first += dropped

    def since(self, position: int) -> list[str] | None:
        """Return the names recorded since a position; None if some are dropped."""
        return self._names[position - self._first :] if position >= self._first else None


class _ChangedNodes:
    """Names of the nodes that changed since they were last processed; at first all nodes."""

    def __init__(self, nodes: Mapping[str, NodeCapacity], changes: ChangeLog) -> None:
        self._nodes = nodes
        self._changes = changes
        self.names: set[str] = set()
        self.all()

    def all(self) -> None:
        """Let all nodes count as changed."""
        self._seen = self._changes.end
        self.names.update(self._nodes)

    def read(self, processed: Iterable[str]) -> set[str]:
        """Return the names, updated from the change log. ``processed``: the names of all nodes processed so far."""
        if self._seen != self._changes.end:
            names = self._changes.since(self._seen)
            # after dropped changes, processed nodes may be gone
            self.names.update(names if names is not None else (*self._nodes, *processed))
            self._seen = self._changes.end
        return self.names


class NodeTotals:
    """Sums over all nodes of the numbers that a rating counts on each."""

    def __init__(self, rating: PricedRating, nodes: Mapping[str, NodeCapacity], changes: ChangeLog) -> None:
        self.rating = rating
        self._nodes = nodes
        self._changed = _ChangedNodes(nodes, changes)
        self._counts: dict[str, Sequence[int]] = {}
        self._totals: list[int] = []

    def refresh(self, limit: int | None = None) -> int:
        """Count at most ``limit`` changed nodes; return the number of nodes that are left."""
        changed = self._changed.read(self._counts)
        chosen = list(islice(changed, limit))
        for name in chosen:
            node = self._nodes.get(name)
            counts = self.rating.count(node) if node is not None else ()
            before = self._counts.pop(name, ())
            if counts:
                self._counts[name] = counts
            if counts != before:
                changes = zip_longest(self._totals, counts, before, fillvalue=0)
                self._totals = [total + new - old for total, new, old in changes]
            changed.discard(name)
        return len(changed)

    def read(self) -> Sequence[int]:
        """Return the sums."""
        self.refresh()
        return self._totals


Entry = tuple[Key, str, tuple[str, ...], Loss]
"""A place in a heap: the key of its rating, its node, its GPUs, its loss."""


class CapacityIndex:
    """Index of the nodes for one demand and one rating: heaps of places, and obstacles of unsuitable nodes.

    The prices of losses change with every placement, and they are the same for all places with equal losses. Therefore
    each loss has its own heap, and prices are added to the best place of each heap only. The next query rates a changed
    node again and skips its old entries.
    """

    def __init__(self, demand: Demand, rating: Rating, nodes: Mapping[str, NodeCapacity], changes: ChangeLog) -> None:
        self._demand = demand
        self._rating = rating
        self._nodes = nodes
        self._changed = _ChangedNodes(nodes, changes)
        self._heaps: dict[Loss, list[Entry]] = {}
        self._entries: dict[str, tuple[Entry, ...]] = {}
        self._live = 0
        """Number of valid entries; `_pushed` counts the outdated entries in the heaps too."""
        self._pushed = 0
        self._unexplained: set[str] | None = None
        """None: obstacles were not requested yet."""
        self._obstacle_of: dict[str, Obstacle] = {}
        self._obstacles: Counter[Obstacle] = Counter()
        self._equal: dict[Obstacle, Obstacle] = {}

    @property
    def size(self) -> int:
        """Number of entries in the heaps, and of nodes with an obstacle."""
        return self._pushed + len(self._obstacle_of)

    @property
    def behind(self) -> int:
        """Number of changed nodes to rate; 0 while most nodes were never rated, as after an error of the rating."""
        changed = len(self._changed_names())
        return changed if changed < len(self._nodes) // 2 else 0

    def restart(self, rating: Rating) -> None:
        """Reset the index for another rating.

        The large containers stay the same objects: `gc.freeze` has excluded them from garbage collection, and new
        containers of the cluster's size would be work for the collector.
        """
        self._rating = rating
        self._changed.all()
        for heap in self._heaps.values():
            heap.clear()
        self._entries.clear()
        self._live = self._pushed = 0
        self._unexplained = None
        self._obstacle_of.clear()
        self._obstacles.clear()
        self._equal.clear()

    def refresh(self, limit: int | None = None) -> int:
        """Rate at most ``limit`` changed nodes; return the number of nodes that are left."""
        changed = self._changed_names()
        if not changed:
            return 0
        chosen = list(islice(changed, limit))
        # many at once: rebuilding the heaps is cheaper than one push each
        at_once = len(chosen) > len(self._entries) // 4
        demand, entries, nodes, admits = self._demand, self._entries, self._nodes, admission(self._rating)
        for name in chosen:
            node = nodes.get(name)
            self._live -= len(entries.pop(name, ()))
            if node is not None and admits(demand, node := node.left_for(demand)):
                places = rate_all(self._rating, demand, node)
                entries[name] = tuple([(place.key, name, place.gpus, place.loss) for place in places])
                self._live += len(places)
                if not at_once:
                    self._push(entries[name])
        # only here: after an error above these nodes are rated again
        changed.difference_update(chosen)
        if self._unexplained is not None:
            self._unexplained.update(chosen)
        if at_once or self._pushed > 2 * self._live + 64:
            self._rebuild()
        return len(changed)

    def _changed_names(self) -> set[str]:
        return self._changed.read(chain(self._entries, self._obstacle_of))

    def _push(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            heappush(self._heaps.setdefault(entry[3], []), entry)
            self._pushed += 1

    def _rebuild(self) -> None:
        for heap in self._heaps.values():
            heap.clear()
        for entries in self._entries.values():
            for entry in entries:
                self._heaps.setdefault(entry[3], []).append(entry)
        for loss, heap in [*self._heaps.items()]:
            heapify(heap)
            if not heap:
                del self._heaps[loss]
        self._pushed = self._live

    def best(self, left_out: frozenset[str], pricing: Pricing | None = None) -> Best | None:
        """Return the best node that is not excluded; None if no node can take the demand."""
        self.refresh()
        heads = [head for heap in self._heaps.values() if (head := self._head(heap, left_out)) is not None]
        if not heads:
            return None
        if pricing is None or len(heads) == 1:
            best = min(heads)
        else:
            best = min(heads, key=lambda head: (pricing(head[0], head[3]), head[1]))
        return Best(best[1], best[2])

    def _head(self, heap: list[Entry], left_out: frozenset[str]) -> Entry | None:
        """Return the best valid entry of a heap, without excluded nodes."""
        aside = []
        head: Entry | None = None
        while heap and head is None:
            entry = heap[0]
            if not any(entry is valid for valid in self._entries.get(entry[1], ())):
                heappop(heap)
                self._pushed -= 1
            elif entry[1] in left_out:
                aside.append(heappop(heap))
            else:
                head = entry
        for entry in aside:
            heappush(heap, entry)
        return head

    def admitted(self) -> Set[str]:
        """Return the nodes that are rated."""
        self.refresh()
        return self._entries.keys()

    def rated(self) -> Iterator[tuple[Key, str]]:
        """Return the keys and nodes of all places, in no order and without prices."""
        self.refresh()
        return ((entry[0], name) for name, entries in self._entries.items() for entry in entries)

    def obstacles(self) -> tuple[Mapping[Obstacle, int], int]:
        """Return the number of nodes for each obstacle, and the number of nodes that can take the demand."""
        self.explain()
        return self._obstacles, len(self._entries)

    def explain(self, limit: int | None = None) -> int:
        """Find the obstacles of at most ``limit`` changed nodes; return the number of nodes that are left."""
        unrated = self.refresh(limit)
        if self._unexplained is None:
            self._unexplained = set(self._nodes) - self._changed.names
        chosen = list(islice(self._unexplained, limit))
        for name in chosen:
            before = self._obstacle_of.pop(name, None)
            if before is not None:
                self._obstacles[before] -= 1
                if not self._obstacles[before]:
                    del self._obstacles[before]
                    self._equal.pop(before, None)
            node = self._nodes.get(name)
            if node is not None and name not in self._entries:
                obstacle = obstacle_of(self._demand, node.left_for(self._demand))
                # nodes in the same situation share one object: fewer objects for the garbage collector
                self._obstacle_of[name] = self._equal.setdefault(obstacle, obstacle)
                self._obstacles[obstacle] += 1
        self._unexplained.difference_update(chosen)
        return unrated + len(self._unexplained)


RATED_AHEAD = 8
"""Changed nodes that a query rates for other demands."""
LEFT_BEHIND = 4
"""Changed nodes that each of these demands keeps for its own next query."""
MOST_AHEAD = 8
"""Other demands for which a query rates nodes, those of the latest queries."""
NODES_AT_ONCE = 1000
"""Nodes for which a rating is dropped in one step: less than 1 ms."""


class FreeCapacity:
    """Free capacity of GPUs and nodes, updated by changes.

    Strategies read it and find the best node with `best`. Only the ledger changes it.
    """

    def __init__(self) -> None:
        self._gpus: dict[str, GpuCapacity] = {}
        self._nodes: dict[str, NodeCapacity] = {}
        self._reported: dict[str, dict[str, GpuReport]] = {}
        self._resources: dict[str, NodeResources] = {}
        self._reporting: dict[str, set[str]] = {}
        self._indexes: OrderedDict[tuple[Demand, Rating], CapacityIndex] = OrderedDict()
        self._retired: dict[Demand, CapacityIndex] = {}
        self._totals: NodeTotals | None = None
        self._changes = ChangeLog()
        self._ahead_at = -1
        """The version at which no node was left to rate ahead."""
        self.labels: Counter[str] = Counter()
        """Labels of sessions, with the number of the sessions."""

    @property
    def gpus(self) -> Mapping[str, GpuCapacity]:
        """All GPUs by UUID, including unhealthy GPUs."""
        return MappingProxyType(self._gpus)

    @property
    def nodes(self) -> Mapping[str, NodeCapacity]:
        """Every node that has GPUs, by its name."""
        return MappingProxyType(self._nodes)

    @property
    def version(self) -> int:
        """Number of changes of nodes so far. While it stays the same, equal calls give equal results."""
        return self._changes.end

    def best(
        self, demand: Demand, rating: Rating, left_out: frozenset[str] = frozenset(), only: str = ""
    ) -> Best | None:
        """Return the node with the best rating that can take the demand, and its GPUs; None if no node can.

        ``left_out``: nodes to exclude from this call. ``only``: the only node to consider. Only nodes that have changed
        since the last call with an equal demand and rating are rated again.
        """
        pricing = rating.pricing(self._totals_of(rating).read()) if isinstance(rating, PricedRating) else None
        if not only:
            best = self._index(demand, rating).best(left_out, pricing)
            self._rate_ahead(rating)
            return best
        places = self._rated_on(only, demand, rating)
        if not places or only in left_out:
            return None
        return Best(only, min(places, key=lambda place: pricing(place.key, place.loss) if pricing else place.key).gpus)

    def admitted(self, demand: Demand, rating: Rating, only: str = "") -> Set[str]:
        """Return the nodes among which `best` chooses."""
        if not only:
            return self._index(demand, rating).admitted()
        return {only} if self._rated_on(only, demand, rating) else frozenset()

    def rated(self, demand: Demand, rating: Rating, only: str = "") -> Iterator[tuple[Key, str]]:
        """Return the keys and nodes of the places among which `best` chooses, in no order and without prices."""
        if not only:
            return self._index(demand, rating).rated()
        return ((place.key, only) for place in self._rated_on(only, demand, rating))

    def _rate_ahead(self, rating: Rating) -> None:
        """Rate a few nodes for other demands, so that the next query for a rare demand does not rate many at once."""
        if self._ahead_at == self.version:
            return
        left = RATED_AHEAD
        for (_, other), index in islice(reversed(self._indexes.items()), MOST_AHEAD):
            more = min(left, index.behind - LEFT_BEHIND) if other == rating else 0
            if more > 0:
                index.refresh(more)
                left -= more
        if left == RATED_AHEAD:
            self._ahead_at = self.version

    def _rated_on(self, name: str, demand: Demand, rating: Rating) -> Sequence[Rated]:
        """Return the places on one node; none if it is unknown or not admitted."""
        demand = self.resolved(demand)
        node = self._left_for(demand, name)
        return rate_all(rating, demand, node) if node is not None and admission(rating)(demand, node) else ()

    def prepare(self, demand: Demand, rating: Rating, limit: int) -> int:
        """Rate at most ``limit`` nodes for later calls of `best`; return the number of nodes that are left."""
        uncounted = self._totals_of(rating).refresh(limit) if isinstance(rating, PricedRating) else 0
        return uncounted + self._index(demand, rating).refresh(limit)

    def forgetting(self, rating: object) -> Iterator[None]:
        """Drop in steps all results for a rating that is no longer used. The next rating reuses its indexes."""
        self._retired = {key[0]: self._indexes.pop(key) for key in [*self._indexes] if key[1] == rating}
        nodes = list(self._nodes.values())
        for start in range(0, len(nodes), NODES_AT_ONCE):
            for node in nodes[start : start + NODES_AT_ONCE]:
                node.forget(rating)
            yield

    def prepare_obstacles(self, demand: Demand, limit: int) -> int:
        """Find obstacles of at most ``limit`` nodes for later calls of `obstacles`; return the number of nodes left."""
        unexplained = self._any_index(demand).explain(limit)
        return unexplained or self._any_index(demand.under(demand.conditions.of_place)).refresh(limit)

    def obstacles(self, demand: Demand, only: str = "") -> tuple[Mapping[Obstacle, int], int]:
        """Return the number of nodes for each obstacle, and of suitable nodes; ``only``: of this node alone."""
        if not only:
            return self._any_index(demand).obstacles()
        demand = self.resolved(demand)
        node = self._left_for(demand, only)
        if node is None:
            return {}, 0
        return ({}, 1) if fits(demand, node) else ({obstacle_of(demand, node): 1}, 0)

    def fits_somewhere(self, demand: Demand, only: str = "") -> bool:
        """Return whether a node can take a demand; ``only``: the only node to consider."""
        return bool(self.admitted(demand, UNRATED, only) if only else self._any_index(demand).admitted())

    def resolved(self, demand: Demand) -> Demand:
        """Return the demand without `Conditions.near` while no session with one of these labels runs anywhere."""
        near = demand.conditions.near
        if not near or any(self.labels[label] > 0 for label in near):
            return demand
        return demand.under(replace(demand.conditions, near=frozenset()))

    def reports(self, name: str) -> Sequence[GpuReport]:
        """Return the reported GPUs of a node; none for an unknown node."""
        node = self._nodes.get(name)
        return [self._reported[name][gpu.uuid] for gpu in node.gpus] if node is not None else []

    def _index(self, demand: Demand, rating: Rating) -> CapacityIndex:
        """Return the index for a demand and a rating. Its nodes may need rating first."""
        demand = self.resolved(demand)
        key = (demand, rating)
        index = self._indexes.get(key)
        if index is not None:
            self._indexes.move_to_end(key)
            return index
        index = self._retired.pop(demand, None)
        if index is None:
            index = CapacityIndex(demand, rating, self._nodes, self._changes)
        else:
            index.restart(rating)
        self._indexes[key] = index
        sizes = [max(other.size, len(self._nodes)) for other in (*self._indexes.values(), *self._retired.values())]
        entries = sum(sizes)
        while self._retired and entries > MOST_ENTRIES:
            self._retired.popitem()
            entries -= sizes.pop()
        while len(self._indexes) > 1 and entries > MOST_ENTRIES:
            self._indexes.popitem(last=False)
            entries -= sizes.pop(0)
        return index

    def _totals_of(self, rating: PricedRating) -> NodeTotals:
        if self._totals is None or self._totals.rating != rating:
            # one strategy at a time: the totals of an earlier strategy are not needed again
            self._totals = NodeTotals(rating, self._nodes, self._changes)
        return self._totals

    def _any_index(self, demand: Demand) -> CapacityIndex:
        # obstacles are the same in every index of the nodes that can take the demand
        demand = self.resolved(demand)
        indexes = (
            index
            for (index_demand, rating), index in reversed(self._indexes.items())
            if index_demand == demand and admission(rating) is fits
        )
        return next(indexes, None) or self._index(demand, UNRATED)

    # -- for the ledger --

    def put_node(self, name: str, gpus: Iterable[GpuReport]) -> Sequence[str]:
        """Set the GPUs of a node; none: the node is gone.

        Return the UUIDs of new or changed GPUs, from which no units are deducted yet.
        """
        reported: dict[str, GpuReport] = {}
        for gpu in sorted(gpus, key=lambda gpu: (gpu.index, gpu.uuid)):
            reported.setdefault(gpu.uuid, gpu)
        before = self._reported.get(name, {})
        if list(map(_essence, before.values())) == list(map(_essence, reported.values())):
            return ()
        rebuilt = {name}
        for uuid in before.keys() - reported.keys():
            nodes = self._reporting[uuid]
            nodes.discard(name)
            rebuilt |= nodes
            if not nodes:
                del self._reporting[uuid]
        for uuid in reported:
            rebuilt |= self._reporting.setdefault(uuid, set())
            self._reporting[uuid].add(name)
        if reported:
            self._reported[name] = reported
        else:
            self._reported.pop(name, None)
        return [uuid for node in sorted(rebuilt) for uuid in self._rebuild(node)]

    def set_resources(self, name: str, resources: NodeResources) -> None:
        """Set the free CPU, memory and pods of a node, also if the node has no GPUs yet."""
        if self._resources.get(name, UNKNOWN) == resources:
            return
        self._resources[name] = resources
        if resources == UNKNOWN:
            del self._resources[name]
        node = self._nodes.get(name)
        if node is not None:
            node.resources = resources
            self._changed(node)

    def update(
        self,
        uuid: str,
        unowned: int,
        free: int,
        layer: LayerName | None = None,
        neighbours: NeighbourRules = NO_NEIGHBOUR_RULES,
    ) -> None:
        """Set the free units of a GPU, and layer, labels and rules of its sessions.

        Raises KeyError for a GPU that is in no report.
        """
        gpu = self._gpus[uuid]
        if gpu.mig is not None:
            layer = LayerName.MIG
        if (gpu.unowned, gpu.free, gpu.layer, gpu.neighbours) != (unowned, free, layer, neighbours):
            gpu.unowned, gpu.free, gpu.layer, gpu.neighbours = unowned, free, layer, neighbours
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
        # a GPU that two nodes report is one GPU
        reported = self._reported.get(name, {})
        gpus = tuple(_empty(gpu, name) for uuid, gpu in reported.items() if self._node_of(uuid) == name)
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
        self._record_change(name)
        return [gpu.uuid for gpu in gpus]

    def _node_of(self, uuid: str) -> str:
        """Return the node that owns a GPU, of the nodes that report it."""
        nodes = self._reporting[uuid]
        if len(nodes) == 1:
            return next(iter(nodes))
        return by_first_report({node: self._reported[node][uuid] for node in nodes})[0]

    def _changed(self, node: NodeCapacity) -> None:
        node.changed()
        self._record_change(node.name)

    def _record_change(self, name: str) -> None:
        self._changes.add(name, retain=2 * len(self._nodes))


def _essence(gpu: GpuReport) -> tuple[object, ...]:
    return (gpu.index, gpu.uuid, gpu.model, gpu.healthy, gpu.cordoned, gpu.capacity_units, gpu.mig, gpu.reported_since)


def _empty(gpu: GpuReport, node: str) -> GpuCapacity:
    units = gpu.capacity_units
    rank = (node, gpu.index, gpu.uuid)
    capacity = GpuCapacity(gpu.uuid, node, gpu.index, gpu.model, gpu.healthy, gpu.cordoned, units, rank, units, units)
    if gpu.mig is not None:
        capacity.layer, capacity.mig = LayerName.MIG, gpu.mig.profile
    return capacity


_OTHER_REASONS = {
    Lacking.CORDON: Reason.CORDONED,
    Lacking.HEALTH: Reason.UNHEALTHY,
    Lacking.ELIGIBLE: Reason.INELIGIBLE,
}
"""Reasons without figures: the first that keeps some node from the demand counts."""


def explain(capacity: FreeCapacity, request: PlacementRequest) -> Unplaceable:
    """Return why no GPU can take this request. The request must not be placed."""
    share = request.share
    obstacles, fitting = capacity.obstacles(request.demand, request.node)
    if not obstacles and not fitting:
        return Unplaceable(Reason.NO_GPUS, share)
    conditions = capacity.resolved(request.demand).conditions
    obstacles = {obstacle: nodes for obstacle, nodes in obstacles.items() if obstacle.lacking is not Lacking.NAMED}
    if not obstacles and not fitting:
        return Unplaceable(Reason.NOT_NAMED, share, conditions=conditions)
    if not fitting and all(obstacle.lacking is Lacking.MODEL for obstacle in obstacles):
        models = {model for obstacle in obstacles for model in obstacle.models}
        return Unplaceable(Reason.NO_MODEL, share, models=tuple(sorted(models)))
    suitable = sum(obstacle.suitable * nodes for obstacle, nodes in obstacles.items())
    lacking = {obstacle.lacking for obstacle in obstacles}
    if fitting and request.left_out:
        return Unplaceable(Reason.NOT_ADMITTED, share, suitable=suitable, left_out=tuple(sorted(request.left_out)))
    by_node = Unplaceable(Reason.NODES_FULL, share, suitable=suitable, cpu=request.cpu, memory=request.memory)
    shortages = _shortages(obstacles, (Lacking.CPU, Lacking.MEMORY, Lacking.PODS))
    if shortages and not fitting:
        return replace(by_node, shortages=shortages)
    if fitting or Lacking.UNITS in lacking:
        elsewhere = request.demand.under(conditions.of_place)
        if not fitting and elsewhere is not request.demand and capacity.fits_somewhere(elsewhere, request.node):
            return Unplaceable(Reason.NEIGHBOURS, share, suitable=suitable, conditions=conditions)
        full = [
            obstacle for obstacle in obstacles if obstacle.lacking in (Lacking.UNITS, Lacking.HEALTH, Lacking.CORDON)
        ]
        units = max((obstacle.free_units for obstacle in full), default=0)
        count = max((obstacle.free_count for obstacle in full), default=0)
        if fitting:
            units, count = max(units, share.units), max(count, share.count)
        return Unplaceable(Reason.FULL, share, max(units, 0), count, suitable=suitable, conditions=conditions)
    for kind, reason in _OTHER_REASONS.items():
        if kind in lacking:
            return Unplaceable(reason, share, suitable=suitable)
    too_small = _shortages(obstacles, (Lacking.MOST_CPU, Lacking.MOST_MEMORY))
    if too_small:
        return replace(by_node, reason=Reason.NODES_TOO_SMALL, shortages=too_small)
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
