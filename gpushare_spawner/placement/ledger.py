"""All allocations on all GPUs, as the hub knows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.placement import Placement
from gpushare_spawner.model.report import GpuReport, Report
from gpushare_spawner.placement.capacity import FreeCapacity, fits, obstacle_of
from gpushare_spawner.placement.claim import NodeHold
from gpushare_spawner.placement.node import (
    NOTHING,
    UNKNOWN,
    Allocation,
    GpuCapacity,
    NodeCapacity,
    NodeResources,
    Requested,
    guaranteed_units,
    settle,
)
from gpushare_spawner.placement.request import PlacementRequest
from gpushare_spawner.placement.strategy import BestFit, SmallestInstance, Strategy
from gpushare_spawner.placement.unplaceable import Unplaceable, explain

BEST_FIT = BestFit()
SMALLEST_INSTANCE = SmallestInstance()


class LedgerError(Exception):
    """The ledger contradicts itself, or a strategy chose GPUs that cannot take the share."""


class Ledger:
    """Sessions that run and reservations in flight, GPU by GPU, in units of 1 %.

    On each GPU: the owned units of all sessions fit into the capacity, and so do the guaranteed ones. A GPU that no
    report names can have allocations, but is offered to nobody.

    It is kept, and updated by what changes: nodes and allocations. A change costs what is on the GPUs that it concerns;
    a placement costs the nodes that have changed since the last one like it.
    """

    def __init__(self) -> None:
        self.capacity = FreeCapacity()
        """The GPUs and what is left on them; strategies read it, only the ledger changes it."""
        self.observers: list[Callable[[str, Allocation | None], None]] = []
        """Called with each session whose allocation has changed; None: it is gone, or replaced in the next call."""
        self._allocations: dict[str, Allocation] = {}
        self._on_gpu: dict[str, dict[str, Allocation]] = {}
        self._guaranteed: dict[str, dict[str, int]] = {}
        self._resources: dict[str, NodeResources] = {}
        self._claims: dict[str, NodeHold] = {}
        self._explained: dict[PlacementRequest, Unplaceable] = {}
        self._explained_at = 0

    @classmethod
    def of(cls, reports: Iterable[Report], reservations: Iterable[Allocation] = ()) -> Ledger:
        """The ledger that the agents' reports make, with the reservations that they do not know of yet.

        Of two reports of a node the newer one counts. A reservation whose session is in a report has arrived: the
        report counts.
        """
        ledger = cls()
        newest = sorted(newest_reports(reports).values(), key=lambda report: report.node)
        for report in newest:
            ledger.put_node(report.node, report.gpus)
        found = [Allocation.of(session) for report in newest for session in report.allocated_to]
        first: dict[str, Allocation] = {}
        for allocation in [*filter(None, found), *reservations]:
            first.setdefault(allocation.session, allocation)
        ledger.change(first.values())
        return ledger

    @property
    def allocations(self) -> Mapping[str, Allocation]:
        """Every allocation by its session."""
        return MappingProxyType(self._allocations)

    # -- placement --

    def place(self, request: PlacementRequest, strategy: Strategy = BEST_FIT) -> Placement | None:
        """Return where this share could go, or None where no GPU can take it; see `why_unplaceable`. Changes nothing.

        ``Placement.borrowed`` tells how many units (per GPU) are lent. Raises LedgerError if the strategy chose what
        it may not.
        """
        places = (self._place(one, strategy) for one in request.of_each_layer())
        return next((place for place in places if place is not None), None)

    def _place(self, request: PlacementRequest, strategy: Strategy) -> Placement | None:
        if request.layer is LayerName.MIG:
            if request.share.count > 1:
                return None  # CUDA uses one MIG device only
            # whatever the strategy: a larger instance than is needed is wasted
            strategy = SMALLEST_INSTANCE
        chosen = strategy.choose(request, self.capacity)
        if chosen is None:
            return None
        wrong = self._wrong(request, chosen.node, chosen.gpus)
        if wrong:
            named = f"{', '.join(chosen.gpus)} of node {chosen.node}"
            raise LedgerError(f"{strategy!r} chose {named} for {request.share}: {wrong}")
        units = request.share.units
        borrowed = max(0, *(units - self.capacity.gpus[uuid].unowned for uuid in chosen.gpus))
        return Placement(chosen.node, tuple(chosen.gpus), min(borrowed, units), request.layer)

    def why_unplaceable(self, request: PlacementRequest) -> Unplaceable:
        """Why `place` found no GPU for this request. Equal requests are explained once until a node changes."""
        if self._explained_at != self.capacity.version:
            self._explained.clear()
            self._explained_at = self.capacity.version
        asked = replace(request, user="", groups=(), template="")
        found = self._explained.get(asked)
        if found is None:
            found = self._explained[asked] = explain(self.capacity, request)
        return found

    @property
    def claims(self) -> Mapping[str, NodeHold]:
        """What is kept free, by the name of the claim."""
        return MappingProxyType(self._claims)

    def claim(self, name: str, claim: NodeHold | None) -> None:
        """Keep GPUs of a node for a request that waits, instead of what this name claimed before; None: nothing.

        A claim counts as if it were allocated, and can be more than is free: then nobody gets what comes free there.
        """
        before = self._claims.pop(name, None)
        if claim is not None:
            self._claims[name] = claim
        if before == claim:
            return
        for changed in (before, claim):
            if changed is not None:
                for gpu in changed.gpus:
                    self._recount(gpu)
                self._recount_resources(changed.node)

    def fits_without(self, request: PlacementRequest, names: Collection[str]) -> bool:
        """Whether a request would fit on a node of these claims if they were not there. Unknown names are ignored."""
        claimed = {self._claims[name].node for name in names if name in self._claims} - request.left_out
        nodes = [self.capacity.nodes[name] for name in claimed if name in self.capacity.nodes]
        nodes = [self._without(node, names) for node in nodes if request.node in ("", node.name)]
        return any(fits(request.demand, node.left_for(request.demand)) for node in nodes)

    def node_of(self, session: str) -> str | None:
        """Return the node of a session's GPUs; None where its allocation or its first GPU is unknown."""
        known = self._allocations.get(session)
        gpu = self.capacity.gpus.get(known.gpus[0]) if known is not None and known.gpus else None
        return gpu.node if gpu is not None else None

    def of_node(self, name: str) -> Ledger:
        """Return a ledger of one node alone, with all allocations and claims there: to find out what would be if."""
        alone = Ledger()
        alone.put_node(name, self.capacity.reports(name))
        alone.put_resources(name, self._resources.get(name, UNKNOWN))
        held = [self._on_gpu.get(uuid, {}) for uuid in alone.capacity.gpus]
        for claimant, claim in self._claims.items():
            if claim.node == name:
                alone.claim(claimant, claim)
        alone.change({session: allocation for on_gpu in held for session, allocation in on_gpu.items()}.values())
        return alone

    def _wrong(self, request: PlacementRequest, name: str, uuids: Sequence[str]) -> str:
        """What speaks against a strategy's choice; empty: nothing."""
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
        if any(gpu.left_for(request.layer).free < request.share.units for gpu in gpus):
            return "not all have so much free"
        node = node.left_for(request.demand)
        if not fits(request.demand, node):
            return f"the node lacks {obstacle_of(request.demand, node).lacking.name.lower()}"
        if name in request.left_out or request.node not in ("", name):
            return "the request excludes that node"
        return ""

    # -- changes --

    def put_node(self, name: str, gpus: Iterable[GpuReport]) -> None:
        """Set the GPUs of a node; nothing happens where they are as known."""
        known = dict.fromkeys([name])
        reported = list(gpus)
        for gpu in reported:
            if gpu.uuid in self.capacity.gpus:
                known[self.capacity.gpus[gpu.uuid].node] = None
        for uuid in self.capacity.put_node(name, reported):
            self._recount(uuid)
            if uuid in self.capacity.gpus:
                known[self.capacity.gpus[uuid].node] = None
        # a GPU that two nodes report takes its sessions along from one to the other
        for node in known:
            self._recount_resources(node)

    def drop_node(self, name: str) -> None:
        """Forget a node's GPUs; allocations on them stay, in case that it comes back."""
        self.put_node(name, ())

    def put_resources(self, name: str, resources: NodeResources) -> None:
        """Set what is free on a node of CPU, memory and pods. `Allocation.uncounted` is taken off here.

        Resources of which nothing is known forget the node.
        """
        self._resources[name] = resources
        if resources == UNKNOWN:
            del self._resources[name]
        self._recount_resources(name)

    def change(self, put: Iterable[Allocation] = (), drop: Iterable[str] = ()) -> None:
        """Remove allocations by their sessions, then enter some; one that its session has already is replaced.

        A GPU is counted once however many of its allocations change.
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
        """Change a session's allocation, for instance after a change of its tier. Raises KeyError if it has none."""
        if allocation.session not in self._allocations:
            raise KeyError(allocation.session)
        self.change([allocation])

    def remove(self, session: str) -> Allocation | None:
        """Remove a session's allocation; return it, or None if the session has none."""
        allocation = self._allocations.get(session)
        self.change(drop=[session])
        return allocation

    def settle(self) -> dict[str, int]:
        """Turn borrowed units into owned ones where their owner is gone, oldest session first; what is borrowed now."""
        capacities = {uuid: gpu.capacity for uuid, gpu in self.capacity.gpus.items()}
        settled = settle(capacities, self._allocations.values())
        self.change([self._allocations[session].with_borrowed(borrowed) for session, borrowed in settled.items()])
        return settled

    def make_anew(self, nodes: Mapping[str, Sequence[GpuReport]], allocations: Iterable[Allocation]) -> None:
        """Forget all that was counted, and count these nodes and allocations; resources and claims stay as they were.

        For a ledger of which it is not known whether it contradicts itself. Its observers are told that all
        allocations are gone, and then of each one.
        """
        gone, resources, claims = list(self._allocations), self._resources, self._claims
        self.capacity = FreeCapacity()
        self._allocations, self._on_gpu, self._guaranteed, self._resources, self._claims = {}, {}, {}, {}, {}
        self._explained, self._explained_at = {}, 0
        for session in gone:
            self._tell(session, None)
        for name, gpus in nodes.items():
            self.put_node(name, gpus)
        for name, known in resources.items():
            self.put_resources(name, known)
        self.change(allocations)
        for name, claim in claims.items():
            self.claim(name, claim)

    # -- figures --

    def free_units(self, gpu: str) -> int:
        """Units that a newcomer can have now: unowned, or lent by idle owners. 0 for a GPU that is unhealthy, cordoned
        or unknown."""
        found = self.capacity.gpus.get(gpu)
        return max(0, found.free) if found is not None and found.offered else 0

    def unowned_units(self, gpu: str) -> int:
        """Capacity of a GPU less what sessions own, at least 0; 0 for an unknown GPU."""
        found = self.capacity.gpus.get(gpu)
        return max(0, found.unowned) if found is not None else 0

    def guaranteed(self, session: str) -> int:
        """What a session would get if everybody wanted its GPUs now: the least over them. KeyError if unknown."""
        held = self._allocations[session]
        known = [self._guaranteed[gpu][session] for gpu in held.gpus if gpu in self.capacity.gpus]
        return min(known, default=0)

    def check(self) -> None:
        """Raises LedgerError, naming the GPU, if owned or guaranteed units exceed its capacity, or counts disagree."""
        for uuid, gpu in self.capacity.gpus.items():
            held = self._on_gpu.get(uuid, {}).values()
            where = f"GPU {gpu.index} of {gpu.node} ({uuid})"
            if gpu.mig is not None and len(held) > 1:
                raise LedgerError(f"{where}: {len(held)} sessions are on this MIG instance, which is for one")
            owned, guaranteed = _taken(gpu, held, guaranteed_units(gpu.capacity, held))
            if owned > gpu.capacity:
                raise LedgerError(f"{where}: {owned} units are owned, its capacity is {gpu.capacity}")
            if guaranteed > gpu.capacity:
                raise LedgerError(f"{where}: {guaranteed} units are guaranteed, its capacity is {gpu.capacity}")
            claimed = self._claimed(uuid)
            if (gpu.unowned, gpu.free) != (gpu.capacity - owned - claimed, gpu.capacity - guaranteed - claimed):
                raise LedgerError(
                    f"{where}: {gpu.unowned} unowned and {gpu.free} free units are out of step with its sessions"
                )

    # -- counting --

    def _enter(self, allocation: Allocation, touched: dict[str, None], resources: dict[str, None]) -> None:
        self._allocations[allocation.session] = allocation
        self._tell(allocation.session, allocation)
        for gpu in allocation.gpus:
            self._on_gpu.setdefault(gpu, {})[allocation.session] = allocation
            touched[gpu] = None
        if allocation.uncounted is not NOTHING:
            resources.update(self._nodes_of(allocation))

    def _strike(self, allocation: Allocation, touched: dict[str, None], resources: dict[str, None]) -> None:
        del self._allocations[allocation.session]
        self._tell(allocation.session, None)
        for gpu in set(allocation.gpus):
            held = self._on_gpu[gpu]
            del held[allocation.session]
            if not held:
                del self._on_gpu[gpu]
            touched[gpu] = None
        if allocation.uncounted is not NOTHING:
            resources.update(self._nodes_of(allocation))

    def _tell(self, session: str, allocation: Allocation | None) -> None:
        for observer in self.observers:
            observer(session, allocation)

    def _nodes_of(self, allocation: Allocation) -> dict[str, None]:
        return {self.capacity.gpus[gpu].node: None for gpu in allocation.gpus if gpu in self.capacity.gpus}

    def _recount(self, uuid: str) -> None:
        gpu = self.capacity.gpus.get(uuid)
        held = self._on_gpu.get(uuid)
        if gpu is None:
            self._guaranteed.pop(uuid, None)
            return
        claimed = self._claimed(uuid)
        if not held:
            self._guaranteed.pop(uuid, None)
            self.capacity.update(uuid, gpu.capacity - claimed, gpu.capacity - claimed)
            return
        guaranteed = self._guaranteed[uuid] = guaranteed_units(gpu.capacity, held.values())
        owned, taken = _taken(gpu, held.values(), guaranteed)
        unowned, free = gpu.capacity - owned - claimed, gpu.capacity - taken - claimed
        self.capacity.update(uuid, unowned, free, next(iter(held.values())).layer)

    def _claimed(self, uuid: str) -> int:
        return sum(self._kept(claim, uuid) for claim in self._claims.values() if uuid in claim.gpus)

    def _kept(self, claim: NodeHold, uuid: str) -> int:
        """Return the units that a claim keeps on one of its GPUs."""
        held, gpu = self._on_gpu.get(uuid), self.capacity.gpus[uuid]
        layer = next(iter(held.values())).layer if held else LayerName.NATIVE
        shared = gpu.mig is None and claim.layer_on(gpu.model) is layer
        return claim.units if shared else gpu.capacity

    def _without(self, node: NodeCapacity, names: Collection[str]) -> NodeCapacity:
        """Return a copy of a node as it would be without these claims."""
        claims = [claim for name, claim in self._claims.items() if name in names and claim.node == node.name]
        kept: Counter[str] = Counter()
        for claim in claims:
            kept.update({uuid: self._kept(claim, uuid) for uuid in claim.gpus if uuid in self.capacity.gpus})
        healthy = {
            model: tuple(replace(gpu, free=gpu.free + kept[gpu.uuid]) for gpu in gpus)
            for model, gpus in node.healthy.items()
        }
        resources = node.resources.more(Requested.total(claim.requested for claim in claims))
        copy = NodeCapacity(node.name, node.gpus, healthy, resources=resources, several_layers=node.several_layers)
        copy.changed()
        return copy

    def _recount_resources(self, name: str) -> None:
        node = self.capacity.nodes.get(name)
        told = self._resources.get(name, UNKNOWN)
        if node is None or told == UNKNOWN:
            self.capacity.set_resources(name, told)
            return
        here = {
            allocation.session: allocation.uncounted
            for gpu in node.gpus
            for allocation in self._on_gpu.get(gpu.uuid, {}).values()
        }
        claimed = [claim.requested for claim in self._claims.values() if claim.node == name]
        self.capacity.set_resources(name, told.less(Requested.total([*here.values(), *claimed])))


def _taken(gpu: GpuCapacity, held: Collection[Allocation], guaranteed: Mapping[str, int]) -> tuple[int, int]:
    """Return the units of a GPU that sessions own, and those that are guaranteed: all of a MIG instance."""
    if gpu.mig is not None and held:
        return gpu.capacity, gpu.capacity
    return sum(allocation.owned_units for allocation in held), sum(guaranteed.values())


def newest_reports(reports: Iterable[Report]) -> dict[str, Report]:
    """Return the newest report of each node; of two of the same instant the one that came last."""
    newest: dict[str, Report] = {}
    for report in reports:
        known = newest.get(report.node)
        if known is None or report.published_at >= known.published_at:
            newest[report.node] = report
    return newest
