"""Free CPU, memory and pods of nodes, and the nodes that a pod's taints and labels exclude.

The free amount is a node's allocatable amount minus the requests of its pods, as the cluster's scheduler counts them
(`pods.pod_requests`). One `ClusterResources` serves a hub for all namespaces; it needs `list` and `watch` on nodes and
pods in the whole cluster. Without that permission, only the scheduler decides whether a pod fits.

GPUs come from the agents' reports: `snapshot.py` reads them and leaves out nodes with an old report.

`ChangedObjects` finds changes in a watched mapping. `pods` reads single pods.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

from gpushare_spawner.clients.api import ApiFailure, ClusterApi
from gpushare_spawner.clients.object_watch import BadObjects, Object, Watched
from gpushare_spawner.model.kubernetes.container_requests import memory_bytes, millicores, quantity
from gpushare_spawner.model.kubernetes.objects import FINISHED, NodeFacts, PodConstraints, gpu_index_of, is_mirror
from gpushare_spawner.placement.node import NOTHING, UNKNOWN, NodeResources, Requested
from gpushare_spawner.sharing.base import ClusterFacts, ClusterNode, ClusterPod
from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION, annotation, phase, pod_requests

AT_ONCE = 5000
"""Number of objects that are compared in one piece: less than 1 ms."""


class ChangedObject(NamedTuple):
    """One object before and after a change; None if it did not exist or was deleted."""

    key: str
    before: Any
    now: Any


class ChangedObjects:
    """Comparison of a mapping with its previous state, by the identity of its objects.

    A watch replaces changed objects.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}

    def mark_all_changed(self) -> None:
        """Treat all objects as changed at the next comparison."""
        self._seen = dict.fromkeys(self._seen)

    def pieces(self, objects: Callable[[], Mapping[str, Any]]) -> Iterator[list[ChangedObject]]:
        """Yield the changes in pieces. Between two pieces the mapping may change or be replaced.

        ``objects`` returns the mapping. Changes between two pieces are yielded now or by the next call.
        """
        names = list(objects())
        for start in range(0, len(names), AT_ONCE):
            current = objects()
            changed = []
            for name in names[start : start + AT_ONCE]:
                now = current.get(name)
                if now is not None and now is not self._seen.get(name):
                    changed.append(ChangedObject(name, self._seen.get(name), now))
                    self._seen[name] = now
            yield changed
        current = objects()
        if len(self._seen) != len(current):
            yield [ChangedObject(name, self._seen.pop(name), None) for name in list(self._seen) if name not in current]


ASK_AGAIN_SECONDS = 300.0
"""Seconds until the next attempt after the API server has refused to list nodes and pods. Our value: a new permission
takes effect soon.
"""
MOST_CONSTRAINTS = 100
"""Maximum number of pod constraints for which excluded nodes are stored. Our value: higher than a hub's number of
templates, because selectors can name the user.
"""
COUNTED_AT_ONCE = 500
"""Number of changed pods that are counted in one piece: about 1 ms."""


class ClusterResources:
    """Background reader of nodes and pods, which `begin` starts."""

    def __init__(self, api: ClusterApi, log: logging.Logger) -> None:
        self._api = api
        self._log = log
        self._reading: asyncio.Task[None] | None = None
        self._nodes: Watched[Object] | None = None
        self._pods: Watched[Object] | None = None
        self._closing: list[asyncio.Future[None]] = []
        """Strong references to tasks; the event loop keeps only weak ones."""
        self._free: dict[str, NodeResources] = {}
        self._allocatable: dict[str, NodeResources] = {}
        self._requested: dict[str, Requested] = {}
        self._by_others: dict[str, Requested] = {}
        self._bound: set[str] = set()
        self._nodes_seen = ChangedObjects()
        self._pods_seen = ChangedObjects()
        self._bad_objects = BadObjects(log)
        self._recounted: set[str] = set()
        self._facts: dict[str, NodeFacts] = {}
        self._keeps_facts = False
        self._cluster_facts: ClusterFacts | None = None
        self.refused = False
        """Whether the API server has refused to list nodes and pods."""
        self._ruled_out: dict[PodConstraints, frozenset[str]] = {}

    def begin(self) -> None:
        """Start reading. Does nothing if already started."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._begin())

    def keep_facts(self) -> None:
        """Store the data for `facts` from now on. This takes memory for each pod of the cluster."""
        if self._keeps_facts:
            return
        self._keeps_facts = True
        if self._nodes is not None and self._pods is not None:
            # the earlier lists lack these data
            self._closing = [asyncio.ensure_future(watched.close()) for watched in (self._nodes, self._pods)]
            self._watch()

    def facts(self) -> ClusterFacts | None:
        """Return nodes and pods for the rules of other sharing layers; None before they are read.

        Returns the same object until something changes. See `keep_facts`.
        """
        nodes, pods = self._nodes, self._pods
        if not self._keeps_facts or nodes is None or pods is None or not (nodes.current and pods.current):
            return None
        if self._cluster_facts is None:
            running = (pod["facts"] for pod in pods.objects.values())
            self._cluster_facts = ClusterFacts(
                nodes=tuple(node["cluster"] for node in nodes.objects.values()),
                pods=tuple(pod for pod in running if pod.phase not in FINISHED),
            )
        return self._cluster_facts

    def resources(self) -> Mapping[str, NodeResources]:
        """Return the free resources of each node, without reservations in flight; empty before they are read."""
        for _ in self.count():
            pass
        return self._free

    def bound(self) -> Set[str]:
        """Return the reservations with a pod that is counted on its node, as of the last `count`."""
        return self._bound

    def gpu_devices(self, node: str) -> Mapping[int, int] | None:
        """Return the number of devices of each GPU in a node's status, by the GPU's index; None if unknown."""
        nodes = self._nodes
        if nodes is None or not nodes.current or (item := nodes.objects.get(node)) is None:
            return None
        devices: Mapping[int, int] = item["gpus"]
        return devices

    def count(self) -> Iterator[None]:
        """Count the changes in pieces."""
        nodes, pods = self._nodes, self._pods
        if nodes is None or pods is None or not (nodes.current and pods.current):
            self._forget()
            return
        for changed in self._pods_seen.pieces(lambda: pods.objects):
            for start in range(0, len(changed), COUNTED_AT_ONCE):
                touched = set()
                for name, before, now in changed[start : start + COUNTED_AT_ONCE]:
                    for pod, sign in ((before, -1), (now, 1)):
                        with self._bad_objects.apart(f"Pod {name}"):
                            touched.add(self._move(pod, sign))
                self._recount(touched)
                yield
        for changed in self._nodes_seen.pieces(lambda: nodes.objects):
            for key, before, now in changed:
                with self._bad_objects.apart(f"Node {key}"):
                    self._take_node((now or before)["metadata"]["name"], now)
            yield

    def changes(self) -> Iterator[tuple[str, NodeResources]]:
        """Yield the free resources of each node that has changed since the last call; UNKNOWN for a removed node."""
        while self._recounted:
            node = self._recounted.pop()
            yield node, self._free.get(node, UNKNOWN)

    def mark_all_changed(self) -> None:
        """Return all nodes in the next `changes`."""
        self._recounted.update(self._free)

    def ineligible(self, constraints: PodConstraints) -> frozenset[str]:
        """Return the nodes with taints or labels that exclude such a pod, as of the last `count`; empty before it.

        Returns the same set for the same constraints until a node's taints or labels change.
        """
        if not self._free:
            return frozenset()
        nodes = self._ruled_out.get(constraints)
        if nodes is None:
            nodes = self._ruled_out[constraints] = constraints.rejected(self._facts.values())
            if len(self._ruled_out) > MOST_CONSTRAINTS:
                del self._ruled_out[next(iter(self._ruled_out))]
        return nodes

    async def _begin(self) -> None:
        while not await self._may_read():
            self.refused = True
            await asyncio.sleep(ASK_AGAIN_SECONDS)
        self.refused = False
        self._watch()

    def _watch(self) -> None:
        running = ",".join(f"status.phase!={ended}" for ended in FINISHED)
        trim_pod = functools.partial(trimmed_pod, with_facts=self._keeps_facts)
        trim_node = functools.partial(trimmed_node, with_facts=self._keeps_facts)
        changed, log, fields = self._on_change, self._log, {"fieldSelector": running}
        self._nodes = Watched(self._api, "/api/v1/nodes", "the nodes of the cluster", trim_node, None, changed, log)
        self._pods = Watched(self._api, "/api/v1/pods", "the pods of the cluster", trim_pod, fields, changed, log)
        self._nodes.start()
        self._pods.start()

    async def _may_read(self) -> bool:
        try:
            for path in ("/api/v1/nodes", "/api/v1/pods"):
                await self._api.list(path, limit="1")
        except ApiFailure as failure:
            self._log.info(
                "Free CPU and memory of nodes are not known (%s): the hub chooses a node by its GPUs, and tries "
                "another node if the scheduler refuses the pod. To let the hub read them, give its service account "
                "a ClusterRole with list and watch on nodes and pods.",
                failure,
            )
            return False
        return True

    def _on_change(self) -> None:
        """Drop the data that depend on all objects; `count` detects the changes itself."""
        self._cluster_facts = None

    def _take_node(self, name: str, now: Object | None) -> None:
        """Count a node; ``now`` is None if the node was deleted."""
        self._allocatable.pop(name, None)
        facts = self._facts.pop(name, None)
        if now is not None:
            self._allocatable[name] = now["allocatable"]
            self._facts[name] = now["facts"]
        if facts != self._facts.get(name):
            self._judge(name)
        self._recount([name])

    def _move(self, pod: Object | None, sign: int) -> str:
        """Add a pod to its node, or subtract it. Return the node; empty for a pod without a node."""
        if pod is None or not pod["node"]:
            return ""
        node: str = pod["node"]
        _add(self._requested, node, pod["requested"], sign)
        if not pod["token"]:
            _add(self._by_others, node, pod["requested"], sign)
        if pod["token"]:
            (self._bound.add if sign > 0 else self._bound.discard)(pod["token"])
        return node

    def _judge(self, name: str) -> None:
        """Update the excluded nodes of all constraints after a node was added, changed or removed."""
        facts = self._facts.get(name)
        for constraints, nodes in self._ruled_out.items():
            if (facts is not None and not constraints.accept(facts)) != (name in nodes):
                self._ruled_out[constraints] = nodes ^ {name}

    def _recount(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            self._free.pop(node, None)
            if node in self._allocatable:
                self._free[node] = self._allocatable[node].less(
                    self._requested.get(node, NOTHING), self._by_others.get(node, NOTHING)
                )
            self._recounted.add(node)

    def _forget(self) -> None:
        if not self._free:
            return
        self._recounted.update(self._free)
        self._free, self._allocatable, self._requested, self._by_others, self._bound = {}, {}, {}, {}, set()
        self._nodes_seen, self._pods_seen = ChangedObjects(), ChangedObjects()
        self._facts, self._ruled_out = {}, {}


def _add(amounts: dict[str, Requested], node: str, requested: Requested, sign: int) -> None:
    there = amounts.get(node, NOTHING)
    now = Requested(
        there.cpu + sign * requested.cpu, there.memory + sign * requested.memory, there.pods + sign * requested.pods
    )
    amounts[node] = now
    if now == NOTHING:
        del amounts[node]


def trimmed_node(node: Object, with_facts: bool = False) -> Object:
    """Return the parts of a node to store. ``with_facts``: include the data that other sharing layers publish."""
    status = node.get("status") or {}
    allocatable = status.get("allocatable") or {}
    # Use the capacity, because allocatable excludes devices that are temporarily unhealthy.
    capacity = ((gpu_index_of(name), amount) for name, amount in (status.get("capacity") or {}).items())
    return {
        "gpus": {index: int(quantity(amount)) for index, amount in capacity if index is not None},
        "metadata": _identity(node),
        "facts": NodeFacts.of(node),
        **({"cluster": ClusterNode.of(node)} if with_facts else {}),
        "allocatable": NodeResources.of_empty_node(
            millicores(allocatable) if "cpu" in allocatable else None,
            memory_bytes(allocatable) if "memory" in allocatable else None,
            int(allocatable["pods"]) if "pods" in allocatable else None,
        ),
    }


def trimmed_pod(pod: Object, with_facts: bool = False) -> Object:
    """Return the parts of a pod to store: full pods would take much memory and expose all environments.

    ``with_facts``: include the data that other sharing layers publish.
    """
    requested = pod_requests(pod)
    return {
        "metadata": _identity(pod),
        "node": "" if phase(pod) in FINISHED else (pod.get("spec") or {}).get("nodeName") or "",
        "requested": Requested(millicores(requested), memory_bytes(requested), 1),
        "token": "" if is_mirror(pod["metadata"]) else annotation(pod, RESERVATION),
        **({"facts": ClusterPod.of(pod, requested)} if with_facts else {}),
    }


def _identity(item: Object) -> Object:
    return {name: item["metadata"].get(name, "") for name in ("namespace", "name", "resourceVersion")}
