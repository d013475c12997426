"""One node and its GPUs, and what is left on them: what a strategy rates.

CPU, memory and pods: what a node has left of them beside its GPUs.

The allocation of one session, as placement counts it.

Who would get what now if everybody wanted the GPU, and who owns what after somebody left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpushare_spawner.model.layer_rules import MigProfile
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.placement.request import Demand


@dataclass(frozen=True)
class Requested:
    """CPU, memory and pods that sessions take of a node."""

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
    """What is free on a node: allocatable less requested, as the cluster's scheduler counts. None: not known.

    What is not known is not looked at: then only the scheduler can say that a pod does not fit.
    """

    cpu: int | None = None
    """Millicores."""
    memory: int | None = None
    """Bytes of host memory."""
    pods: int | None = None
    """Pods that the node can still take."""
    most_cpu: int | None = field(default=None, compare=False)
    """Millicores that are free while nothing runs there. It changes with a node's machine only, so it is no news."""
    most_memory: int | None = field(default=None, compare=False)
    """Bytes that are free while nothing runs there."""
    session_cpu: int | None = None
    """Millicores that are free while no session runs there, what other pods request taken off."""
    session_memory: int | None = None
    """Bytes that are free while no session runs there."""

    @classmethod
    def of_empty_node(cls, cpu: int | None, memory: int | None, pods: int | None = None) -> NodeResources:
        """Return what is free on a node where nothing runs."""
        return cls(cpu, memory, pods, cpu, memory, cpu, memory)

    def can_ever_have(self, cpu: int, memory: int) -> bool:
        """Whether so much would be free if nothing ran there; true where that is not known."""
        return (self.most_cpu is None or cpu <= self.most_cpu) and (
            self.most_memory is None or memory <= self.most_memory
        )

    def sessions_can_leave(self, cpu: int, memory: int) -> bool:
        """Whether so much would be free if all sessions there ended; true where that is not known.

        When pods that are no sessions end nobody knows: daemons never do.
        """
        return (self.session_cpu is None or cpu <= max(self.session_cpu, 0)) and (
            self.session_memory is None or memory <= max(self.session_memory, 0)
        )

    def lacks_cpu(self, cpu: int) -> bool:
        """Whether less is free than a pod asks for. One that asks for none fits where too much is taken already."""
        return self.cpu is not None and self.cpu < cpu > 0

    def lacks_memory(self, memory: int) -> bool:
        """Whether less is free than a pod asks for."""
        return self.memory is not None and self.memory < memory > 0

    def lacks_pods(self) -> bool:
        """Whether the node takes no more pods."""
        return self.pods is not None and self.pods < 1

    def less(self, requested: Requested, by_others: Requested = NOTHING) -> NodeResources:
        """Return what is left; it can be less than nothing. ``by_others``: the part that no session requests."""
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
        """Return what would be free if so much were not requested."""
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
    """By an admin's decision no new session comes."""
    capacity: int
    """Units that may be guaranteed."""
    rank: tuple[str, int, str]
    """Node, index and UUID; the lowest wins a tie."""
    unowned: int
    """Capacity less what sessions own."""
    free: int
    """Capacity less what is guaranteed now: units that nobody owns or that idle owners have lent."""
    layer: LayerName | None = None
    """The sharing layer of its sessions; None: it has none, and can have any layer but MIG."""
    mig: MigProfile | None = None
    """It is a MIG instance, which one session has alone; None: a whole GPU."""

    def left_for(self, layer: LayerName) -> GpuCapacity:
        """Return the GPU as sessions of a layer find it: nothing is free where another layer shares it."""
        return self if self.can_have(layer) else replace(self, unowned=0, free=0)

    def can_have(self, layer: LayerName) -> bool:
        """Return whether a session of a layer can come, by the layer of those that are there."""
        return self.layer in (None, layer) and (layer is LayerName.MIG) is (self.mig is not None)

    @property
    def preference(self) -> tuple[tuple[object, ...], tuple[str, int, str]]:
        """What equal GPUs are ordered by: small MIG instances first, then by node, index and UUID."""
        return (self.mig.size if self.mig is not None else (), self.rank)

    @property
    def offered(self) -> bool:
        """Whether new sessions may come."""
        return self.healthy and not self.cordoned

    @property
    def ownable(self) -> int:
        """Units that a newcomer can own, 0 to 100."""
        return min(max(self.unowned, 0), max(self.free, 0), UNITS_PER_GPU)


@dataclass(eq=False, slots=True)
class NodeCapacity:
    """One node with its GPUs. A GPU that is not healthy, or cordoned, is known, and is offered to nobody."""

    name: str
    gpus: tuple[GpuCapacity, ...]
    """By index; unhealthy and cordoned ones too."""
    healthy: Mapping[str, tuple[GpuCapacity, ...]]
    """GPUs by model that are healthy and not cordoned."""
    most_free: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Free units of those GPUs by model, the most first."""
    resources: NodeResources = UNKNOWN
    """Free CPU, memory and pods, reservations in flight already taken off."""
    derived: dict[Hashable, Any] = field(default_factory=dict)
    """For strategies: what they have computed of this node. Cleared whenever something about the node changes."""
    several_layers: bool = False
    """Whether a GPU of it is a MIG instance, or has had sessions of another layer than the native one."""

    def left_for(self, demand: Demand) -> NodeCapacity:
        """Return the node as sessions of the demand's layer find it, see `GpuCapacity.left_for`; itself where that is
        the same."""
        if demand.layer is LayerName.NATIVE and not demand.by_layer and not self.several_layers:
            return self
        key = (demand.layer, demand.by_layer)
        found: NodeCapacity | None = self.derived.get(key)
        if found is None:
            gpus = tuple(gpu.left_for(demand.layer_on(gpu.model)) for gpu in self.gpus)
            healthy = {
                model: tuple(gpu.left_for(demand.layer_on(model)) for gpu in ones)
                for model, ones in self.healthy.items()
            }
            found = NodeCapacity(self.name, gpus, healthy, resources=self.resources)
            found.changed()
            self.derived[key] = found
        return found

    def changed(self) -> None:
        """Bring what follows from GPUs and resources up to date; `FreeCapacity` calls it after every change."""
        self.derived.clear()
        for model, gpus in self.healthy.items():
            self.most_free[model] = tuple(sorted([gpu.free for gpu in gpus], reverse=True))


@dataclass(frozen=True)
class Allocation:
    """A session's units of 1 %, the same on each of its GPUs. Raises ValueError for contradictory numbers."""

    session: str
    gpus: tuple[str, ...]
    """UUIDs of the GPUs."""
    share_units: int
    """What the session is entitled to."""
    borrowed_units: int = 0
    """Those of ``share_units`` that idle neighbours have lent."""
    effective_units: int = 0
    """What its tier leaves it: all of ``share_units`` when active, 0 when released."""
    opened_at: float = 0.0
    """Seconds since the epoch; of two borrowers the older one is served first."""
    yields: bool = False
    """What its tier took is kept for spawns in quota: nobody else comes to own it."""
    uncounted: Requested = NOTHING
    """What it takes of its node that the node's free CPU, memory and pods do not count yet."""
    user: str = ""
    """Whose session it is; empty: unknown."""
    quota: str = ""
    """The account that it is charged to, see `quota.Account`; empty: none was chosen."""
    layer: LayerName = LayerName.NATIVE
    """The sharing layer of its GPUs; sessions of one GPU have the same."""

    def __post_init__(self) -> None:
        if not 1 <= self.share_units <= UNITS_PER_GPU:
            raise ValueError(f"{self.session}: a share has 1 to {UNITS_PER_GPU} units, not {self.share_units}")
        for name in ("borrowed_units", "effective_units"):
            if not 0 <= getattr(self, name) <= self.share_units:
                raise ValueError(f"{self.session}: {name} is {getattr(self, name)}, outside 0 to {self.share_units}")

    @classmethod
    def of(cls, report: SessionReport) -> Allocation | None:
        """The allocation that an agent reports; None for a session without a share.

        Numbers beyond the share are cut to it: one odd report must not keep the hub from placing anybody.
        """
        if not report.gpus or report.share_units < 1:
            return None
        return cls(
            session=report.id,
            gpus=tuple(dict.fromkeys(report.gpus)),
            share_units=report.share_units,
            borrowed_units=min(report.borrowed_units, report.share_units),
            effective_units=min(report.effective_units, report.share_units),
            opened_at=report.begun,
            yields=report.yields,
            user=report.user,
            quota=report.quota,
            layer=report.layer,
        )

    @property
    def owned_units(self) -> int:
        """Units per GPU that nobody can take away."""
        return self.share_units - self.borrowed_units

    @property
    def age(self) -> tuple[float, str]:
        """Sorts the oldest session first; the name decides between those opened at the same instant."""
        return (self.opened_at, self.session)

    def with_effective(self, units: int) -> Allocation:
        """The same allocation in another tier."""
        return replace(self, effective_units=units)

    def yielding(self, units: int) -> Allocation:
        """The same allocation after it gave up all but so many units: others can own these."""
        borrowed = max(self.borrowed_units, self.share_units - units)
        return replace(self, effective_units=units, borrowed_units=borrowed, yields=True)

    def with_borrowed(self, units: int) -> Allocation:
        """The same allocation with other borrowed units."""
        return replace(self, borrowed_units=units)


def guaranteed_units(capacity: int, allocations: Iterable[Allocation]) -> dict[str, int]:
    """Guaranteed units of each session on one GPU of ``capacity`` units.

    Owned units come first, as far as each session's tier leaves them. What is left of the capacity goes to borrowed
    units, the oldest session first. As long as the owned units fit into the capacity, the sum never exceeds it.
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


def settle(capacities: Mapping[str, int], allocations: Iterable[Allocation]) -> dict[str, int]:
    """New ``borrowed_units`` of the sessions that come to own borrowed units, because their owner is gone.

    ``capacities`` has the units of each GPU by UUID. The oldest borrower is served first. A session on several GPUs
    owns the same on each of them, so it gains what all of them can give. Sessions that gain nothing are left out.
    What a session yields is kept: it counts as owned, and nobody gains it.
    """
    oldest_first = sorted(allocations, key=lambda allocation: allocation.age)
    owned: defaultdict[str, int] = defaultdict(int)
    for allocation in oldest_first:
        for gpu in allocation.gpus:
            owned[gpu] += allocation.share_units if allocation.yields else allocation.owned_units
    settled: dict[str, int] = {}
    for allocation in oldest_first:
        if allocation.yields:
            continue
        gain = min([allocation.borrowed_units, *(capacities.get(gpu, 0) - owned[gpu] for gpu in allocation.gpus)])
        if gain > 0:
            settled[allocation.session] = allocation.borrowed_units - gain
            for gpu in allocation.gpus:
                owned[gpu] += gain
    return settled
