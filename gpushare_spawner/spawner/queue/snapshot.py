"""The GPUs of a machine or a cluster and the pending idle actions on them, at one instant.

Allocations are in the ledger. `GpuInventory` contains the reported GPUs by kind. `OtherLayers` is the interface to GPUs
of other sharing layers: agents do not report them, the ledger does not contain them, and their layer's scheduler places
servers. The hub keeps a spawn in the queue until its server can start according to the published state of the layer.
`ExpectedWorkload` supplies placement strategies with the expected spawns; the strategies are in `placement`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Protocol

from gpushare_spawner.idle.keep import exempts, keep_in_force
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import LayersFile, MigInstance, MigProfile, guaranteed_memory, machine_layer
from gpushare_spawner.model.quantity import whole_millicores
from gpushare_spawner.model.report import GpuReport, Notice, Report, by_first_report
from gpushare_spawner.model.share import UNITS_PER_GPU, Share
from gpushare_spawner.model.template import Template, TemplateGpu
from gpushare_spawner.placement.departures import IdleSince
from gpushare_spawner.placement.node import Requested
from gpushare_spawner.placement.request import ByLayer, Conditions, PlacementRequest, RecentSpawns, Workload, suits
from gpushare_spawner.placement.strategy import Strategy
from gpushare_spawner.sharing.base import LayerRequest, Tenant


@dataclass(frozen=True)
class GpuKind:
    """GPUs of one model with the same memory, or MIG instances of one profile."""

    model: str
    memory_bytes: int
    count: int
    mig: MigInstance | None = None
    """An instance of this kind, without its GPU's UUID; None: whole GPUs."""

    @property
    def gpu_model(self) -> str:
        """The model of the GPU; MIG instances have their own model name."""
        return self.mig.gpu_model if self.mig is not None else self.model

    def suits(self, gpu: TemplateGpu) -> bool:
        """Return whether one empty GPU would suit, by its model and its memory for the guarantee."""
        if self.mig is None:
            return suits(gpu, self.model, self.memory_bytes)
        memory = guaranteed_memory(gpu.memory.guarantee)
        # CUDA uses only one MIG device
        single_gpu = gpu.share.count == 1 and gpu.accepts(self.gpu_model)
        return single_gpu and self.mig.profile.covers(gpu.share.units, memory)


MOST_SUITING = 2000
"""Templates whose suitable GPUs are kept from one snapshot to the next, those of files that have changed included."""


class GpuInventory:
    """The GPUs of all nodes. The cost of a change is proportional to the number of GPUs on its node."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[GpuReport, ...]] = {}
        self._reported: dict[str, dict[str, GpuReport]] = {}
        self._gpus: dict[str, GpuReport] = {}
        self._doubled: dict[str, tuple[str, ...]] = {}
        self._counted: Counter[tuple[str, int, MigInstance | None]] = Counter()
        self._suiting: dict[int, _Suiting] = {}
        self._suiting_of: tuple[tuple[GpuKind, ...], LayersFile] | None = None

    def __len__(self) -> int:
        """Return the number of nodes that report, including nodes without a GPU."""
        return len(self._nodes)

    @property
    def gpus(self) -> Mapping[str, GpuReport]:
        """Every GPU by its UUID. If two nodes report a GPU, the report of its owner counts."""
        return MappingProxyType(self._gpus)

    @property
    def doubled(self) -> Mapping[str, tuple[str, ...]]:
        """UUIDs that several nodes report, each with these nodes; the first node owns the GPU."""
        return dict(self._doubled)

    @property
    def kinds(self) -> tuple[GpuKind, ...]:
        """The kinds of GPUs, in the order of their first report."""
        return tuple(GpuKind(model, memory, count, mig) for (model, memory, mig), count in self._counted.items())

    def suiting(self, kinds: tuple[GpuKind, ...], rules: LayersFile) -> dict[int, _Suiting]:
        """Return what was found for templates, by their identity: all snapshots of the same kinds share it."""
        if self._suiting_of != (kinds, rules) or len(self._suiting) > MOST_SUITING:
            self._suiting, self._suiting_of = {}, (kinds, rules)
        return self._suiting

    def put(self, node: str, gpus: Iterable[GpuReport]) -> None:
        """Set the GPUs of a node."""
        now = tuple(gpus)
        if self._nodes.get(node) == now:
            return
        self._change(node, now)
        self._nodes[node] = now

    def drop(self, node: str) -> None:
        """Remove a node. Does nothing for an unknown node."""
        self._change(node, ())
        self._nodes.pop(node, None)

    def _change(self, node: str, gpus: tuple[GpuReport, ...]) -> None:
        changed = dict.fromkeys([*(gpu.uuid for gpu in self._nodes.get(node, ())), *(gpu.uuid for gpu in gpus)])
        reported = {gpu.uuid: gpu for gpu in gpus}
        for uuid in changed:
            of_nodes = self._reported.setdefault(uuid, {})
            of_nodes.pop(node, None)
            if uuid in reported:
                of_nodes[node] = reported[uuid]
            before = self._gpus.pop(uuid, None)
            if before is not None:
                self._count(before, -1)
            claims = by_first_report(of_nodes)
            if claims:
                now = self._gpus[uuid] = of_nodes[claims[0]]
                self._count(now, 1)
            else:
                del self._reported[uuid]
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
    """The outcome of a placement request."""

    NOW = "now"
    """The request can be placed."""
    WAIT = "wait"
    """The request cannot be placed now, but may be placed later."""
    NEVER = "never"
    """The request can never be placed."""


@dataclass(frozen=True)
class SpawnRequest:
    """A template with a GPU and a server for which a spawn is requested. `placement` returns the placement request."""

    tenant: Tenant
    template: Template
    node: str = ""
    """The only suitable node; empty: any."""
    requested: Requested | None = None
    """The resources that its pod requests; None: the template's guarantees."""
    left_out: Callable[[], Mapping[str, str]] = dict
    """Returns the nodes that it avoids now because they did not admit one of its pods, each with the missing resource.
    """

    ineligible: Callable[[], frozenset[str]] = frozenset
    """Returns the nodes that cannot run its pod, regardless of free capacity."""

    @property
    def session(self) -> str:
        """The session's id."""
        return self.tenant.session

    @property
    def gpu(self) -> TemplateGpu:
        """The GPU part of the template. Raises ValueError for a template without a GPU."""
        if self.template.gpu is None:
            raise ValueError(f"template {self.template.name} asks for no GPU")
        return self.template.gpu

    @property
    def share(self) -> Share:
        """The size of the share and the number of GPUs."""
        return self.gpu.share

    def placement_request(self, snapshot: GpuSnapshot) -> PlacementRequest:
        """Return the placement request on the GPUs of a snapshot."""
        request = snapshot.request(self.template)
        return replace(
            request,
            cpu=self.requested.cpu if self.requested is not None else request.cpu,
            memory=self.requested.memory if self.requested is not None else request.memory,
            user=self.tenant.user,
            node=self.node,
            left_out=frozenset(self.left_out()),
            ineligible=self.ineligible(),
        )


@dataclass(frozen=True)
class LayerOffer:
    """Nodes with GPUs that one layer shares in one way."""

    layer: LayerName
    request: LayerRequest
    """The request to the layer, on these nodes."""
    excluded_nodes: frozenset[str] = frozenset()
    """The nodes among these that are held for earlier spawns; the pod must not run there."""


@dataclass(frozen=True)
class LayerVerdict:
    """The outcome for a server of a template on the GPUs of other layers."""

    outcome: LayerOutcome
    offer: LayerOffer | None = None
    """The offer for the server (NOW), or the first offer that would suit (WAIT and NEVER)."""
    why: str = ""
    """WAIT and NEVER: the reason, as a sentence."""
    certain: bool = True
    """Whether free capacity is certain, for NOW; False: the layer's scheduler decides."""
    gpus: tuple[GpuKind, ...] = ()
    """The published suitable GPUs, free or not."""
    profile: MigProfile | None = None
    """The profile of the server's MIG device, for NOW and WAIT; None if there is no MIG device."""
    able: frozenset[str] = frozenset()
    """For NOW, the nodes on which the server can be placed. For WAIT, the nodes that would suit if fewer servers ran
    there; empty if the nodes are not the limiting resource.
    """


@dataclass(frozen=True)
class LayerHolds:
    """The nodes that are held for spawns in the queue, as seen by one spawn."""

    for_others: frozenset[str] = frozenset()
    """Nodes held for earlier spawns; this spawn's server must not run there."""
    own: str = ""
    """The node held for this spawn; empty: none."""


NO_HOLDS = LayerHolds()


class OtherLayers(Protocol):
    """Free capacity of other layers at one instant, minus the shares of this hub's spawns in flight."""

    def names(self, template: Template) -> tuple[LayerName, ...]:
        """Return the other layers that can serve a template, in the order in which they are tried; empty: none."""

    def native(self, template: Template) -> bool:
        """Return whether GPUs with an agent can serve a template."""

    def verdict(self, request: SpawnRequest, holds: LayerHolds = NO_HOLDS) -> LayerVerdict:
        """Return the outcome for a spawn."""

    def starts_by(self, request: SpawnRequest, servers: int) -> float | None:
        """Return when ``servers`` servers like this could be placed if all notified stops happen.

        The result is in seconds since the epoch; None: unknown.
        """

    def least_used(self, nodes: Set[str]) -> str:
        """Return the node on which the hub's sessions use the smallest part of the GPUs. ``nodes`` is not empty."""

    @property
    def gpus(self) -> int:
        """The number of physical GPUs that other layers publish."""


NO_RULES = LayersFile()


def guaranteed_resources(template: Template) -> Requested:
    """Return the CPU and memory that a template guarantees to a server."""
    cpu, memory = template.resources.cpu.guarantee, template.resources.memory.guarantee
    return Requested(cpu=whole_millicores(cpu or 0.0), memory=memory or 0)


def idle_sessions(report: Report, now: float) -> dict[str, IdleSince]:
    """Return since when the sessions of a node are idle, except those that work, are kept or are exempt.

    ``now``: seconds since the epoch.
    """
    sessions = {}
    for session in report.sessions:
        works = session.gpu_busy or not session.gpu_use_known
        if not works and not keep_in_force(session.keep, now) and not exempts(session.exemption, now):
            since = session.begun if session.last_gpu_activity is None else session.last_gpu_activity
            quiet = None if session.kernels_busy else max(since, session.last_kernel_activity or 0.0)
            sessions[session.id] = IdleSince(since, quiet)
    return sessions


@dataclass(frozen=True)
class GpuSnapshot:
    """The state of the GPUs, in addition to the ledger.

    Suitable GPUs for a template are selected by kind, because even a thousand GPUs have only a few kinds.
    """

    inventory: GpuInventory
    awaited: str = ""
    """Why existing GPUs are temporarily missing here, as a sentence; empty if none are missing."""
    notices: tuple[tuple[str, Notice], ...] = ()
    """Notices of pending idle actions, each with its session's name in the ledger."""
    idle_since: Callable[[str], IdleSince | None] = field(default=lambda session: None, compare=False)
    """Returns since when a session is idle, by its name in the ledger; None: it works, or no idle action is allowed."""
    layers: OtherLayers | None = None
    """The GPUs that other layers share; None if there are none."""
    rules: LayersFile = NO_RULES
    """The layers of these GPUs by model, if the hub places servers for all layers itself (on one machine)."""

    @property
    def gpus(self) -> Mapping[str, GpuReport]:
        """Every GPU by its UUID."""
        return self.inventory.gpus

    @property
    def capacity_units(self) -> int:
        """Units of 1 % of all GPUs, including those of other layers."""
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
        """The kinds of GPUs, in the order of their first report."""
        return self.inventory.kinds

    @cached_property
    def _suiting(self) -> dict[int, _Suiting]:
        return self.inventory.suiting(self.kinds, self.rules)

    def suiting(self, template: Template) -> tuple[GpuKind, ...]:
        """Return the suitable kinds for a template; none for a template without a GPU."""
        return self._suits(template).kinds

    def models(self, template: Template) -> frozenset[str]:
        """Return the suitable models for a template; none for a template without a GPU."""
        return self._suits(template).models

    def request(self, template: Template) -> PlacementRequest:
        """Return the placement request of a spawn of this template. Raises ValueError for a template without a GPU."""
        return self._suits(template).request

    def _suits(self, template: Template) -> _Suiting:
        # keyed by id(), which is cheap; the value references the template, so that its id() is not reused
        suiting = self._suiting.get(id(template))
        if suiting is None:
            kinds: list[GpuKind] = []
            by_layer: dict[LayerName, set[str]] = {}
            for kind in self.kinds:
                layer = self._layer_on(kind, template)
                if layer is not None and template.gpu is not None and kind.suits(template.gpu):
                    kinds.append(kind)
                    by_layer.setdefault(layer, set()).add(kind.model)
            suiting = self._suiting[id(template)] = _Suiting(template, tuple(kinds), self._in_order(by_layer))
        return suiting

    def _layer_on(self, kind: GpuKind, template: Template) -> LayerName | None:
        """Return the layer with which a template's sessions can share such GPUs; None if there is no layer."""
        if template.gpu is None:
            return None
        named = template.gpu.layer
        if named is not None:
            return named if (named is LayerName.MIG) is (kind.mig is not None) else None
        layer = machine_layer(self.rules, kind.gpu_model, mig=kind.mig is not None)
        if layer is None or layer is LayerName.NATIVE:
            return layer
        # a layer that cannot fulfil a template's promises is skipped
        return None if template.gpu.share.count > 1 or template.broken_promises(layer) else layer

    def _in_order(self, by_layer: Mapping[LayerName, set[str]]) -> ByLayer:
        """Return the models in the rules' order of layers; the native layer is last, as on a cluster."""
        named = [rule.layer for rule in self.rules.rules]
        order = sorted(by_layer, key=lambda layer: (layer is LayerName.NATIVE, layer in named and named.index(layer)))
        return tuple((layer, frozenset(by_layer[layer])) for layer in order)


@dataclass(frozen=True)
class _Suiting:
    """The suitable GPUs for a template."""

    template: Template
    kinds: tuple[GpuKind, ...]
    by_layer: ByLayer
    """Models of these GPUs, by the layer of a session there."""

    @cached_property
    def models(self) -> frozenset[str]:
        return frozenset(kind.model for kind in self.kinds)

    @cached_property
    def request(self) -> PlacementRequest:
        """The placement request. Raises ValueError for a template without a GPU."""
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
            conditions=Conditions.of(self.template),
        )


class ExpectedWorkload:
    """Counter of each template's spawns, from which a strategy gets the expected workload.

    ``templates`` returns the templates that can be spawned now. The counts are kept in this hub process only: after a
    restart all templates have equal weight again.
    """

    def __init__(self, templates: Callable[[], Iterable[Template]]) -> None:
        self._templates = templates
        self._spawns = RecentSpawns()

    def offered(self) -> list[Template]:
        """Return the current templates that request a GPU."""
        return [template for template in self._templates() if template.gpu is not None]

    def spawned(self, template: str, now: float) -> None:
        """Count a placed spawn; ``now``: seconds on a monotonic clock."""
        self._spawns.spawned(template, now)

    def strategy(self, strategy: Strategy, snapshot: GpuSnapshot, now: float) -> Strategy:
        """Return the strategy for the current workload; a strategy that ignores the workload is returned unchanged."""
        for_workload: Callable[[Workload], Strategy] | None = getattr(strategy, "for_workload", None)
        if for_workload is None:
            return strategy
        demands = {
            template.name: snapshot.request(template).demand for template in self.offered() if snapshot.native(template)
        }
        return for_workload(self._spawns.workload(demands, now))
