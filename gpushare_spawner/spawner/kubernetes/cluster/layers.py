"""What other sharing layers have free in the cluster, by what they publish, for the queue and for the form.

The rules of each layer are in `sharing`, and which nodes it shares is in `layers.yaml`.

Reads what other sharing layers publish in the cluster, while `layers.yaml` or a template names one.

The hub's sessions on GPUs of other sharing layers, by their pods: where they are, what they have, when they stop.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gpushare_spawner.clients.object_watch import Object, Watched
from gpushare_spawner.model.kubernetes import AnnotationProblem, is_layer_session, layer_session
from gpushare_spawner.model.layer_rules import LayerRule, LayersFile, matches
from gpushare_spawner.model.layers import LAYERS, LayerName, PlacedBy
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template, TemplateGpu
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
)
from gpushare_spawner.sharing.nodes import suitable
from gpushare_spawner.sharing.pod_layers import POD_LAYERS
from gpushare_spawner.spawner.kubernetes.cluster.capacity import RESERVATION, ClusterCapacity
from gpushare_spawner.spawner.queue.snapshot import (
    NOTHING_KEPT,
    AskedServer,
    GpuKind,
    Kept,
    LayerOffer,
    LayerOutcome,
    LayerVerdict,
)
from gpushare_spawner.wording import spawn_form as words
from gpushare_spawner.wording.spawn_failures import EARLIER_FIRST

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pending:
    """A server that has been promised a part of a layer's GPUs, and that its scheduler has not placed yet."""

    layer: LayerName
    units: int
    """On all its GPUs together."""
    kept_off: frozenset[str] = frozenset()
    """Nodes on which it cannot be placed."""


@dataclass(frozen=True)
class LayerSessions:
    """What pods say of the sessions. Make one with `of`."""

    placed: set[str] = field(default_factory=set)
    """The reservations whose pods are on a node."""
    units: dict[str, int] = field(default_factory=dict)
    """What those have, by node."""
    waiting: dict[str, Pending] = field(default_factory=dict)
    """The reservations whose pods wait for their scheduler."""
    stops: list[tuple[float, tuple[str, str]]] = field(default_factory=list)
    """When sessions stop that have a notice of it (seconds since the epoch), each with its pod's namespace and name."""

    @classmethod
    def of(cls, pods: Iterable[ClusterPod], ours: Callable[[str], bool]) -> LayerSessions:
        """Read pods that have not finished. ``ours``: whether a pod with such a reservation is one of the hub's."""
        found = cls()
        for pod in pods:
            token = pod.annotations.get(RESERVATION, "")
            if is_layer_session(pod.labels) and ours(token):
                if pod.node:
                    found.placed.add(token)
                with contextlib.suppress(AnnotationProblem):
                    found._count(pod, token)
        return found

    def _count(self, pod: ClusterPod, token: str) -> None:
        said = layer_session(pod.labels, pod.annotations)
        units, notice = said.share.total_units, said.session.notice
        if not pod.node:
            self.waiting[token] = Pending(said.layer, units)
            return
        self.units[pod.node] = self.units.get(pod.node, 0) + units
        if notice is not None and notice.tier is Tier.STOPPED:
            self.stops.append((notice.at, (pod.namespace, pod.name)))


NO_FILE = LayersFile()
MOST_STOPS = 32
"""Announced stops that an estimate of a wait looks at, the next ones. Ours: each can cost a look at all pods, and a
session has a notice for minutes only."""
_TOLD: set[LayerName] = set()
"""Layers of which the log has an error: each snapshot would say it again."""


def layers_in_force(file: LayersFile | None, templates: Iterable[Template]) -> frozenset[LayerName]:
    """Return the other layers that `layers.yaml` or a template names."""
    named = [rule.layer for rule in (file or NO_FILE).rules]
    named += [template.gpu.layer for template in templates if template.gpu is not None and template.gpu.layer]
    return frozenset(name for name in named if LAYERS[name].places is PlacedBy.SCHEDULER)


@dataclass(frozen=True)
class ClusterLayers:
    """The other layers at one instant; see `queue.other_layers.OtherLayers`.

    ``facts``: None while they are not known. ``unreadable``: layers whose facts the hub cannot read; their schedulers
    decide then. ``pending`` returns this hub's reservations, by the annotation that their pods have; ``ours`` whether a
    pod with such an annotation is in one of the hub's namespaces: in others anybody can write it into a pod.
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
    """The layers once all announced stops have happened that are due by a time."""

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
        # a template that promises what a layer cannot keep is not offered on its nodes
        return tuple(
            name
            for name in dict.fromkeys((*likely, *self._layers_on_nodes(template.gpu)))
            if not template.broken_promises(name)
        )

    def _layers_on_nodes(self, gpu: TemplateGpu) -> Iterator[LayerName]:
        """Yield the layers of nodes with suitable GPUs: patterns of rules do not tell each model that they are for."""
        for layer, model in self._models:
            if any(matches(model, pattern) for pattern in gpu.models):
                yield layer

    @cached_property
    def _by_rule(self) -> Mapping[int, Sequence[ClusterNode]]:
        """The nodes by the rule that applies to them, by its identity: rules hold dicts, which have no hash."""
        found: dict[int, list[ClusterNode]] = {}
        for node in self.facts.nodes if self.facts is not None else ():
            found.setdefault(id(self.file.rule_of(node.labels, node.model)), []).append(node)
        return found

    def _nodes_of(self, rule: LayerRule | None) -> Sequence[ClusterNode]:
        return self._by_rule.get(id(rule), ())

    def _facts_on(self, rule: LayerRule | None, asked: AskedServer) -> ClusterFacts:
        """Return the facts with the nodes of a rule on which a server can run; the same object for the same ones."""
        key = (id(rule), asked.node, asked.ineligible)
        found = self._on_nodes.get(key)
        if found is None:
            nodes = (one for one in self._nodes_of(rule) if asked.can_be_on(one.name))
            found = self._on_nodes[key] = replace(self.facts or ClusterFacts(), nodes=tuple(nodes))
        return found

    @cached_property
    def _models(self) -> Collection[tuple[LayerName, str]]:
        """Each GPU model on nodes with a rule, with its layer."""
        return dict.fromkeys(
            (rule.layer, node.model) for rule in self.file.rules for node in self._nodes_of(rule)
        ).keys()

    @cached_property
    def gpus(self) -> int:
        """The physical GPUs on nodes of other layers, by the nodes' labels."""
        others = (rule for rule in self.file.rules if LAYERS[rule.layer].places is PlacedBy.SCHEDULER)
        return sum(node.gpu_count or 0 for rule in others for node in self._nodes_of(rule))

    def verdict(self, asked: AskedServer, kept: Kept = NOTHING_KEPT) -> LayerVerdict:
        """Return what a server meets: the first layer and rule whose nodes have a place for it now."""
        best: LayerVerdict | None = None
        able: frozenset[str] = frozenset()
        layers = self.names(asked.template)
        for layer in layers:
            for found in self._verdicts(layer, asked, kept):
                if best is None or (best.outcome is LayerOutcome.NEVER and found.outcome is not LayerOutcome.NEVER):
                    best = found
                if found.outcome is LayerOutcome.NOW:
                    return found
                able |= found.able
        return replace(best or LayerVerdict(LayerOutcome.NEVER, why=words.no_node(layers)), able=able)

    def starts_by(self, asked: AskedServer, servers: int) -> float | None:
        """Return when so many servers could have been placed if all announced stops happen."""
        times = sorted({at for at, _ in self._own_pods.stops})[:MOST_STOPS]
        if not times or self._after(times[-1]).places(asked) < servers:
            return None
        # what stops later adds to what has stopped before
        return times[bisect.bisect_left(times, servers, key=lambda at: self._after(at).places(asked))]

    def _after(self, at: float) -> ClusterLayers:
        """Return the layers once everything has stopped that is due by a time."""
        then = self._later.get(at)
        if then is None:
            gone = {pod for due, pod in self._own_pods.stops if due <= at}
            facts = self.facts.without(gone) if self.facts is not None else None
            then = self._later[at] = ClusterLayers(self.file, facts, self.unreadable, self.pending, self.ours)
        return then

    def places(self, asked: AskedServer) -> int:
        """Return how many such servers can be placed now, by all their layers and rules that are known."""
        found = 0
        for layer in self.names(asked.template) if self.facts is not None else ():
            for offer in self._offers(layer, asked) if layer not in self.unreadable else ():
                capacity = self._capacity(offer)
                if isinstance(capacity, LayerCapacity):
                    found += max(0, capacity.servers - self._taken(layer, offer.request.gpu.share.total_units))
        return found

    def least_used(self, nodes: Set[str]) -> str:
        """Return the node on which the hub's sessions have the smallest part of the GPUs."""
        gpus = {node.name: node.gpu_count or 1 for node in self.facts.nodes} if self.facts is not None else {}
        return min(nodes, key=lambda name: (self._own_pods.units.get(name, 0) / gpus.get(name, 1), name))

    def _offers(self, layer: LayerName, asked: AskedServer) -> Iterator[LayerOffer]:
        """Yield what a layer is asked for, on the nodes of each of its rules."""
        for rule in self._rules(layer, asked.template):
            facts, options = self._facts_on(rule, asked), self.file.options_of(layer, rule)
            yield LayerOffer(layer, LayerRequest(asked.tenant, asked.template, options, facts, rule))

    def _verdicts(self, layer: LayerName, asked: AskedServer, kept: Kept) -> Iterator[LayerVerdict]:
        if self.facts is None and layer not in self.unreadable:
            yield LayerVerdict(LayerOutcome.WAIT, why=words.NOT_READ_YET)
            return
        for offer in self._offers(layer, asked):
            if layer in self.unreadable:
                # a layer that needs no node to say what it asks for leaves the rest to its scheduler
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
                yield replace(self._free_for(offer, kept), gpus=self._gpus_of(offer.request), profile=profile)

    def _gpus_of(self, request: LayerRequest) -> tuple[GpuKind, ...]:
        key = (id(request.facts), request.gpu.models)
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = _kinds(suitable(request))
        return found

    def _rules(self, layer: LayerName, template: Template) -> list[LayerRule | None]:
        rules: list[LayerRule | None] = [rule for rule in self.file.rules if rule.layer is layer]
        # a template that names its layer needs no rule: the nodes that no rule is for will do
        named = template.gpu is not None and template.gpu.layer is layer
        return [*rules, None] if named else rules

    def _free_for(self, offer: LayerOffer, kept: Kept) -> LayerVerdict:
        request, title = offer.request, LAYERS[offer.layer].title
        capacity = self._capacity(offer)
        if isinstance(capacity, str):
            return LayerVerdict(LayerOutcome.NEVER, offer, capacity)
        share, on_nodes = request.gpu.share, sum(capacity.by_node.values())
        kept_off = kept.for_others & capacity.able
        left = on_nodes - sum(capacity.by_node.get(name, 0) for name in kept_off)
        taken = self._taken(offer.layer, share.total_units)
        # those that cannot be placed on the node that is kept for this one take nothing of it
        own = min(capacity.servers, capacity.by_node.get(kept.own, 0))
        if min(capacity.servers, left) > taken or own > self._taken(offer.layer, share.total_units, kept.own):
            return LayerVerdict(LayerOutcome.NOW, replace(offer, kept_off=kept_off), able=capacity.able - kept_off)
        if capacity.servers > taken:
            return LayerVerdict(LayerOutcome.WAIT, offer, EARLIER_FIRST, able=capacity.able)
        if capacity.at_most > 0:
            able = capacity.able if on_nodes <= taken else frozenset()
            return LayerVerdict(LayerOutcome.WAIT, offer, words.none_free(title, share, capacity.limited_by), able=able)
        return LayerVerdict(LayerOutcome.NEVER, offer, words.never_free(title, share, capacity.limited_by))

    def _capacity(self, offer: LayerOffer) -> LayerCapacity | str:
        """Return what the layer has; a sentence where it has no way to serve the template."""
        request = offer.request
        # facts and template are kept, so that no others have their identity; an edited template has the same name
        key = (offer.layer, id(request.facts), id(request.template), request.tenant.quota)
        known = self._free.get(key)
        if known is None:
            known = self._free[key] = request.template, _free(offer)
        return known[1]

    def _taken(self, layer: LayerName, units: int, node: str = "") -> int:
        """Return for how many servers of so many units those count that the layer's scheduler has not placed yet.

        ``node``: of those that can be placed there; empty: of all.

        Which node and GPU each of them takes is not known: a smaller one counts as one of these, a larger one as
        several. That errs towards a wait, which ends when the scheduler has placed them.
        """
        pods = self._own_pods
        reserved = {token: one for token, one in self.pending().items() if token not in pods.placed}
        counted = ({**pods.waiting, **reserved}).values()
        return sum(-(-one.units // units) for one in counted if one.layer is layer and node not in one.kept_off)

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
        # others write what is read here, and spawns on GPUs of other layers must go on
        if offer.layer not in _TOLD:
            _TOLD.add(offer.layer)
            log.exception("what %s publishes cannot be read", title)
        return words.not_understood(title)


def _kinds(nodes: Iterable[ClusterNode]) -> tuple[GpuKind, ...]:
    """Return the GPUs of nodes, as far as their labels say what they are."""
    counted: dict[tuple[str, int], int] = {}
    for node in nodes:
        if node.model and node.gpu_memory_bytes is not None:
            kind = (node.model, node.gpu_memory_bytes)
            counted[kind] = counted.get(kind, 0) + (node.gpu_count or 0)
    return tuple(GpuKind(model, memory, count) for (model, memory), count in counted.items())


UNREADABLE_AFTER = 10.0
"""Seconds after which objects that could not be read count as unreadable: the first list takes about one. Ours."""

_KINDS: Mapping[LayerName, Mapping[str, tuple[str, str, Callable[[Any], Any]]]] = {
    LayerName.KAI: {"queues": ("scheduling.run.ai", "v2", ClusterQueue.of)},
    LayerName.DRA: {
        "resourceslices": ("resource.k8s.io", "v1", ClusterSlice.of),
        "resourceclaims": ("resource.k8s.io", "v1", ClusterClaim.of),
    },
}
"""What is read of each layer beside nodes and pods: API group, version and the reader, by resource."""
_FIELDS = {"queues": "queues", "resourceslices": "slices", "resourceclaims": "claims"}
"""Where it stands in the facts."""


class LayerReader:
    """One reader for a hub. ``objects`` is the client's API of custom objects.

    ``file`` and ``templates`` return those of now. ``pending`` returns this hub's reservations on other layers, by the
    annotation that their pods have, and ``ours`` whether a pod with one is the hub's; both can be set later. It needs
    `list` and `watch` on what it reads.
    """

    def __init__(
        self,
        capacity: ClusterCapacity,
        objects: Any,
        file: Callable[[], LayersFile | None],
        templates: Callable[[], Iterable[Template]],
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pending: Callable[[], Mapping[str, Pending]] = dict
        self.ours: Callable[[str], bool] = bool
        self._capacity = capacity
        self._objects = objects
        self._file = file
        self._templates = templates
        self._log = log
        self._clock = clock
        self._watched: dict[str, Watched] = {}
        self._since: dict[str, float] = {}

    def snapshot(self) -> ClusterLayers | None:
        """Return the other layers as they are known now; None where none is in force."""
        file = self._file()
        layers = layers_in_force(file, self._templates())
        if not layers:
            return None
        self._capacity.keep_facts()
        self._watch(layers)
        facts, unreadable = self._capacity.facts(), self._unreadable(layers)
        if facts is not None:
            facts = replace(facts, **self._read())  # type: ignore[arg-type]
        return ClusterLayers(file or NO_FILE, facts, unreadable, self.pending, self.ours)

    def _watch(self, layers: Iterable[LayerName]) -> None:
        for layer in layers:
            for plural, (group, version, read) in _KINDS.get(layer, {}).items():
                if plural in self._watched:
                    continue
                listed = functools.partial(self._objects.list_cluster_custom_object, group, version, plural)
                keep = functools.partial(_kept, read)
                watched = Watched(plural, listed, "the cluster", "", keep=keep, log=self._log)
                self._watched[plural], self._since[plural] = watched, self._clock()
                watched.start()

    def _unreadable(self, layers: frozenset[LayerName]) -> frozenset[LayerName]:
        if self._capacity.refused:
            return layers
        now = self._clock()
        late = {
            plural
            for plural, watched in self._watched.items()
            if not watched.known and now - self._since[plural] > UNREADABLE_AFTER
        }
        return frozenset(layer for layer in layers if late & _KINDS.get(layer, {}).keys())

    def _read(self) -> dict[str, tuple[Any, ...]]:
        return {
            _FIELDS[plural]: tuple(item["read"] for item in watched.objects.values())
            for plural, watched in self._watched.items()
        }


def _kept(read: Callable[[Any], Any], item: Object) -> Object:
    identity = {name: item["metadata"].get(name, "") for name in ("namespace", "name", "resourceVersion")}
    return {"metadata": identity, "read": read(item)}
