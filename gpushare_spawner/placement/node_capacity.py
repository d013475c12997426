"""One node and its GPUs, and what is left on them: what a strategy rates."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers.mig import MigProfile
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.placement.node_resources import UNKNOWN, NodeResources
from gpushare_spawner.placement.request import Demand


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
