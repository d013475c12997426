"""The GPUs of a machine or a cluster, and what is due on them, at one moment. Who holds what: see the ledger.

The GPUs that are reported, and of which kinds they are, kept up to date by what changes.

The spawns that are to be expected, for placement strategies that look ahead.

What a strategy makes of them stands in `placement`.

GPUs that other sharing layers than ours give out, as the queue and the form's cards look at them.

No agent reports these GPUs and no ledger has them: the scheduler of their layer places servers. The hub keeps a spawn
in the queue until, by what the layer publishes, its server can start.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Protocol

from gpushare_spawner.model.layer_rules import LayersFile, MigInstance, MigProfile, guaranteed_memory, machine_layer
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import GpuReport, Notice, in_order_of_claim
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.model.template import Template, TemplateGpu
from gpushare_spawner.placement import (
    ByLayer,
    PlacementRequest,
    RecentSpawns,
    Requested,
    Strategy,
    WorkloadStrategy,
    suits,
)
from gpushare_spawner.sharing.base import LayerRequest, Tenant


@dataclass(frozen=True)
class GpuKind:
    """GPUs of one model with the same memory, or MIG instances of one profile."""

    model: str
    memory_bytes: int
    count: int
    mig: MigInstance | None = None
    """One of the instances, without the GPU that it is a part of; None: they are whole GPUs."""

    @property
    def gpu_model(self) -> str:
        """The model of the GPU, whose instances have a model name of their own."""
        return self.mig.gpu_model if self.mig is not None else self.model

    def suits(self, gpu: TemplateGpu) -> bool:
        """Whether one of them would do if it were empty: its model, and memory for the guarantee."""
        if self.mig is None:
            return suits(gpu, self.model, self.memory_bytes)
        memory = guaranteed_memory(gpu.memory.guarantee)
        # CUDA uses one MIG device only
        one = gpu.share.count == 1 and gpu.accepts(self.gpu_model)
        return one and self.mig.profile.holds(gpu.share.units, memory)


class GpuInventory:
    """The GPUs of all nodes. A change costs what the node has."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[GpuReport, ...]] = {}
        self._told: dict[str, dict[str, GpuReport]] = {}
        self._gpus: dict[str, GpuReport] = {}
        self._doubled: dict[str, tuple[str, ...]] = {}
        self._counted: Counter[tuple[str, int, MigInstance | None]] = Counter()

    def __len__(self) -> int:
        """How many nodes report, those without a GPU too."""
        return len(self._nodes)

    @property
    def gpus(self) -> Mapping[str, GpuReport]:
        """Every GPU by its UUID. Of one that two nodes report the report of the node that has it counts."""
        return MappingProxyType(self._gpus)

    @property
    def doubled(self) -> Mapping[str, tuple[str, ...]]:
        """The UUIDs that several nodes report, each with these nodes: the first has the GPU."""
        return dict(self._doubled)

    @property
    def kinds(self) -> tuple[GpuKind, ...]:
        """The kinds of GPUs there are, in the order in which they were reported first."""
        return tuple(GpuKind(model, memory, count, mig) for (model, memory, mig), count in self._counted.items())

    def put(self, node: str, gpus: Iterable[GpuReport]) -> None:
        """Set the GPUs of a node."""
        now = tuple(gpus)
        if self._nodes.get(node) == now:
            return
        self._change(node, now)
        self._nodes[node] = now

    def drop(self, node: str) -> None:
        """Forget a node; nothing happens where it is unknown."""
        self._change(node, ())
        self._nodes.pop(node, None)

    def _change(self, node: str, gpus: tuple[GpuReport, ...]) -> None:
        changed = dict.fromkeys([*(gpu.uuid for gpu in self._nodes.get(node, ())), *(gpu.uuid for gpu in gpus)])
        told = {gpu.uuid: gpu for gpu in gpus}
        for uuid in changed:
            of_nodes = self._told.setdefault(uuid, {})
            of_nodes.pop(node, None)
            if uuid in told:
                of_nodes[node] = told[uuid]
            before = self._gpus.pop(uuid, None)
            if before is not None:
                self._count(before, -1)
            claims = in_order_of_claim(of_nodes)
            if claims:
                now = self._gpus[uuid] = of_nodes[claims[0]]
                self._count(now, 1)
            else:
                del self._told[uuid]
            if len(claims) > 1:
                self._doubled[uuid] = claims
            else:
                self._doubled.pop(uuid, None)

    def _count(self, gpu: GpuReport, number: int) -> None:
        kind = (gpu.model, gpu.memory_bytes, None if gpu.mig is None else replace(gpu.mig, gpu=""))
        self._counted[kind] += number
        if not self._counted[kind]:
            del self._counted[kind]


class LayerOutcome(Enum):
    """What a placement request meets."""

    NOW = "now"
    """It can be placed."""
    WAIT = "wait"
    """It cannot be placed now; a wait can help."""
    NEVER = "never"
    """No wait would help."""


@dataclass(frozen=True)
class AskedServer:
    """A server that a layer is to place."""

    template: Template
    tenant: Tenant
    node: str = ""
    """The only node that will do; empty: any."""
    ineligible: frozenset[str] = frozenset()
    """Nodes that cannot take it whatever is free there."""

    def can_be_on(self, node: str) -> bool:
        """Return whether a node will do."""
        return self.node in ("", node) and node not in self.ineligible


@dataclass(frozen=True)
class LayerOffer:
    """Nodes whose GPUs one layer shares in one way."""

    layer: LayerName
    request: LayerRequest
    """What the layer is asked for, on these nodes."""
    kept_off: frozenset[str] = frozenset()
    """Nodes among these that are kept for earlier spawns: the pod must not go there."""


@dataclass(frozen=True)
class LayerVerdict:
    """What a server of a template meets on the GPUs of other layers."""

    outcome: LayerOutcome
    offer: LayerOffer | None = None
    """NOW: where the server can start. Otherwise where it could: the first that there is."""
    why: str = ""
    """WAIT and NEVER: the reason, as a sentence."""
    known: bool = True
    """NOW: whether what is free is known; False: the layer's scheduler decides."""
    gpus: tuple[GpuKind, ...] = ()
    """GPUs that would do, free or not, as far as they are known."""
    profile: MigProfile | None = None
    """NOW and WAIT: that of the MIG device that the server gets; None: it gets none."""
    able: frozenset[str] = frozenset()
    """NOW: the nodes on which the server can be placed. WAIT: those on which it could be if less ran there; empty where
    something else than nodes is short."""


@dataclass(frozen=True)
class Kept:
    """The nodes that are kept for spawns in the queue, as one of these spawns sees it."""

    for_others: frozenset[str] = frozenset()
    """Kept for spawns before it: its server must not go there."""
    own: str = ""
    """Kept for it; empty: none is."""


NOTHING_KEPT = Kept()


class OtherLayers(Protocol):
    """What other layers have, at one instant, less what this hub's spawns in flight will take."""

    def names(self, template: Template) -> tuple[LayerName, ...]:
        """Return the other layers that can serve a template, in the order in which they are tried; empty: none."""

    def native(self, template: Template) -> bool:
        """Return whether GPUs with an agent can serve a template."""

    def verdict(self, asked: AskedServer, kept: Kept = NOTHING_KEPT) -> LayerVerdict:
        """Return what a server meets."""

    def starts_by(self, asked: AskedServer, servers: int) -> float | None:
        """Return when so many such servers could have been placed if all announced stops happen: seconds since the
        epoch; None where nothing is known of it."""

    def least_used(self, nodes: Set[str]) -> str:
        """Return the node of at least one on which the hub's sessions have the smallest part of the GPUs."""

    @property
    def gpus(self) -> int:
        """The physical GPUs of other layers, as far as they are known."""


NO_RULES = LayersFile()
MILLICORES = 1000
"""In a CPU core."""


def guaranteed_resources(template: Template) -> Requested:
    """Return the CPU and memory that a template guarantees to a server."""
    cpu, memory = template.resources.cpu.guarantee, template.resources.memory.guarantee
    return Requested(cpu=math.ceil((cpu or 0.0) * MILLICORES), memory=memory or 0)


@dataclass(frozen=True)
class GpuSnapshot:
    """What is known now beside the ledger.

    A thousand GPUs are of few kinds: what a template could use is found among those.
    """

    inventory: GpuInventory
    awaited: str = ""
    """Why GPUs that exist are missing here for the moment, in a sentence; empty where none are."""
    announced: tuple[tuple[str, Notice], ...] = ()
    """Idle actions that are due, each with its session's name in the ledger."""
    layers: OtherLayers | None = None
    """GPUs that other layers share; None: there are none."""
    rules: LayersFile = NO_RULES
    """The layers of these GPUs by their models, where the hub places by all layers: on one machine."""
    _suiting: dict[int, _Suiting] = field(default_factory=dict, repr=False)

    @property
    def gpus(self) -> Mapping[str, GpuReport]:
        """Every GPU by its UUID."""
        return self.inventory.gpus

    @property
    def capacity_units(self) -> int:
        """Units of 1 % of all GPUs, those of other layers too."""
        others = self.layers.gpus if self.layers is not None else 0
        here = sum(UNITS_PER_GPU if gpu.mig is None else gpu.capacity_units for gpu in self.gpus.values())
        return here + others * UNITS_PER_GPU

    def native(self, template: Template) -> bool:
        """Return whether GPUs with an agent can serve a template."""
        return self.layers is None or self.layers.native(template)

    def other_layers(self, template: Template) -> OtherLayers | None:
        """Return the other layers if one of them can serve a template, else None."""
        return self.layers if self.layers is not None and self.layers.names(template) else None

    @cached_property
    def kinds(self) -> tuple[GpuKind, ...]:
        """The kinds of GPUs there are, in the order in which they were reported."""
        return self.inventory.kinds

    def suiting(self, template: Template) -> tuple[GpuKind, ...]:
        """The kinds that would do for what a template asks for; none for a template without a GPU."""
        return self._suits(template).kinds

    def models(self, template: Template) -> frozenset[str]:
        """The models that would do for what a template asks for; none for a template without a GPU."""
        return self._suits(template).models

    def request(self, template: Template) -> PlacementRequest:
        """What a spawn of this template asks of placement. Raises ValueError for a template without a GPU."""
        return self._suits(template).request

    def _suits(self, template: Template) -> _Suiting:
        # by identity, which is cheap; the object is kept beside it so that no other can take its place
        found = self._suiting.get(id(template))
        if found is None:
            kinds: list[GpuKind] = []
            by_layer: dict[LayerName, set[str]] = {}
            for kind in self.kinds:
                layer = self._layer_on(kind, template)
                if layer is not None and template.gpu is not None and kind.suits(template.gpu):
                    kinds.append(kind)
                    by_layer.setdefault(layer, set()).add(kind.model)
            found = self._suiting[id(template)] = _Suiting(template, tuple(kinds), self._in_order(by_layer))
        return found

    def _layer_on(self, kind: GpuKind, template: Template) -> LayerName | None:
        """The layer by which a template's sessions can have such GPUs; None: they cannot."""
        if template.gpu is None:
            return None
        named = template.gpu.layer
        if named is not None:
            return named if (named is LayerName.MIG) is (kind.mig is not None) else None
        layer = machine_layer(self.rules, kind.gpu_model, mig=kind.mig is not None)
        if layer is None or layer is LayerName.NATIVE:
            return layer
        # a template that promises what a layer cannot keep is not offered there
        return None if template.gpu.share.count > 1 or template.broken_promises(layer) else layer

    def _in_order(self, by_layer: Mapping[LayerName, set[str]]) -> ByLayer:
        """As the rules name the layers; the native one comes last, as on a cluster."""
        named = [rule.layer for rule in self.rules.rules]
        order = sorted(by_layer, key=lambda layer: (layer is LayerName.NATIVE, layer in named and named.index(layer)))
        return tuple((layer, frozenset(by_layer[layer])) for layer in order)


@dataclass(frozen=True)
class _Suiting:
    """What would do for a template."""

    template: Template
    kinds: tuple[GpuKind, ...]
    by_layer: ByLayer
    """Their models, by the layer that a session would have there."""

    @cached_property
    def models(self) -> frozenset[str]:
        return frozenset(kind.model for kind in self.kinds)

    @cached_property
    def request(self) -> PlacementRequest:
        """Raises ValueError for a template without a GPU."""
        gpu = self.template.gpu
        if gpu is None:
            raise ValueError(f"template {self.template.name} asks for no GPU")
        guaranteed = guaranteed_resources(self.template)
        return PlacementRequest(
            gpu.share,
            cpu=guaranteed.cpu,
            memory=guaranteed.memory,
            models=self.models,
            template=self.template.name,
            layer=self.by_layer[0][0] if self.by_layer else gpu.layer or LayerName.NATIVE,
            by_layer=self.by_layer if len(self.by_layer) > 1 else (),
        )


class ExpectedWorkload:
    """Counts the spawns of each template, and gives a strategy the workload that they make.

    ``templates`` returns those that can be spawned now. The counts live in this hub process: after a restart all
    templates count the same again.
    """

    def __init__(self, templates: Callable[[], Iterable[Template]]) -> None:
        self._templates = templates
        self._spawns = RecentSpawns()

    def offered(self) -> list[Template]:
        """The templates of now that ask for a GPU."""
        return [template for template in self._templates() if template.gpu is not None]

    def spawned(self, template: str, now: float) -> None:
        """Count a spawn that got its place; ``now``: seconds on a monotonic clock."""
        self._spawns.spawned(template, now)

    def strategy(self, strategy: Strategy, snapshot: GpuSnapshot, now: float) -> Strategy:
        """Return the strategy for the workload of now; one that looks at no workload comes back as it is."""
        if not isinstance(strategy, WorkloadStrategy):
            return strategy
        demands = {
            template.name: snapshot.request(template).demand for template in self.offered() if snapshot.native(template)
        }
        return strategy.for_workload(self._spawns.workload(demands, now))
