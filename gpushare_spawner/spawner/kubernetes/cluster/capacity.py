"""CPU, memory and pods that nodes have free, and which nodes a pod's taints and labels rule out.

What is free is what nodes can allocate, less what the pods on them request.

One reader for a hub, for all namespaces; it needs `list` and `watch` on nodes and pods in the whole cluster. Without
that right nothing is known, and only the scheduler says what does not fit: see `admission`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from aiohttp import ClientError
from kubernetes_asyncio.client.rest import ApiException

from gpushare_spawner.clients.bad_objects import BadObjects
from gpushare_spawner.clients.object_watch import Object, Watched
from gpushare_spawner.model.kubernetes import (
    NodeFacts,
    PodConstraints,
    gpu_index_of,
    is_mirror,
    memory_bytes,
    millicores,
)
from gpushare_spawner.model.kubernetes.quantities import quantity
from gpushare_spawner.placement import NodeResources, Requested
from gpushare_spawner.placement.node_resources import NOTHING, UNKNOWN
from gpushare_spawner.sharing.cluster_facts import ClusterFacts, ClusterNode, ClusterPod
from gpushare_spawner.spawner.kubernetes.cluster.changed_objects import ChangedObjects
from gpushare_spawner.spawner.kubernetes.cluster.pod_requests import pod_requests
from gpushare_spawner.spawner.kubernetes.cluster.pods import FINISHED, RESERVATION, annotation, phase
from gpushare_spawner.wording.errors import reason

ASK_AGAIN_SECONDS = 300.0
"""After the API server has refused to show nodes and pods. Ours: an admin who grants the right sees an effect soon."""
MOST_CONSTRAINTS = 100
"""Kinds of pods whose ruled out nodes are kept. Ours: more than a hub has templates; selectors can name the user."""
COUNTED_AT_ONCE = 500
"""Changed pods that are counted in one piece: about 1 ms."""


class ClusterCapacity:
    """Reads nodes and pods in the background, from `begin` on. ``api`` is Kubernetes' core API."""

    def __init__(self, api: Any, log: logging.Logger) -> None:
        self._api = api
        self._log = log
        self._reading: asyncio.Task[None] | None = None
        self._nodes: Watched | None = None
        self._pods: Watched | None = None
        self._closing: list[asyncio.Future[None]] = []
        """The event loop keeps only weak references to tasks."""
        self._known: dict[str, NodeResources] = {}
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
        """Whether the API server has refused to show nodes and pods."""
        self._ruled_out: dict[PodConstraints, frozenset[str]] = {}

    def begin(self) -> None:
        """Start to read, unless that was done."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._begin())

    def keep_facts(self) -> None:
        """Keep what `facts` returns from now on, which takes memory for each pod of the cluster."""
        if self._keeps_facts:
            return
        self._keeps_facts = True
        if self._nodes is not None and self._pods is not None:
            # what was read lacks it
            self._closing = [asyncio.ensure_future(watched.close()) for watched in (self._nodes, self._pods)]
            self._watch()

    def facts(self) -> ClusterFacts | None:
        """Return nodes and pods as other sharing layers' rules look at them; None while they are not known.

        The same object as long as nothing has changed. See `keep_facts`.
        """
        nodes, pods = self._nodes, self._pods
        if not self._keeps_facts or nodes is None or pods is None or not (nodes.known and pods.known):
            return None
        if self._cluster_facts is None:
            running = (pod["facts"] for pod in pods.objects.values())
            self._cluster_facts = ClusterFacts(
                nodes=tuple(node["cluster"] for node in nodes.objects.values()),
                pods=tuple(pod for pod in running if pod.phase not in FINISHED),
            )
        return self._cluster_facts

    def resources(self) -> Mapping[str, NodeResources]:
        """Return what is free on each node, without reservations in flight; empty while it is not known."""
        for _ in self.count():
            pass
        return self._known

    def bound(self) -> Set[str]:
        """Return the reservations whose pods are on a node and counted, as of the last `count`."""
        return self._bound

    def gpu_devices(self, node: str) -> Mapping[int, int] | None:
        """Return how many devices of each GPU, by its index, a node has by its status; None while it is not known."""
        nodes = self._nodes
        if nodes is None or not nodes.known or (found := nodes.objects.get(node)) is None:
            return None
        devices: Mapping[int, int] = found["gpus"]
        return devices

    def count(self) -> Iterator[None]:
        """Count what has changed, in pieces."""
        nodes, pods = self._nodes, self._pods
        if nodes is None or pods is None or not (nodes.known and pods.known):
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
        """Return what is free on each node that was counted anew and not returned yet; UNKNOWN for one that is gone."""
        while self._recounted:
            node = self._recounted.pop()
            yield node, self._known.get(node, UNKNOWN)

    def look_again(self) -> None:
        """Return all nodes in the next `changes`."""
        self._recounted.update(self._known)

    def ineligible(self, constraints: PodConstraints) -> frozenset[str]:
        """Return the nodes whose taints or labels keep such a pod out, as of the last `count`; empty before it.

        The same set for the same constraints until a node's taints or labels change.
        """
        if not self._known:
            return frozenset()
        found = self._ruled_out.get(constraints)
        if found is None:
            found = self._ruled_out[constraints] = constraints.rejected(self._facts.values())
            if len(self._ruled_out) > MOST_CONSTRAINTS:
                del self._ruled_out[next(iter(self._ruled_out))]
        return found

    async def _begin(self) -> None:
        while not await self._may_read():
            self.refused = True
            await asyncio.sleep(ASK_AGAIN_SECONDS)
        self.refused = False
        self._watch()

    def _watch(self) -> None:
        running = ",".join(f"status.phase!={ended}" for ended in FINISHED)
        pods = functools.partial(self._api.list_pod_for_all_namespaces, field_selector=running)
        keep = functools.partial(kept_pod, with_facts=self._keeps_facts)
        keep_node = functools.partial(kept_node, with_facts=self._keeps_facts)
        self._nodes = Watched("nodes", self._api.list_node, "the cluster", "", self._on_change, keep_node, self._log)
        self._pods = Watched("pods", pods, "the cluster", "", self._on_change, keep, self._log)
        self._nodes.start()
        self._pods.start()

    async def _may_read(self) -> bool:
        try:
            for ask in (self._api.list_node, self._api.list_pod_for_all_namespaces):
                answer = await ask(limit=1, _preload_content=False)
                answer.close()
                if answer.status != 200:
                    raise ApiException(status=answer.status, reason=answer.reason)
        except (ApiException, ClientError, OSError, TimeoutError) as error:
            self._log.info(
                "Free CPU and memory of nodes are not known (%s): the hub chooses a node by its GPUs, and tries "
                "another one where the scheduler refuses the pod. Give the hub's service account the right to "
                "list and watch nodes and pods, in a ClusterRole, and the hub reads them.",
                reason(error).splitlines()[0],
            )
            return False
        return True

    def _on_change(self) -> None:
        """Forget what is made of all objects; `count` finds what has changed by itself."""
        self._cluster_facts = None

    def _take_node(self, name: str, now: Object | None) -> None:
        """Count a node; None: it is gone."""
        self._allocatable.pop(name, None)
        facts = self._facts.pop(name, None)
        if now is not None:
            self._allocatable[name] = now["allocatable"]
            self._facts[name] = now["facts"]
        if facts != self._facts.get(name):
            self._judge(name)
        self._recount([name])

    def _move(self, pod: Object | None, sign: int) -> str:
        """Count a pod on its node, or take it off; return the node, empty where the pod is on none."""
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
        """Find out which constraints keep pods out of a node that is new, has changed or is gone."""
        facts = self._facts.get(name)
        for constraints, nodes in self._ruled_out.items():
            if (facts is not None and not constraints.accept(facts)) != (name in nodes):
                self._ruled_out[constraints] = nodes ^ {name}

    def _recount(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            self._known.pop(node, None)
            if node in self._allocatable:
                self._known[node] = self._allocatable[node].less(
                    self._requested.get(node, NOTHING), self._by_others.get(node, NOTHING)
                )
            self._recounted.add(node)

    def _forget(self) -> None:
        if not self._known:
            return
        self._recounted.update(self._known)
        self._known, self._allocatable, self._requested, self._by_others, self._bound = {}, {}, {}, {}, set()
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


def kept_node(node: Object, with_facts: bool = False) -> Object:
    """Return what is kept of a node. ``with_facts``: with what other sharing layers publish."""
    status = node.get("status") or {}
    allocatable = status.get("allocatable") or {}
    # of its capacity: what is allocatable is without devices that are unhealthy for a moment
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


def kept_pod(pod: Object, with_facts: bool = False) -> Object:
    """Return what is kept of a pod: whole pods of a large cluster would take much memory, and show all environments.

    ``with_facts``: with what other sharing layers publish.
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
