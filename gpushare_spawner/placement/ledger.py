"""Ledger of all allocations and holds on all GPUs, as the hub knows them. feed.py updates it.

A hold keeps GPUs for a request that waits, on the node that needs the fewest freed units. Reservations of placed spawns
are in spawner/queue/reservations.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from gpushare_spawner.model.layers import LayerName, Placement
from gpushare_spawner.model.report import GpuReport
from gpushare_spawner.model.share import NeighbourRules
from gpushare_spawner.placement.capacity import FreeCapacity, Rated, Rating, explain
from gpushare_spawner.placement.node import (
    NOTHING,
    UNKNOWN,
    Allocation,
    GpuCapacity,
    NodeCapacity,
    NodeResources,
    Requested,
    convert_borrowed,
    guaranteed_units,
)
from gpushare_spawner.placement.obstacles import Unplaceable, fits, obstacle_of
from gpushare_spawner.placement.request import Demand, PlacementRequest
from gpushare_spawner.placement.strategy import BestFit, SmallestInstance, Strategy

BEST_FIT = BestFit()
SMALLEST_INSTANCE = SmallestInstance()


RATED_AT_ONCE = 100
"""Nodes that are rated in one step: about 1 ms."""


@dataclass(frozen=True)
class NodeHold:
    """GPUs of a node that are held for a request. No other request gets units that become free there."""

    node: str
    gpus: tuple[str, ...]
    """UUIDs."""
    demand: Demand
    """The demand of the request. A GPU with sessions of another layer is held entirely: these sessions must end. So is
    each GPU of a request that would be alone, or apart from other sessions."""
    start: float = field(default=0.0, compare=False)
    """The time at which the request is expected to start, in seconds since the epoch: sessions that end before may use
    the GPUs. 0: unknown."""

    @property
    def requested(self) -> Requested:
        """CPU, memory and pods of the node."""
        return Requested(self.demand.cpu, self.demand.memory, 1)


@dataclass(frozen=True)
class LeastLacking(Rating):
    """Rating of nodes that could take a demand if sessions there ended: the fewest needed units come first.

    Nodes that lack CPU, memory or pods come last: the amount that a session's end frees is unknown.
    """

    def admits(self, demand: Demand, node: NodeCapacity) -> bool:
        """Return whether the node could take the demand if all its sessions ended: healthy GPUs, CPU and memory."""
        could_have = node.resources.sessions_can_leave(demand.cpu, demand.memory)
        return could_have and node.name not in demand.ineligible and bool(_candidates(demand, node))

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        """Rate by the kinds of missing resources, then the missing units and CPU, then the first GPU by index."""
        lacking, gpus = min(_candidates(demand, node), key=lambda candidate: (candidate[0], candidate[1][0].preference))
        free = node.resources
        short = free.lacks_cpu(demand.cpu) + free.lacks_memory(demand.memory) + free.lacks_pods()
        cpu = max(0, demand.cpu - (free.cpu or 0)) if short else 0
        return Rated((short, lacking, cpu, gpus[0].rank), tuple(gpu.uuid for gpu in gpus))


LEAST_LACKING = LeastLacking()


def cheapest_hold(capacity: FreeCapacity, request: PlacementRequest) -> NodeHold | None:
    """Return the GPUs that need the fewest freed units for a request; None if it can fit on no node."""
    best = capacity.best(request.demand, LEAST_LACKING, request.left_out, request.node)
    return NodeHold(best.node, best.gpus, request.demand) if best is not None else None


def able_nodes(capacity: FreeCapacity, request: PlacementRequest) -> Set[str]:
    """Return the nodes that could take a request if all sessions there ended."""
    return capacity.admitted(request.demand, LEAST_LACKING, request.node)


MOST_NODES = 200
"""Most nodes that the service is told for a spawn. Our value: some kilobytes of an event."""


def yielding_nodes(capacity: FreeCapacity, request: PlacementRequest) -> tuple[str, ...] | None:
    """Return the nodes that could take a request if sessions there gave up units only: they have CPU, memory and pods.

    By name. None if there are more than `MOST_NODES`: on the nodes of a selection perhaps no session can make way.
    """
    places = capacity.rated(request.demand, LEAST_LACKING, request.node)
    open_to = {name for key, name in places if not key[0] and name not in request.left_out}
    return tuple(sorted(open_to)) if len(open_to) <= MOST_NODES else None


def rating_steps(capacity: FreeCapacity, demand: Demand, rating: Rating, limit: int) -> Iterator[int]:
    """Rate the nodes for a demand, at most ``limit`` in each step."""
    return iter(lambda: capacity.prepare(demand, rating, limit), 0)


def preparing_hold(capacity: FreeCapacity, request: PlacementRequest) -> Iterator[int]:
    """Prepare `cheapest_hold` and `able_nodes` in steps."""
    return iter(()) if request.node else rating_steps(capacity, request.demand, LEAST_LACKING, RATED_AT_ONCE)


def _candidates(demand: Demand, node: NodeCapacity) -> list[tuple[int, list[GpuCapacity]]]:
    """Return the missing units and the GPUs with the fewest missing units, for each suitable model."""
    candidates, least = [], demand.least_units
    for model, gpus in node.healthy.items():
        able = [gpu for gpu in gpus if gpu.capacity >= demand.units and gpu.can_ever_meet(demand.conditions)]
        if demand.count and demand.accepts(model) and len(able) >= demand.count:
            able.sort(key=lambda gpu: (max(0, demand.units - gpu.free), gpu.preference))
            last = min(able[demand.count - 1 :], key=lambda gpu: (max(0, least - gpu.free), gpu.preference))
            chosen = [*able[: demand.count - 1], last]
            missing = sum(max(0, units - gpu.free) for units, gpu in zip(demand.each, chosen, strict=True))
            candidates.append((missing, chosen))
    return candidates


class LedgerError(Exception):
    """Inconsistent ledger, or a strategy's choice of GPUs that cannot take the share."""


class Ledger:
    """Running sessions and holds of spawns in progress on each GPU, in units of 1 %.

    On each GPU the owned units of all sessions fit into the capacity, and so do the guaranteed units. A GPU that no
    report names can have allocations, but accepts no new session.

    Nodes and allocations update it. A change costs time for the allocations on the affected GPUs; a placement costs
    time for the nodes that have changed since the last equal request.
    """

    def __init__(self) -> None:
        self.capacity = FreeCapacity()
        """Free capacity of the GPUs. Strategies read it, only the ledger changes it."""
        self.observers: list[Callable[[str, Allocation | None], None]] = []
        """Callbacks for each changed allocation of a session; None if it is gone, or replaced in the next call."""
        self.recounted: set[str] = set()
        """GPUs whose units may be guaranteed to other sessions than before. The reader empties it."""
        self._allocations: dict[str, Allocation] = {}
        self._on_gpu: dict[str, dict[str, Allocation]] = {}
        """Allocations by GPU and session, each with the units on this GPU."""
        self._guaranteed: dict[str, dict[str, int]] = {}
        self._resources: dict[str, NodeResources] = {}
        self._holds: dict[str, NodeHold] = {}
        self._holds_of: dict[str, dict[str, NodeHold]] = {}
        """The holds by node and by GPU, by name: a count costs time for the holds of its node or GPU only."""
        self._explained: dict[PlacementRequest, Unplaceable] = {}
        self._explained_at = 0

    @property
    def allocations(self) -> Mapping[str, Allocation]:
        """All allocations by session."""
        return MappingProxyType(self._allocations)

    # -- placement --

    def place(self, request: PlacementRequest, strategy: Strategy = BEST_FIT) -> Placement | None:
        """Return a placement of this share, or None if no GPU can take it; see `why_unplaceable`. Changes nothing.

        ``Placement.borrowed`` is the number of lent units per GPU. Raises LedgerError for an invalid choice of the
        strategy.
        """
        places = (self._place(layer_request, strategy) for layer_request in request.of_each_layer())
        return next((place for place in places if place is not None), None)

    def _place(self, request: PlacementRequest, strategy: Strategy) -> Placement | None:
        if request.layer is LayerName.MIG:
            if request.share.count > 1:
                return None  # CUDA uses one MIG device only
            # for every strategy: a larger instance than needed is wasted
            strategy = SMALLEST_INSTANCE
        chosen = strategy.choose(request, self.capacity)
        if chosen is None:
            return None
        wrong = self._wrong(request, chosen.node, chosen.gpus)
        if wrong:
            named = f"{', '.join(chosen.gpus)} of node {chosen.node}"
            raise LedgerError(f"{strategy!r} chose {named} for {request.share}: {wrong}")
        share = request.share
        unowned = [self.capacity.gpus[uuid].unowned for uuid in chosen.gpus]
        owned = min([share.units, *(left for left, units in zip(unowned, share.each, strict=True) if left < units)])
        return Placement(chosen.node, tuple(chosen.gpus), share.units - max(0, owned), request.layer)

    def why_unplaceable(self, request: PlacementRequest) -> Unplaceable:
        """Return the reason why `place` found no GPU for this request. The result is cached until a node changes."""
        if self._explained_at != self.capacity.version:
            self._explained.clear()
            self._explained_at = self.capacity.version
        conditions = self.capacity.resolved(request.demand).conditions
        key = replace(request, user="", groups=(), template="", conditions=conditions)
        reason = self._explained.get(key)
        if reason is None:
            reason = self._explained[key] = explain(self.capacity, request)
        return reason

    @property
    def holds(self) -> Mapping[str, NodeHold]:
        """Holds of waiting requests, by name."""
        return MappingProxyType(self._holds)

    def hold(self, name: str, hold: NodeHold | None) -> None:
        """Hold GPUs of a node for a waiting request, in place of this name's earlier hold; None: hold none.

        A hold counts like an allocation. It can exceed the free units: then it also keeps units that become free.
        """
        before = self._holds.pop(name, None)
        if hold is not None:
            self._holds[name] = hold
        if before == hold:
            return
        if before is not None:
            for place in (before.node, *before.gpus):
                del self._holds_of[place][name]
                if not self._holds_of[place]:
                    del self._holds_of[place]
        if hold is not None:
            for place in (hold.node, *hold.gpus):
                self._holds_of.setdefault(place, {})[name] = hold
        for changed in (before, hold):
            if changed is not None:
                for gpu in changed.gpus:
                    self._recount(gpu)
                self._recount_resources(changed.node)

    def fits_without(self, request: PlacementRequest, names: Collection[str]) -> bool:
        """Return whether a request would fit on a node of these holds without them. Unknown names are ignored."""
        held_nodes = {self._holds[name].node for name in names if name in self._holds} - request.left_out
        nodes = [self.capacity.nodes[name] for name in held_nodes if name in self.capacity.nodes]
        nodes = [self._without(node, names) for node in nodes if request.node in ("", node.name)]
        demand = self.capacity.resolved(request.demand)
        return any(fits(demand, node.left_for(demand)) for node in nodes)

    @contextmanager
    def without(self, names: Collection[str]) -> Iterator[None]:
        """Suspend these holds. They are back at the end, also beside a session that came meanwhile."""
        holds = {name: self._holds[name] for name in names if name in self._holds}
        for name in holds:
            self.hold(name, None)
        try:
            yield
        finally:
            for name, hold in holds.items():
                self.hold(name, hold)

    def sessions_on(self, gpu: str) -> Collection[str]:
        """Return the sessions with an allocation on a GPU."""
        return self._on_gpu.get(gpu, {}).keys()

    def node_of(self, session: str) -> str | None:
        """Return the node of a session's GPUs; None if its allocation or its first GPU is unknown."""
        allocation = self._allocations.get(session)
        gpu = self.capacity.gpus.get(allocation.gpus[0]) if allocation is not None and allocation.gpus else None
        return gpu.node if gpu is not None else None

    def of_node(self, name: str) -> Ledger:
        """Return a ledger of one node alone, with its allocations and holds, to simulate changes."""
        alone = Ledger()
        alone.put_node(name, self.capacity.reports(name))
        alone.put_resources(name, self._resources.get(name, UNKNOWN))
        held = [self._on_gpu.get(uuid, {}) for uuid in alone.capacity.gpus]
        for hold_name, hold in self._holds_of.get(name, {}).items():
            alone.hold(hold_name, hold)
        here = {session: self._allocations[session] for on_gpu in held for session in on_gpu}
        alone.capacity.labels = self.capacity.labels.copy()
        alone.capacity.labels.subtract(label for each in here.values() for label in each.neighbours.labels)
        alone.change(here.values())
        return alone

    def _wrong(self, request: PlacementRequest, name: str, uuids: Sequence[str]) -> str:
        """Return the error in a strategy's choice; empty: the choice is valid."""
        node = self.capacity.nodes.get(name)
        gpus = [self.capacity.gpus[uuid] for uuid in uuids if uuid in self.capacity.gpus]
        if node is None or len(gpus) != len(uuids) or any(gpu.node != name for gpu in gpus):
            return "they are not GPUs of that node"
        if len(set(uuids)) != request.share.count or len(uuids) != request.share.count:
            return f"the share lies on {request.share.count} of them"
        if not all(gpu.offered and request.demand.accepts(gpu.model) for gpu in gpus):
            return "not all are healthy, not cordoned, and of a model that will do"
        if len({gpu.model for gpu in gpus}) > 1:
            return "they are of several models"
        demand = self.capacity.resolved(request.demand)
        if any(gpu.left_for(demand).free < units for units, gpu in zip(request.share.each, gpus, strict=True)):
            return "not all have so much free"
        node = node.left_for(demand)
        if not fits(demand, node):
            return f"the node lacks {obstacle_of(demand, node).lacking.name.lower()}"
        if name in request.left_out or request.node not in ("", name):
            return "the request excludes that node"
        return ""

    # -- changes --

    def put_node(self, name: str, gpus: Iterable[GpuReport]) -> None:
        """Set the GPUs of a node; without GPUs their allocations stay, in case the node comes back."""
        nodes = dict.fromkeys([name])
        self.recounted.update(gpu.uuid for gpu in self.capacity.reports(name))
        reported = list(gpus)
        for gpu in reported:
            if gpu.uuid in self.capacity.gpus:
                nodes[self.capacity.gpus[gpu.uuid].node] = None
        for uuid in self.capacity.put_node(name, reported):
            self._recount(uuid)
            if uuid in self.capacity.gpus:
                nodes[self.capacity.gpus[uuid].node] = None
        # a GPU that moves between two reporting nodes takes its sessions along
        for node in nodes:
            self._recount_resources(node)

    def put_resources(self, name: str, resources: NodeResources) -> None:
        """Set the free CPU, memory and pods of a node. `Allocation.uncounted` is deducted here.

        Unknown resources remove the node's entry.
        """
        self._resources[name] = resources
        if resources == UNKNOWN:
            del self._resources[name]
        self._recount_resources(name)

    def change(self, put: Iterable[Allocation] = (), drop: Iterable[str] = ()) -> None:
        """Remove allocations by their sessions, then enter others, each in place of the session's earlier allocation.

        Each GPU is counted once, for any number of changed allocations.
        """
        touched: dict[str, None] = {}
        resources: dict[str, None] = {}
        for session in drop:
            before = self._allocations.get(session)
            if before is not None:
                self._strike(before, touched, resources)
        for allocation in put:
            before = self._allocations.get(allocation.session)
            if before is not None:
                self._strike(before, touched, resources)
            self._enter(allocation, touched, resources)
        for gpu in touched:
            self._recount(gpu)
        for node in resources:
            self._recount_resources(node)

    def add(self, allocation: Allocation) -> None:
        """Enter an allocation. Raises ValueError if the session has one already."""
        if allocation.session in self._allocations:
            raise ValueError(f"session {allocation.session} has an allocation already")
        self.change([allocation])

    def replace(self, allocation: Allocation) -> None:
        """Replace a session's allocation, for example after a change of its tier. Raises KeyError if it has none."""
        if allocation.session not in self._allocations:
            raise KeyError(allocation.session)
        self.change([allocation])

    def remove(self, session: str) -> Allocation | None:
        """Remove a session's allocation; return it, or None if the session has none."""
        allocation = self._allocations.get(session)
        self.change(drop=[session])
        return allocation

    def convert_borrowed(self) -> Mapping[str, Allocation]:
        """Turn borrowed units without an owner into owned ones, oldest session first. Return the changed sessions."""
        capacities = {uuid: gpu.capacity for uuid, gpu in self.capacity.gpus.items()}
        converted = convert_borrowed(capacities, self._allocations.values())
        self.change(converted.values())
        return converted

    def make_anew(self, nodes: Mapping[str, Sequence[GpuReport]], allocations: Iterable[Allocation]) -> None:
        """Rebuild the ledger from these nodes and allocations. Resources and holds stay.

        Repairs a ledger that may be inconsistent. Observers are notified that all allocations are gone, and then of
        each new allocation.
        """
        gone, resources, holds = list(self._allocations), self._resources, self._holds
        self.recounted.update(self.capacity.gpus)
        self.capacity = FreeCapacity()
        self._allocations, self._on_gpu, self._guaranteed, self._resources = {}, {}, {}, {}
        self._holds, self._holds_of = {}, {}
        self._explained, self._explained_at = {}, 0
        for session in gone:
            self._notify(session, None)
        for name, gpus in nodes.items():
            self.put_node(name, gpus)
        for name, node_resources in resources.items():
            self.put_resources(name, node_resources)
        self.change(allocations)
        for name, hold in holds.items():
            self.hold(name, hold)

    # -- figures --

    def free_units(self, gpu: str) -> int:
        """Return the units that a new session can have now: unowned units and units that idle owners have lent.

        0 for an unhealthy, cordoned or unknown GPU.
        """
        capacity = self.capacity.gpus.get(gpu)
        return max(0, capacity.free) if capacity is not None and capacity.offered else 0

    def unowned_units(self, gpu: str) -> int:
        """Return the capacity of a GPU less the owned units, at least 0; 0 for an unknown GPU."""
        capacity = self.capacity.gpus.get(gpu)
        return max(0, capacity.unowned) if capacity is not None else 0

    def missing_units(self, gpu: str, units: int) -> int:
        """Return the units that sessions on a GPU must give up until so many are free; 0 or less: none.

        Raises KeyError for an unknown GPU.
        """
        effective = sum(allocation.effective_units for allocation in self._on_gpu.get(gpu, {}).values())
        return units + effective + self.held_units(gpu) - self.capacity.gpus[gpu].capacity

    def guaranteed(self, session: str) -> int:
        """Return the guaranteed units of a session: the least over its GPUs. Raises KeyError for an unknown session."""
        return self._allocations[session].least_of(self.guaranteed_on(session))

    def guaranteed_on(self, session: str) -> dict[str, int]:
        """Return the guaranteed units of a session on each of its GPUs, except unknown ones. Raises KeyError."""
        gpus = [gpu for gpu in self._allocations[session].gpus if gpu in self.capacity.gpus]
        return {gpu: self._guaranteed[gpu][session] for gpu in gpus}

    # -- counting --

    def _enter(self, allocation: Allocation, touched: dict[str, None], resources: dict[str, None]) -> None:
        self._allocations[allocation.session] = allocation
        self._notify(allocation.session, allocation)
        self.capacity.labels.update(allocation.neighbours.labels)
        for gpu in allocation.gpus:
            self._on_gpu.setdefault(gpu, {})[allocation.session] = allocation.on(gpu)
            touched[gpu] = None
        if allocation.uncounted is not NOTHING:
            resources.update(self._nodes_of(allocation))

    def _strike(self, allocation: Allocation, touched: dict[str, None], resources: dict[str, None]) -> None:
        del self._allocations[allocation.session]
        self._notify(allocation.session, None)
        self.capacity.labels.subtract(allocation.neighbours.labels)
        for gpu in set(allocation.gpus):
            held = self._on_gpu[gpu]
            del held[allocation.session]
            if not held:
                del self._on_gpu[gpu]
            touched[gpu] = None
        if allocation.uncounted is not NOTHING:
            resources.update(self._nodes_of(allocation))

    def _notify(self, session: str, allocation: Allocation | None) -> None:
        for observer in self.observers:
            observer(session, allocation)

    def _nodes_of(self, allocation: Allocation) -> dict[str, None]:
        return {self.capacity.gpus[gpu].node: None for gpu in allocation.gpus if gpu in self.capacity.gpus}

    def _recount(self, uuid: str) -> None:
        self.recounted.add(uuid)
        gpu = self.capacity.gpus.get(uuid)
        held = self._on_gpu.get(uuid)
        if gpu is None:
            self._guaranteed.pop(uuid, None)
            return
        held_units = self.held_units(uuid)
        if not held:
            self._guaranteed.pop(uuid, None)
            self.capacity.update(uuid, gpu.capacity - held_units, gpu.capacity - held_units)
            return
        guaranteed = self._guaranteed[uuid] = guaranteed_units(gpu.capacity, held.values())
        owned, taken = taken_units(gpu, held.values(), guaranteed)
        unowned, free = gpu.capacity - owned - held_units, gpu.capacity - taken - held_units
        neighbours = NeighbourRules.together(allocation.neighbours for allocation in held.values())
        self.capacity.update(uuid, unowned, free, next(iter(held.values())).layer, neighbours)

    def held_units(self, uuid: str) -> int:
        """Return the units of a GPU on hold."""
        return sum(self._units_of_hold(hold, uuid) for hold in self._holds_of.get(uuid, {}).values())

    def _units_of_hold(self, hold: NodeHold, uuid: str) -> int:
        """Return the units that a hold keeps on one of its GPUs."""
        held, gpu = self._on_gpu.get(uuid), self.capacity.gpus[uuid]
        layer = next(iter(held.values())).layer if held else LayerName.NATIVE
        rules = hold.demand.conditions.neighbours
        shared = gpu.mig is None and hold.demand.layer_on(gpu.model) is layer
        # a session that comes meanwhile may break the rules
        shared = shared and not rules.alone and not rules.apart_from
        return hold.demand.each[hold.gpus.index(uuid)] if shared else gpu.capacity

    def _without(self, node: NodeCapacity, names: Collection[str]) -> NodeCapacity:
        """Return a copy of a node without these holds."""
        holds = [hold for name, hold in self._holds_of.get(node.name, {}).items() if name in names]
        held_units: Counter[str] = Counter()
        for hold in holds:
            held_units.update(
                {uuid: self._units_of_hold(hold, uuid) for uuid in hold.gpus if uuid in self.capacity.gpus}
            )
        healthy = {
            model: tuple(
                replace(gpu, unowned=gpu.unowned + held_units[gpu.uuid], free=gpu.free + held_units[gpu.uuid])
                for gpu in gpus
            )
            for model, gpus in node.healthy.items()
        }
        resources = node.resources.more(Requested.total(hold.requested for hold in holds))
        copy = NodeCapacity(node.name, node.gpus, healthy, resources=resources, several_layers=node.several_layers)
        copy.changed()
        return copy

    def _recount_resources(self, name: str) -> None:
        node = self.capacity.nodes.get(name)
        reported = self._resources.get(name, UNKNOWN)
        if node is None or reported == UNKNOWN:
            self.capacity.set_resources(name, reported)
            return
        here = {
            allocation.session: allocation.uncounted
            for gpu in node.gpus
            for allocation in self._on_gpu.get(gpu.uuid, {}).values()
        }
        held_resources = [hold.requested for hold in self._holds_of.get(name, {}).values()]
        self.capacity.set_resources(name, reported.less(Requested.total([*here.values(), *held_resources])))


def taken_units(gpu: GpuCapacity, held: Collection[Allocation], guaranteed: Mapping[str, int]) -> tuple[int, int]:
    """Return the owned and the guaranteed units of a GPU; all units of a MIG instance, and beside a lone session."""
    if held and (gpu.mig is not None or any(allocation.neighbours.alone for allocation in held)):
        return gpu.capacity, gpu.capacity
    return sum(allocation.owned_units for allocation in held), sum(guaranteed.values())
