"""Reads what other sharing layers publish in the cluster, while `layers.yaml` or a template names one."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from gpushare_spawner.clients.object_watch import Object, Watched
from gpushare_spawner.model.layers import LayerName, LayersFile
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.cluster_facts import ClusterClaim, ClusterQueue, ClusterSlice
from gpushare_spawner.spawner.kubernetes.cluster.capacity import ClusterCapacity
from gpushare_spawner.spawner.kubernetes.cluster.layer_sessions import Pending
from gpushare_spawner.spawner.kubernetes.cluster.layers import NO_FILE, ClusterLayers, layers_in_force

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
