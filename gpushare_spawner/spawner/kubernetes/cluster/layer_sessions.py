"""The hub's sessions on GPUs of other sharing layers, by their pods: where they are, what they have, when they stop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gpushare_spawner.model.kubernetes import AnnotationProblem, is_layer_session, layer_session
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.sharing.cluster_facts import ClusterPod
from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION


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
