"""One node with its GPUs, free CPU, memory and pods, and the allocations of its sessions.

Computes the guaranteed and owned units of each session on a GPU. All nodes together: capacity.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import MigProfile
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import (
    NO_NEIGHBOUR_RULES,
    UNITS_PER_GPU,
    NeighbourRules,
    Share,
    borrowed_as,
    stated_on,
    units_on,
    units_on_all,
)
from gpushare_spawner.placement.request import UNCONDITIONAL, Conditions, Demand


@dataclass(frozen=True)
class Requested:
    """CPU, memory and pods that sessions request from a node."""

    cpu: int = 0
    """Millicores."""
    memory: int = 0
    """Bytes of host memory."""
    pods: int = 0

    @classmethod
    def total(cls, parts: Iterable[Requested]) -> Requested:
        """Return the sum."""
        cpu = memory = pods = 0
        for part in parts:
            cpu, memory, pods = cpu + part.cpu, memory + part.memory, pods + part.pods
        return cls(cpu, memory, pods)


NOTHING = Requested()


@dataclass(frozen=True)
class NodeResources:
    """Free resources of a node: allocatable less requested, as the cluster's scheduler counts. None: unknown.

    An unknown resource is ignored: only the scheduler can then reject a pod.
    """

    cpu: int | None = None
    """Millicores."""
    memory: int | None = None
    """Bytes of host memory."""
    pods: int | None = None
    """Pods that the node can still take."""
    most_cpu: int | None = field(default=None, compare=False)
    """Millicores that are free while nothing runs there. Ignored by equality: only the machine changes it."""
    most_memory: int | None = field(default=None, compare=False)
    """Bytes that are free while nothing runs there."""
    session_cpu: int | None = None
    """Millicores that are free while no session runs there: less the requests of other pods."""
    session_memory: int | None = None
    """Bytes that are free while no session runs there."""

    @classmethod
    def of_empty_node(cls, cpu: int | None, memory: int | None, pods: int | None = None) -> NodeResources:
        """Return the free resources of a node where nothing runs."""
        return cls(cpu, memory, pods, cpu, memory, cpu, memory)

    def can_ever_have(self, cpu: int, memory: int) -> bool:
        """Return whether so much would be free if nothing ran there; true if unknown."""
        return (self.most_cpu is None or cpu <= self.most_cpu) and (
            self.most_memory is None or memory <= self.most_memory
        )

    def sessions_can_leave(self, cpu: int, memory: int) -> bool:
        """Return whether so much would be free if all sessions there ended; true if unknown.

        Other pods do not count: their end is unknown, and daemons never end.
        """
        return (self.session_cpu is None or cpu <= max(self.session_cpu, 0)) and (
            self.session_memory is None or memory <= max(self.session_memory, 0)
        )

    def lacks_cpu(self, cpu: int) -> bool:
        """Return whether less is free than a pod requests. A pod without a request always fits."""
        return self.cpu is not None and self.cpu < cpu > 0

    def lacks_memory(self, memory: int) -> bool:
        """Return whether less is free than a pod requests."""
        return self.memory is not None and self.memory < memory > 0

    def lacks_pods(self) -> bool:
        """Return whether the node takes no more pods."""
        return self.pods is not None and self.pods < 1

    def less(self, requested: Requested, by_others: Requested = NOTHING) -> NodeResources:
        """Return the remaining resources, which can be negative. ``by_others``: the part that no session requests."""
        return NodeResources(
            None if self.cpu is None else self.cpu - requested.cpu,
            None if self.memory is None else self.memory - requested.memory,
            None if self.pods is None else self.pods - requested.pods,
            self.most_cpu,
            self.most_memory,
            None if self.session_cpu is None else self.session_cpu - by_others.cpu,
            None if self.session_memory is None else self.session_memory - by_others.memory,
        )

    def more(self, requested: Requested) -> NodeResources:
        """Return the free resources without these requests."""
        return self.less(Requested(-requested.cpu, -requested.memory, -requested.pods))


UNKNOWN = NodeResources()


@dataclass(eq=False, slots=True)
class GpuCapacity:
    """One GPU. Units are of 1 %; only `FreeCapacity.update` changes them."""

    uuid: str
    node: str
    index: int
    model: str
    healthy: bool
    cordoned: bool
    """An admin has closed the GPU to new sessions."""
    capacity: int
    """Units that may be guaranteed."""
    rank: tuple[str, int, str]
    """Node, index and UUID; the lowest wins a tie."""
    unowned: int
    """Capacity less the units that sessions own."""
    free: int
    """Capacity less the units guaranteed now: unowned units and units that idle owners have lent."""
    layer: LayerName | None = None
    """Sharing layer of its sessions; None if it has no sessions, and any layer but MIG is possible."""
    mig: MigProfile | None = None
    """Profile of a MIG instance, which one session has alone; None: a whole GPU."""
    neighbours: NeighbourRules = NO_NEIGHBOUR_RULES
    """The labels and rules of its sessions together."""

    def left_for(self, demand: Demand) -> GpuCapacity:
        """Return the GPU for a demand: nothing is free if its sessions, or the demand's conditions, exclude it."""
        rules = demand.conditions.neighbours
        if (
            self.can_have(demand.layer_on(self.model))
            and self.can_ever_meet(demand.conditions)
            and self.neighbours.accept(rules)
            and (self._is_empty or not rules.alone)
        ):
            return self
        # units below 0 must become free for a session that is alone
        return replace(self, unowned=0, free=min(0, self.free - self.capacity) if rules.alone else 0)

    def can_ever_meet(self, conditions: Conditions) -> bool:
        """Return whether the GPU meets the conditions now, or will when sessions on it end."""
        near = conditions.near
        return conditions.name(self.uuid, self.node) and (not near or not near.isdisjoint(self.neighbours.labels))

    @property
    def _is_empty(self) -> bool:
        return self.free == self.unowned == self.capacity and (self.layer is None or self.mig is not None)

    def can_have(self, layer: LayerName) -> bool:
        """Return whether a session of this layer is possible, by the layer of the present sessions."""
        return self.layer in (None, layer) and (layer is LayerName.MIG) is (self.mig is not None)

    @property
    def preference(self) -> tuple[tuple[object, ...], tuple[str, int, str]]:
        """Sort key of equal GPUs: small MIG instances first, then by node, index and UUID."""
        return (self.mig.size if self.mig is not None else (), self.rank)

    @property
    def offered(self) -> bool:
        """Whether the GPU accepts new sessions."""
        return self.healthy and not self.cordoned

    @property
    def ownable(self) -> int:
        """Units that a new session can own, 0 to 100."""
        return min(max(self.unowned, 0), max(self.free, 0), UNITS_PER_GPU)


@dataclass(eq=False, slots=True)
class NodeCapacity:
    """One node with its GPUs. An unhealthy or cordoned GPU is recorded but accepts no new sessions."""

    name: str
    gpus: tuple[GpuCapacity, ...]
    """By index, including unhealthy and cordoned GPUs."""
    healthy: Mapping[str, tuple[GpuCapacity, ...]]
    """GPUs by model that are healthy and not cordoned."""
    most_free: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Free units of these GPUs by model, the most first."""
    resources: NodeResources = UNKNOWN
    """Free CPU, memory and pods, less holds of spawns in progress."""
    derived: dict[Hashable, Any] = field(default_factory=dict)
    """Cache of the strategies' results for this node. Cleared by each change of the node."""
    several_layers: bool = False
    """Whether one of its GPUs is a MIG instance, or has had sessions of a layer that is not native."""

    origin: NodeCapacity | None = None
    """The node of which this is the part left for a demand, with the same GPUs in the same order; None: itself."""

    def left_for(self, demand: Demand) -> NodeCapacity:
        """Return the node for the demand's layer and conditions, see `GpuCapacity.left_for`; itself if equal."""
        plain = demand.layer is LayerName.NATIVE and not demand.by_layer and not self.several_layers
        if plain and demand.conditions is UNCONDITIONAL:
            return self
        key = (demand.layer, demand.by_layer, demand.conditions)
        remaining: NodeCapacity | None = self.derived.get(key)
        if remaining is None:
            gpus = tuple(gpu.left_for(demand) for gpu in self.gpus)
            healthy = {
                model: tuple(gpu.left_for(demand) for gpu in model_gpus) for model, model_gpus in self.healthy.items()
            }
            remaining = NodeCapacity(self.name, gpus, healthy, resources=self.resources, origin=self)
            remaining.changed()
            self.derived[key] = remaining
        return remaining

    def forget(self, key: Hashable) -> None:
        """Drop a strategy's cached result, also for the parts left for demands."""
        self.derived.pop(key, None)
        for remaining in self.derived.values():
            if isinstance(remaining, NodeCapacity):
                remaining.derived.pop(key, None)

    def changed(self) -> None:
        """Update all values derived from GPUs and resources. `FreeCapacity` calls it after every change."""
        self.derived.clear()
        for model, gpus in self.healthy.items():
            self.most_free[model] = tuple(sorted([gpu.free for gpu in gpus], reverse=True))


@dataclass(frozen=True)
class Allocation:
    """A session's units of 1 % on each of its GPUs. Raises ValueError for contradictory numbers.

    Units are the same on each GPU, but on the last at most ``last_units``, see `share.units_on`; the borrowed ones can
    differ, see ``borrowed_each``.
    """

    session: str
    gpus: tuple[str, ...]
    """UUIDs of the GPUs."""
    share_units: int
    """Units that the session is entitled to."""
    borrowed_units: int = 0
    """Part of ``share_units`` that idle neighbours have lent."""
    effective_units: int = 0
    """Units that the tier leaves: all of ``share_units`` when active, 0 when released."""
    opened_at: float = 0.0
    """Seconds since the epoch; of two borrowers the older one is served first."""
    yields: bool = False
    """The units that its tier took are kept for spawns in quota: no other session comes to own them."""
    uncounted: Requested = NOTHING
    """Its requests that the node's free CPU, memory and pods do not include yet."""
    user: str = ""
    """Owner of the session; empty: unknown."""
    quota: str = ""
    """Account that is charged, see `quota.Account`; empty: none was chosen."""
    template: str = ""
    """Name of its template. Its account is also charged for the template's CPU and memory. Empty: unknown."""
    layer: LayerName = LayerName.NATIVE
    """Sharing layer of its GPUs. All sessions of one GPU have the same layer."""
    neighbours: NeighbourRules = NO_NEIGHBOUR_RULES
    """Its labels, and its rules for other sessions on its GPUs."""
    last_units: int = 0
    """Units of its share on the last GPU if these are fewer; 0: as many."""
    borrowed_each: tuple[int, ...] = ()
    """The borrowed units on each GPU, if ``borrowed_units`` does not say them, see `share.borrowed_as`."""

    def __post_init__(self) -> None:
        if not 1 <= self.share_units <= UNITS_PER_GPU:
            raise ValueError(f"{self.session}: a share has 1 to {UNITS_PER_GPU} units, not {self.share_units}")
        for name in ("borrowed_units", "effective_units"):
            if not 0 <= getattr(self, name) <= self.share_units:
                raise ValueError(f"{self.session}: {name} is {getattr(self, name)}, outside 0 to {self.share_units}")
        if not 0 <= self.last_units < self.share_units:
            raise ValueError(f"{self.session}: the last GPU has {self.last_units} of {self.share_units} units")

    @classmethod
    def of(cls, report: SessionReport) -> Allocation | None:
        """Return the allocation that an agent reports; None for a session without a share.

        Numbers above the share are cut to it: one wrong report must not stop all placement.
        """
        if not report.gpus or report.share_units < 1:
            return None
        gpus = tuple(dict.fromkeys(report.gpus))
        allocation = cls(
            session=report.id,
            gpus=gpus,
            share_units=report.share_units,
            borrowed_units=min(report.borrowed_units, report.share_units),
            effective_units=min(report.effective_units, report.share_units),
            opened_at=report.begun,
            yields=report.yields,
            user=report.user,
            quota=report.quota,
            template=report.template,
            layer=report.layer,
            neighbours=report.neighbours,
            last_units=report.share.last_units if len(gpus) > 1 else 0,
        )
        return allocation.borrowing(report.borrowed_each) if len(report.borrowed_each) == len(gpus) else allocation

    def on(self, gpu: str) -> Allocation:
        """Return the allocation on one of its GPUs alone; itself if it has the same units on each."""
        if not self.borrowed_each and (not self.last_units or gpu != self.gpus[-1]):
            return self
        units = units_on(gpu, self.gpus, self.share_units, self.last_units)
        return replace(
            self,
            share_units=units,
            borrowed_units=stated_on(gpu, self.gpus, self.borrowed_each, max(0, units - self.owned_units)),
            effective_units=min(units, self.effective_units),
            last_units=0,
            borrowed_each=(),
        )

    @property
    def each(self) -> list[Allocation]:
        """The allocation on each of its GPUs alone."""
        return [self.on(gpu) for gpu in self.gpus]

    def least_of(self, guaranteed: Mapping[str, int]) -> int:
        """Return the units that are guaranteed on each of its GPUs, from those on each; 0 without a GPU."""
        limited = [units for gpu, units in guaranteed.items() if units < self.on(gpu).effective_units]
        return min(limited, default=self.effective_units if guaranteed else 0)

    @property
    def total_units(self) -> int:
        """The units of its share on all GPUs."""
        return Share(self.share_units, len(self.gpus), self.last_units).total_units

    def total_of(self, units: int) -> int:
        """Return the units on all GPUs if it has so many on each, and on the last at most those of its share there."""
        return units_on_all(self.gpus, units, self.last_units)

    @property
    def owned_units(self) -> int:
        """Units that no other session can take, on the GPU with the fewest of those with borrowed units."""
        return self.share_units - self.borrowed_units

    @property
    def most_units(self) -> int:
        """Units per GPU that it can use: its share, or what an idle action leaves."""
        return self.share_units if self.yields else self.effective_units

    @property
    def age(self) -> tuple[float, str]:
        """Sort key: the oldest session first; the name decides between equal instants."""
        return (self.opened_at, self.session)

    def with_effective(self, units: int) -> Allocation:
        """Return the allocation in another tier."""
        return replace(self, effective_units=units)

    def yielding(self, units: int) -> Allocation:
        """Return the allocation after it gave up all but so many units. Others can own these."""
        borrowed = [max(here.borrowed_units, here.share_units - units) for here in self.each]
        return replace(self.borrowing(borrowed), effective_units=units, yields=True)

    def borrowing(self, each: Sequence[int]) -> Allocation:
        """Return the allocation with other borrowed units on each of its GPUs, at most those of its share there."""
        units = [here.share_units for here in self.each]
        borrowed, borrowed_each = borrowed_as(units, list(map(min, units, each)))
        return replace(self, borrowed_units=borrowed, borrowed_each=borrowed_each)


def guaranteed_units(capacity: int, allocations: Iterable[Allocation]) -> dict[str, int]:
    """Return the guaranteed units of each session on one GPU of ``capacity`` units.

    Owned units come first, as far as each session's tier leaves them. The rest of the capacity goes to borrowed
    units, the oldest session first. If the owned units fit into the capacity, the sum never exceeds it.
    """
    oldest_first = sorted(allocations, key=lambda allocation: allocation.age)
    guaranteed = {
        allocation.session: min(allocation.owned_units, allocation.effective_units) for allocation in oldest_first
    }
    left = max(0, capacity - sum(guaranteed.values()))
    for allocation in oldest_first:
        more = min(left, allocation.effective_units - guaranteed[allocation.session])
        guaranteed[allocation.session] += more
        left -= more
    return guaranteed


def convert_borrowed(capacities: Mapping[str, int], allocations: Iterable[Allocation]) -> dict[str, Allocation]:
    """Return the sessions that get to own borrowed units, because the owner has left, as they are then.

    ``capacities`` has the units of each GPU by UUID. On each GPU the oldest borrower is served first. Units that a
    session yields stay kept: they count as owned.
    """
    oldest_first = sorted(allocations, key=lambda allocation: allocation.age)
    owned: defaultdict[str, int] = defaultdict(int)
    for allocation in oldest_first:
        for gpu in allocation.gpus:
            here = allocation.on(gpu)
            owned[gpu] += here.share_units if here.yields else here.owned_units
    converted: dict[str, Allocation] = {}
    for allocation in oldest_first:
        if allocation.yields or not allocation.borrowed_units:
            continue
        gains = {
            gpu: max(0, min(here.borrowed_units, capacities.get(gpu, 0) - owned[gpu]))
            for gpu, here in zip(allocation.gpus, allocation.each, strict=True)
        }
        if any(gains.values()):
            left = [here.borrowed_units - gain for here, gain in zip(allocation.each, gains.values(), strict=True)]
            converted[allocation.session] = allocation.borrowing(left)
            for gpu, gain in gains.items():
                owned[gpu] += gain
    return converted
