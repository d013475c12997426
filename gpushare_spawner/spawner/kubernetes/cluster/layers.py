"""Free capacity of other sharing layers in the cluster, from the objects that they publish, for the queue and the form.

`LayerReader` watches these objects while `layers.yaml` or a template names a layer. `ClusterLayers` is the state at one
instant. `LayerSessions` contains the hub's sessions on such GPUs, read from their pods: nodes, units, and notices of a
stop. The rules of each layer are in `sharing`; `layers.yaml` assigns nodes to layers.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import operator
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gpushare_spawner.clients.api import ClusterApi
from gpushare_spawner.clients.object_watch import Watched
from gpushare_spawner.model.kubernetes.annotations import AnnotationProblem, is_layer_session, pod_session
from gpushare_spawner.model.layers import LAYERS, LayerName, PlacedBy
from gpushare_spawner.model.layers_file import LayerRule, LayersFile, matches
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template, TemplateGpu
from gpushare_spawner.sharing import dra, hami, kai, kubeshare, mig, replicas
from gpushare_spawner.sharing.base import (
    ClusterClaim,
    ClusterFacts,
    ClusterNode,
    ClusterPod,
    ClusterQueue,
    ClusterSlice,
    LayerCannot,
    LayerCapacity,
    LayerRequest,
    PodChange,
    PodSpec,
    ResourceChoice,
)
from gpushare_spawner.spawner.kubernetes.cluster.node_resources import ClusterResources
from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION
from gpushare_spawner.spawner.queue.snapshot import (
    NO_HOLDS,
    GpuKind,
    LayerHolds,
    LayerOffer,
    LayerOutcome,
    LayerVerdict,
    SpawnRequest,
)
from gpushare_spawner.templates.folder import Policy
from gpushare_spawner.wording import spawn_form as words
from gpushare_spawner.wording.spawn_failures import EARLIER_FIRST

log = logging.getLogger(__name__)

Manifest = dict[str, Any]


@dataclass(frozen=True)
class PodLayer:
    """The functions of one layer. They are pure and do not change their arguments."""

    render: Callable[[PodSpec, LayerRequest], PodSpec]
    """Function that returns the pod with the share. Raises `LayerCannot`."""
    free: Callable[[LayerRequest], LayerCapacity]
    """Function that returns the free capacity for servers of the request's template. Raises `LayerCannot`."""
    objects: Callable[[LayerRequest], tuple[Manifest, ...]] = lambda request: ()
    """Function that returns the objects that must exist in the server's namespace before the pod. Equal requests give
    equal objects with equal names. Raises `LayerCannot`.
    """
    same: Callable[[Manifest, Manifest], bool] = operator.eq
    """Function that returns whether an existing object of that name, as the API server shows it, equals one of
    `objects`: users can create objects in their own namespace."""


def _by_resource(choose: Callable[[LayerRequest], ResourceChoice]) -> PodLayer:
    """Return the functions of a layer with an extended resource. Both raise LayerCannot like ``choose``."""

    def render(pod: PodSpec, request: LayerRequest) -> PodSpec:
        choice = choose(request)
        labels = {**request.node_labels(), **choice.labels}
        return PodChange(limits={choice.resource: str(choice.amount)}, node_labels=labels).apply(pod)

    return PodLayer(render, lambda request: request.resource_capacity(choose(request)))


POD_LAYERS: Mapping[LayerName, PodLayer] = {
    LayerName.TIME_SLICING: _by_resource(
        lambda request: replicas.choose_replica(request, LayerName.TIME_SLICING, memory_divided=False)
    ),
    LayerName.MPS: _by_resource(lambda request: replicas.choose_replica(request, LayerName.MPS, memory_divided=True)),
    LayerName.MIG: _by_resource(mig.choose),
    LayerName.HAMI: PodLayer(hami.render, hami.free),
    LayerName.KAI: PodLayer(kai.render, kai.free),
    LayerName.DRA: PodLayer(dra.render, dra.free, dra.objects, dra.same),
    LayerName.METAGPU: _by_resource(replicas.choose_parts),
    LayerName.NVSHARE: _by_resource(replicas.choose_place),
    LayerName.KUBESHARE: PodLayer(kubeshare.render, kubeshare.free),
}
"""All layers except the native layer, which the hub places by its ledger."""


@dataclass(frozen=True)
class Pending:
    """A server with a reserved part of a layer's GPUs that the layer's scheduler has not placed yet."""

    layer: LayerName
    units: int
    """Units on all its GPUs in total."""
    excluded_nodes: frozenset[str] = frozenset()
    """Nodes on which it cannot be placed."""


@dataclass(frozen=True)
class LayerSessions:
    """The sessions of pods. Created by `of`."""

    placed: set[str] = field(default_factory=set)
    """The reservations with a pod on a node."""
    units: dict[str, int] = field(default_factory=dict)
    """Units of these reservations, by node."""
    waiting: dict[str, Pending] = field(default_factory=dict)
    """The reservations with a pod that waits for its scheduler."""
    stops: list[tuple[float, tuple[str, str]]] = field(default_factory=list)
    """Stop times of sessions with a notice (seconds since the epoch), each with its pod's namespace and name."""

    @classmethod
    def of(cls, pods: Iterable[ClusterPod], ours: Callable[[str], bool]) -> LayerSessions:
        """Read pods that have not finished. ``ours``: whether a pod with such a reservation is one of the hub's."""
        sessions = cls()
        for pod in pods:
            token = pod.annotations.get(RESERVATION, "")
            if is_layer_session(pod.labels) and ours(token):
                if pod.node:
                    sessions.placed.add(token)
                with contextlib.suppress(AnnotationProblem):
                    sessions._count(pod, token)
        return sessions

    def _count(self, pod: ClusterPod, token: str) -> None:
        session = pod_session(pod.annotations, pod.labels)
        units, notice = session.share.total_units, session.notice
        if not pod.node:
            self.waiting[token] = Pending(session.layer, units)
            return
        self.units[pod.node] = self.units.get(pod.node, 0) + units
        if notice is not None and notice.tier is Tier.STOPPED:
            self.stops.append((notice.at, (pod.namespace, pod.name)))


NO_FILE = LayersFile()
MOST_STOPS = 32
"""Maximum number of upcoming notified stops that an estimate of a wait considers. Our value: each stop can cost a pass
over all pods, and a session has a notice for only a few minutes.
"""
_LOGGED: set[LayerName] = set()
"""Layers with an error that has been logged, because each snapshot would log it again."""


def layers_in_force(file: LayersFile | None, templates: Iterable[Template]) -> frozenset[LayerName]:
    """Return the other layers that `layers.yaml` or a template names."""
    named = [rule.layer for rule in (file or NO_FILE).rules]
    named += [template.gpu.layer for template in templates if template.gpu is not None and template.gpu.layer]
    return frozenset(name for name in named if LAYERS[name].places is PlacedBy.SCHEDULER)


@dataclass(frozen=True)
class ClusterLayers:
    """The other layers at one instant; see `queue.snapshot.OtherLayers`.

    ``facts``: None before they are read. ``unreadable``: layers with facts that the hub cannot read; their schedulers
    decide. ``pending`` returns this hub's reservations, by the annotation of their pods. ``ours`` returns whether a pod
    with such an annotation is in one of the hub's namespaces; in other namespaces any user can write the annotation.
    """

    file: LayersFile
    facts: ClusterFacts | None
    unreadable: frozenset[LayerName] = frozenset()
    pending: Callable[[], Mapping[str, Pending]] = dict
    ours: Callable[[str], bool] = bool
    _free: dict[tuple[object, ...], tuple[Template, LayerCapacity | str]] = field(default_factory=dict, repr=False)
    _kinds: dict[tuple[object, ...], tuple[GpuKind, ...]] = field(default_factory=dict, repr=False)
    _on_nodes: dict[tuple[object, ...], ClusterFacts] = field(default_factory=dict, repr=False)
    _later: dict[float, ClusterLayers] = field(default_factory=dict, repr=False)
    """The layers after all notified stops that are due by a given time."""

    def names(self, template: Template) -> tuple[LayerName, ...]:
        """Return the other layers that can serve a template."""
        return tuple(name for name in self._layers(template) if LAYERS[name].places is PlacedBy.SCHEDULER)

    def native(self, template: Template) -> bool:
        """Return whether GPUs with an agent can serve a template."""
        return LayerName.NATIVE in self._layers(template)

    def _layers(self, template: Template) -> tuple[LayerName, ...]:
        if template.gpu is None:
            return ()
        if template.gpu.layer is not None:
            return (template.gpu.layer,)
        likely = self.file.layers_for(template.gpu.models)
        # a layer that cannot fulfil a template's promises is skipped
        return tuple(
            name
            for name in dict.fromkeys((*likely, *self._layers_on_nodes(template.gpu)))
            if not template.broken_promises(name)
        )

    def _layers_on_nodes(self, gpu: TemplateGpu) -> Iterator[LayerName]:
        """Yield the layers of nodes with suitable GPUs; the patterns of rules do not list all models."""
        for layer, model in self._models:
            if any(matches(model, pattern) for pattern in gpu.models):
                yield layer

    @cached_property
    def _by_rule(self) -> Mapping[int, Sequence[ClusterNode]]:
        """The nodes by the id() of the rule that applies to them; rules contain dicts, which are not hashable."""
        by_rule: dict[int, list[ClusterNode]] = {}
        for node in self.facts.nodes if self.facts is not None else ():
            by_rule.setdefault(id(self.file.rule_of(node.labels, node.model)), []).append(node)
        return by_rule

    def _nodes_of(self, rule: LayerRule | None) -> Sequence[ClusterNode]:
        return self._by_rule.get(id(rule), ())

    def _facts_on(self, rule: LayerRule | None, server: SpawnRequest) -> ClusterFacts:
        """Return the facts on a rule's nodes that can run a server; the same object for the same arguments."""
        ineligible = server.ineligible()
        key = (id(rule), server.node, ineligible)
        facts = self._on_nodes.get(key)
        if facts is None:
            nodes = tuple(
                node for node in self._nodes_of(rule) if server.node in ("", node.name) and node.name not in ineligible
            )
            facts = self._on_nodes[key] = replace(self.facts or ClusterFacts(), nodes=nodes)
        return facts

    @cached_property
    def _models(self) -> Collection[tuple[LayerName, str]]:
        """Each GPU model on nodes with a rule, with its layer."""
        return dict.fromkeys(
            (rule.layer, node.model) for rule in self.file.rules for node in self._nodes_of(rule)
        ).keys()

    @cached_property
    def gpus(self) -> int:
        """The number of physical GPUs on nodes of other layers, from the nodes' labels."""
        others = (rule for rule in self.file.rules if LAYERS[rule.layer].places is PlacedBy.SCHEDULER)
        return sum(node.gpu_count or 0 for rule in others for node in self._nodes_of(rule))

    def verdict(self, server: SpawnRequest, holds: LayerHolds = NO_HOLDS) -> LayerVerdict:
        """Return the outcome for a server, from the first layer and rule with a place for it now."""
        best: LayerVerdict | None = None
        able: frozenset[str] = frozenset()
        layers = self.names(server.template)
        for layer in layers:
            for verdict in self._verdicts(layer, server, holds):
                if best is None or (best.outcome is LayerOutcome.NEVER and verdict.outcome is not LayerOutcome.NEVER):
                    best = verdict
                if verdict.outcome is LayerOutcome.NOW:
                    return verdict
                able |= verdict.able
        return replace(best or LayerVerdict(LayerOutcome.NEVER, why=words.no_node(layers)), able=able)

    def starts_by(self, server: SpawnRequest, servers: int) -> float | None:
        """Return when ``servers`` servers like this could be placed if all notified stops happen."""
        times = sorted({at for at, _ in self._own_pods.stops})[:MOST_STOPS]
        if not times or self._after(times[-1]).places(server) < servers:
            return None
        # each stop adds to the earlier stops
        return times[bisect.bisect_left(times, servers, key=lambda at: self._after(at).places(server))]

    def _after(self, at: float) -> ClusterLayers:
        """Return the layers after all notified stops that are due by ``at``."""
        then = self._later.get(at)
        if then is None:
            gone = {pod for due, pod in self._own_pods.stops if due <= at}
            facts = self.facts.without(gone) if self.facts is not None else None
            then = self._later[at] = ClusterLayers(self.file, facts, self.unreadable, self.pending, self.ours)
        return then

    def places(self, server: SpawnRequest) -> int:
        """Return how many such servers can be placed now, over all their readable layers and rules."""
        count = 0
        for layer in self.names(server.template) if self.facts is not None else ():
            for offer in self._offers(layer, server) if layer not in self.unreadable else ():
                capacity = self._capacity(offer)
                if isinstance(capacity, LayerCapacity):
                    count += max(0, capacity.servers - self._taken(layer, offer.request.gpu.share.total_units))
        return count

    def least_used(self, nodes: Set[str]) -> str:
        """Return the node on which the hub's sessions use the smallest part of the GPUs."""
        gpus = {node.name: node.gpu_count or 1 for node in self.facts.nodes} if self.facts is not None else {}
        return min(nodes, key=lambda name: (self._own_pods.units.get(name, 0) / gpus.get(name, 1), name))

    def _offers(self, layer: LayerName, server: SpawnRequest) -> Iterator[LayerOffer]:
        """Yield the requests to a layer, one for the nodes of each of its rules."""
        for rule in self._rules(layer, server.template):
            facts, options = self._facts_on(rule, server), self.file.options_of(layer, rule)
            yield LayerOffer(layer, LayerRequest(server.tenant, server.template, options, facts, rule))

    def _verdicts(self, layer: LayerName, server: SpawnRequest, holds: LayerHolds) -> Iterator[LayerVerdict]:
        if self.facts is None and layer not in self.unreadable:
            yield LayerVerdict(LayerOutcome.WAIT, why=words.NOT_READ_YET)
            return
        for offer in self._offers(layer, server):
            if layer in self.unreadable:
                # a layer that needs no nodes for its request leaves the placement to its scheduler
                needs_nodes = isinstance(self._capacity(offer), str)
                yield (
                    LayerVerdict(LayerOutcome.NEVER, offer, words.unreadable(LAYERS[layer].title))
                    if needs_nodes
                    else LayerVerdict(LayerOutcome.NOW, offer, certain=False)
                )
                continue
            if offer.request.facts.nodes:
                capacity = self._capacity(offer)
                profile = capacity.profile if isinstance(capacity, LayerCapacity) else None
                yield replace(self._free_for(offer, holds), gpus=self._gpus_of(offer.request), profile=profile)

    def _gpus_of(self, request: LayerRequest) -> tuple[GpuKind, ...]:
        key = (id(request.facts), request.gpu.models)
        kinds = self._kinds.get(key)
        if kinds is None:
            kinds = self._kinds[key] = _kinds(request.suitable_nodes())
        return kinds

    def _rules(self, layer: LayerName, template: Template) -> list[LayerRule | None]:
        rules: list[LayerRule | None] = [rule for rule in self.file.rules if rule.layer is layer]
        # A template that names its layer needs no rule, so nodes without a rule suit it.
        named = template.gpu is not None and template.gpu.layer is layer
        return [*rules, None] if named else rules

    def _free_for(self, offer: LayerOffer, holds: LayerHolds) -> LayerVerdict:
        request, title = offer.request, LAYERS[offer.layer].title
        capacity = self._capacity(offer)
        if isinstance(capacity, str):
            return LayerVerdict(LayerOutcome.NEVER, offer, capacity)
        share, on_nodes = request.gpu.share, sum(capacity.by_node.values())
        excluded_nodes = holds.for_others & capacity.able
        left = on_nodes - sum(capacity.by_node.get(name, 0) for name in excluded_nodes)
        taken = self._taken(offer.layer, share.total_units)
        # servers that cannot be placed on this spawn's held node take none of the node's capacity
        own = min(capacity.servers, capacity.by_node.get(holds.own, 0))
        if min(capacity.servers, left) > taken or own > self._taken(offer.layer, share.total_units, holds.own):
            return LayerVerdict(
                LayerOutcome.NOW, replace(offer, excluded_nodes=excluded_nodes), able=capacity.able - excluded_nodes
            )
        if capacity.servers > taken:
            return LayerVerdict(LayerOutcome.WAIT, offer, EARLIER_FIRST, able=capacity.able)
        if capacity.at_most > 0:
            able = capacity.able if on_nodes <= taken else frozenset()
            return LayerVerdict(LayerOutcome.WAIT, offer, words.none_free(title, share, capacity.limited_by), able=able)
        return LayerVerdict(LayerOutcome.NEVER, offer, words.never_free(title, share, capacity.limited_by))

    def _capacity(self, offer: LayerOffer) -> LayerCapacity | str:
        """Return the layer's capacity, or the reason as a sentence if the layer cannot serve the template."""
        request = offer.request
        # the value references the facts and the template, so that their id() is not reused; an edited template keeps
        # its name
        key = (offer.layer, id(request.facts), id(request.template), request.tenant.quota)
        entry = self._free.get(key)
        if entry is None:
            entry = self._free[key] = request.template, _free(offer)
        return entry[1]

    def _taken(self, layer: LayerName, units: int, node: str = "") -> int:
        """Return the number of servers not placed yet by the layer's scheduler, counted in servers of ``units`` units.

        ``node``: count only servers that can be placed there; empty: all.

        Their nodes and GPUs are unknown: a smaller server counts as one server of this size, a larger server as
        several. The estimate errs towards a wait, which ends when the scheduler has placed them.
        """
        pods = self._own_pods
        reserved = {token: reservation for token, reservation in self.pending().items() if token not in pods.placed}
        counted = ({**pods.waiting, **reserved}).values()
        return sum(
            -(-reservation.units // units)
            for reservation in counted
            if reservation.layer is layer and node not in reservation.excluded_nodes
        )

    @cached_property
    def _own_pods(self) -> LayerSessions:
        return LayerSessions.of(self.facts.pods if self.facts is not None else (), self.ours)


def _free(offer: LayerOffer) -> LayerCapacity | str:
    title = LAYERS[offer.layer].title
    try:
        return POD_LAYERS[offer.layer].free(offer.request)
    except LayerCannot as error:
        return str(error)
    except Exception:
        # other software writes these objects; an invalid object must not stop spawns on GPUs of other layers
        if offer.layer not in _LOGGED:
            _LOGGED.add(offer.layer)
            log.exception("Cannot read the objects that %s publishes", title)
        return words.not_understood(title)


def _kinds(nodes: Iterable[ClusterNode]) -> tuple[GpuKind, ...]:
    """Return the GPUs of nodes with complete labels."""
    counted: dict[tuple[str, int], int] = {}
    for node in nodes:
        if node.model and node.gpu_memory_bytes is not None:
            kind = (node.model, node.gpu_memory_bytes)
            counted[kind] = counted.get(kind, 0) + (node.gpu_count or 0)
    return tuple(GpuKind(model, memory, count) for (model, memory), count in counted.items())


UNREADABLE_AFTER = 10.0
"""Seconds after which objects that have not been listed count as unreadable. Our value: the first list takes about 1 s.
"""

_PUBLISHED: Mapping[LayerName, Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    LayerName.KAI: {"queues": ("/apis/scheduling.run.ai/v2/queues", ClusterQueue.of)},
    LayerName.DRA: {
        "slices": ("/apis/resource.k8s.io/v1/resourceslices", ClusterSlice.of),
        "claims": ("/apis/resource.k8s.io/v1/resourceclaims", ClusterClaim.of),
    },
}
"""The objects of each layer in addition to nodes and pods: path and reader, by their field in `ClusterFacts`."""


@dataclass
class LayerReader:
    """Reader of published objects; one for each hub. Needs `list` and `watch` on these objects."""

    capacity: ClusterResources
    api: ClusterApi
    policy: Callable[[], Policy]
    """Returns the files in force."""
    log: logging.Logger
    clock: Callable[[], float] = time.monotonic
    pending: Callable[[], Mapping[str, Pending]] = dict
    """Returns this hub's reservations on other layers, by the annotation of their pods. Set after construction, like
    `ours`.
    """
    ours: Callable[[str], bool] = bool
    """Returns whether a pod with such an annotation belongs to the hub."""
    _watched: dict[str, Watched[Any]] = field(default_factory=dict, init=False)
    """Watches by their field in `ClusterFacts`."""
    _since: dict[str, float] = field(default_factory=dict, init=False)

    def snapshot(self) -> ClusterLayers | None:
        """Return the current state of the other layers; None if there are none."""
        policy = self.policy()
        layers = layers_in_force(policy.layers, policy.templates)
        if not layers:
            return None
        self.capacity.keep_facts()
        self._watch(layers)
        facts, unreadable = self.capacity.facts(), self._unreadable(layers)
        if facts is not None:
            published = {name: tuple(watched.objects.values()) for name, watched in self._watched.items()}
            facts = replace(facts, **published)  # type: ignore[arg-type]
        return ClusterLayers(policy.layers or NO_FILE, facts, unreadable, self.pending, self.ours)

    def _watch(self, layers: Iterable[LayerName]) -> None:
        for layer in layers:
            for field_name, (path, read) in _PUBLISHED.get(layer, {}).items():
                if field_name not in self._watched:
                    what = f"the {path.rpartition('/')[2]} of the cluster"
                    watched = Watched(self.api, path, what, read, log=self.log)
                    self._watched[field_name], self._since[field_name] = watched, self.clock()
                    watched.start()

    def _unreadable(self, layers: frozenset[LayerName]) -> frozenset[LayerName]:
        if self.capacity.refused:
            return layers
        now = self.clock()
        late = {
            field_name
            for field_name, watched in self._watched.items()
            if not watched.current and now - self._since[field_name] > UNREADABLE_AFTER
        }
        return frozenset(layer for layer in layers if late & _PUBLISHED.get(layer, {}).keys())
