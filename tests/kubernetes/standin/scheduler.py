"""A small scheduler: puts pods on nodes where their node selector, taints and requests let them be.

An ordinary client of the API server, so that it also serves a real API server that has no scheduler. What it does not
know: affinity between pods, preferences, preemption, volumes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import aiohttp

from .claim_allocator import CANNOT, GROUP, ClaimAllocator
from .client import ApiStatus, KubeClient, path
from .quantities import quantity

log = logging.getLogger(__name__)

NAME = "default-scheduler"


class Extender:
    """What a scheduler of another name does beside: it decides on resources that Kubernetes does not count."""

    ignored: frozenset[str] = frozenset()
    """Resources that the scheduler itself does not look at."""

    def against(self, pod: dict[str, Any], node: dict[str, Any], pods: Sequence[dict[str, Any]]) -> Iterator[str]:
        """Why the pod cannot be on the node. ``pods``: all that there are."""
        return iter(())

    async def chosen(self, pod: dict[str, Any], node: dict[str, Any], pods: Sequence[dict[str, Any]]) -> bool:
        """Do what belongs to it; return whether the scheduler is to bind the pod to the node."""
        return True

    async def look(self, pods: Sequence[dict[str, Any]]) -> None:
        """Something has changed."""


class Scheduler:
    """Start with ``async with``. ``name``: which pods it is for."""

    def __init__(
        self, client: KubeClient, retry_after: float = 1.0, name: str = NAME, extender: Extender | None = None
    ) -> None:
        self._client = client
        self._name = name
        self._extender = extender or Extender()
        self._retry_after = retry_after
        self._nodes: dict[str, dict[str, Any]] = {}
        self._pods: dict[str, dict[str, Any]] = {}
        self._bound: dict[str, str] = {}
        """Pods (by uid) that were bound, whose new state has not come back yet."""
        self._used: dict[str, dict[str, Decimal]] = {}
        self._said: dict[str, str] = {}
        self._claims = ClaimAllocator()
        self._knows_claims = False
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Scheduler:
        self._tasks = [
            asyncio.create_task(self._client.follow(path("nodes"), self._all_nodes, self._node)),
            asyncio.create_task(self._client.follow(path("pods"), self._all_pods, self._pod)),
            asyncio.create_task(self._run()),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow_claims(self, plural: str, known: dict[str, dict[str, Any]]) -> None:
        def name(item: dict[str, Any]) -> str:
            metadata = item["metadata"]
            return "/".join(filter(None, (metadata.get("namespace"), metadata["name"])))

        async def listed(items: list[dict[str, Any]]) -> None:
            known.clear()
            known.update({name(item): item for item in items})
            self._wake.set()

        async def changed(what: str, item: dict[str, Any]) -> None:
            known.pop(name(item), None)
            if what != "DELETED":
                known[name(item)] = item
            self._wake.set()

        await self._client.follow(path(plural, group=GROUP), listed, changed)

    def _know_claims(self) -> None:
        """Follow them from the first pod on that names one."""
        known = self._claims
        kinds = ("resourceslices", known.slices), ("resourceclaims", known.claims), ("deviceclasses", known.classes)
        self._tasks += [asyncio.create_task(self._follow_claims(plural, items)) for plural, items in kinds]
        self._knows_claims = True

    async def _all_nodes(self, nodes: list[dict[str, Any]]) -> None:
        self._nodes = {node["metadata"]["name"]: node for node in nodes}
        self._wake.set()

    async def _node(self, what: str, node: dict[str, Any]) -> None:
        if what == "DELETED":
            self._nodes.pop(node["metadata"]["name"], None)
        else:
            self._nodes[node["metadata"]["name"]] = node
        self._wake.set()

    async def _all_pods(self, pods: list[dict[str, Any]]) -> None:
        self._pods = {pod["metadata"]["uid"]: pod for pod in pods}
        self._wake.set()

    async def _pod(self, what: str, pod: dict[str, Any]) -> None:
        uid = pod["metadata"]["uid"]
        if what == "DELETED":
            self._pods.pop(uid, None)
            self._bound.pop(uid, None)
            self._said.pop(uid, None)
        else:
            self._pods[uid] = pod
            if pod["spec"].get("nodeName"):
                self._bound.pop(uid, None)
        self._wake.set()

    async def _run(self) -> None:
        while True:
            # not wait_for: up to Python 3.11 it may swallow a cancellation
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._retry_after if self._waiting() else None):
                    await self._wake.wait()
            self._wake.clear()
            self._count_used()
            with contextlib.suppress(aiohttp.ClientError, OSError, ApiStatus):
                await self._extender.look(list(self._pods.values()))
            for pod in self._waiting():
                with contextlib.suppress(aiohttp.ClientError, OSError, ApiStatus):
                    await self._place(pod)

    def _waiting(self) -> list[dict[str, Any]]:
        """Pods that want a node, oldest first."""
        found = [
            pod
            for uid, pod in self._pods.items()
            if not pod["spec"].get("nodeName")
            and uid not in self._bound
            and not pod["metadata"].get("deletionTimestamp")
            and pod["spec"].get("schedulerName", NAME) == self._name
        ]
        return sorted(found, key=lambda pod: int(pod["metadata"]["resourceVersion"]))

    def _count_used(self) -> None:
        self._used = {name: Counter() for name in self._nodes}  # type: ignore[misc]
        for uid, pod in self._pods.items():
            node = pod["spec"].get("nodeName") or self._bound.get(uid)
            if node in self._used and pod["status"].get("phase") not in ("Succeeded", "Failed"):
                self._take(node, pod)

    def _take(self, node: str, pod: dict[str, Any]) -> None:
        for name, amount in requests(pod).items():
            self._used[node][name] = self._used[node].get(name, Decimal(0)) + amount

    async def _place(self, pod: dict[str, Any]) -> None:
        if pod["spec"].get("resourceClaims") and not self._knows_claims:
            self._know_claims()
        claims = self._claims.claims_of(pod)
        if claims is None:
            return  # not before all of them are there
        reasons: Counter[str] = Counter()
        fitting = []
        for node in self._nodes.values():
            why = list(self._against(pod, node))
            if not why and self._allocations(claims, node["metadata"]["name"]) is None:
                why = [CANNOT]
            reasons.update(why)
            if not why:
                fitting.append(node["metadata"]["name"])
        if not fitting:
            await self._say_unschedulable(pod, reasons)
            return
        metadata = pod["metadata"]
        node_name = min(fitting, key=lambda name: (self._used[name].get("pods", Decimal(0)), name))
        await self._reserve(claims, pod, node_name)
        if not await self._extender.chosen(pod, self._nodes[node_name], list(self._pods.values())):
            return
        self._bound[metadata["uid"]] = node_name
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": metadata["name"], "uid": metadata["uid"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node_name},
        }
        try:
            await self._client.create(path("pods", metadata["namespace"], metadata["name"], "binding"), binding)
        except BaseException:
            self._bound.pop(metadata["uid"], None)
            raise
        self._take(node_name, pod)
        await self._event(pod, "Normal", "Scheduled", f"Successfully assigned {metadata['name']} to {node_name}")

    def _allocations(self, claims: list[dict[str, Any]], node: str) -> list[dict[str, Any]] | None:
        try:
            return self._claims.allocations(claims, node)
        except ValueError as error:
            log.warning("claims cannot be allocated: %s", error)
            return None

    async def _reserve(self, claims: list[dict[str, Any]], pod: dict[str, Any], node: str) -> None:
        metadata = pod["metadata"]
        user = {"resource": "pods", "name": metadata["name"], "uid": metadata["uid"]}
        for claim, allocation in zip(claims, self._allocations(claims, node) or [], strict=True):
            status = claim.get("status") or {}
            reserved = [one for one in status.get("reservedFor") or [] if one["uid"] != metadata["uid"]]
            where = path("resourceclaims", metadata["namespace"], claim["metadata"]["name"], "status", group=GROUP)
            patch = {"status": {"allocation": allocation, "reservedFor": [*reserved, user]}}
            written = await self._client.patch(where, patch)
            self._claims.claims[f"{metadata['namespace']}/{claim['metadata']['name']}"] = written

    def _against(self, pod: dict[str, Any], node: dict[str, Any]) -> Iterator[str]:
        """Why the pod cannot be on the node."""
        name, labels = node["metadata"]["name"], node["metadata"].get("labels") or {}
        if name not in _named_nodes(pod, name):
            # the real one leaves such nodes out before it looks at anything else
            yield "node(s) didn't satisfy plugin(s) [NodeAffinity]"
            return
        if node["spec"].get("unschedulable"):
            yield "node(s) were unschedulable"
            return
        if not _is_ready(node):
            yield "node(s) had untolerated taint {node.kubernetes.io/not-ready: }"
            return
        for taint in node["spec"].get("taints") or []:
            if taint["effect"] in ("NoSchedule", "NoExecute") and not _tolerates(pod, taint):
                yield f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
                return
        wanted = pod["spec"].get("nodeSelector") or {}
        if any(labels.get(key) != value for key, value in wanted.items()) or not _affine(pod, name, labels):
            yield "node(s) didn't match Pod's node affinity/selector"
            return
        allocatable = node["status"].get("allocatable") or {}
        for resource, amount in requests(pod).items():
            if resource in self._extender.ignored:
                continue
            free = quantity(allocatable.get(resource, 0)) - self._used[name].get(resource, Decimal(0))
            if amount > free:
                yield "Too many pods" if resource == "pods" else f"Insufficient {resource}"
        yield from self._extender.against(pod, node, list(self._pods.values()))

    async def _say_unschedulable(self, pod: dict[str, Any], reasons: Counter[str]) -> None:
        counted = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        message = (
            f"0/{len(self._nodes)} nodes are available: {counted}."
            if reasons
            else "no nodes available to schedule pods"
        )
        metadata = pod["metadata"]
        if self._said.get(metadata["uid"]) == message:
            return
        self._said[metadata["uid"]] = message
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
            "lastTransitionTime": now(),
        }
        status = path("pods", metadata["namespace"], metadata["name"], "status")
        await self._client.patch(status, {"status": {"conditions": [condition]}}, "strategic")
        await self._event(pod, "Warning", "FailedScheduling", message)

    async def _event(self, pod: dict[str, Any], kind: str, reason: str, message: str) -> None:
        await record_event(self._client, pod, kind, reason, message, self._name)


def requests(pod: dict[str, Any]) -> dict[str, Decimal]:
    """What a pod asks of a node: the sum of its containers, or more where an init container asks for more.

    Of a container that is being resized in place the most of what is asked for, allocated and in force counts.
    """
    total: dict[str, Decimal] = {"pods": Decimal(1)}
    states = {state["name"]: state for state in (pod.get("status") or {}).get("containerStatuses") or []}
    for container in pod["spec"]["containers"]:
        state = states.get(container["name"], {})
        granted = [{"resources": {"requests": state.get("allocatedResources")}}, state]
        for name, amount in _largest([_requests_of(each) for each in (container, *granted)]).items():
            total[name] = total.get(name, Decimal(0)) + amount
    for container in pod["spec"].get("initContainers") or []:
        for name, amount in _requests_of(container).items():
            total[name] = max(total.get(name, Decimal(0)), amount)
    return total


async def record_event(
    client: KubeClient, pod: dict[str, Any], kind: str, reason: str, message: str, component: str, host: str = ""
) -> None:
    """An Event about a pod; one that cannot be written is lost, as everywhere."""
    metadata = pod["metadata"]
    event = {
        "metadata": {"generateName": f"{metadata['name'][:200]}.", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": kind,
        "reason": reason,
        "message": message[:1024],
        "source": {"component": component, **({"host": host} if host else {})},
        "firstTimestamp": now(),
        "lastTimestamp": now(),
        "count": 1,
        "reportingComponent": component,
        "reportingInstance": host,
    }
    with contextlib.suppress(ApiStatus, aiohttp.ClientError, OSError):
        await client.create(path("events", metadata["namespace"]), event)


def now() -> str:
    """RFC 3339."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _requests_of(container: dict[str, Any]) -> dict[str, Decimal]:
    asked = (container.get("resources") or {}).get("requests") or {}
    return {name: quantity(amount) for name, amount in asked.items()}


def _largest(amounts: list[dict[str, Decimal]]) -> dict[str, Decimal]:
    names = {name for each in amounts for name in each}
    return {name: max(each[name] for each in amounts if name in each) for name in names}


def _is_ready(node: dict[str, Any]) -> bool:
    conditions = node["status"].get("conditions") or []
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _tolerates(pod: dict[str, Any], taint: dict[str, Any]) -> bool:
    for toleration in pod["spec"].get("tolerations") or []:
        if toleration.get("effect") not in (None, "", taint["effect"]):
            continue
        if toleration.get("operator") == "Exists":
            if toleration.get("key") in (None, "", taint["key"]):
                return True
        elif toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", ""):
            return True
    return False


def _named_nodes(pod: dict[str, Any], name: str) -> set[str]:
    """The nodes that the terms of the required node affinity name; the given one where a term names none."""
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or [{}]
    named: set[str] = set()
    for term in terms:
        fields = [set(each["values"]) for each in term.get("matchFields") or [] if each["operator"] == "In"]
        named |= set.intersection(*fields) if fields else {name}
    return named


def _affine(pod: dict[str, Any], name: str, labels: dict[str, str]) -> bool:
    """Node affinity that is required: any of its terms, all of a term's expressions."""
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if not required:
        return True
    return any(
        all(_expression(each, labels) for each in term.get("matchExpressions") or [])
        and all(_expression(each, {"metadata.name": name}) for each in term.get("matchFields") or [])
        for term in required["nodeSelectorTerms"]
    )


def _expression(expression: dict[str, Any], labels: dict[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and int(value) > int(values[0])
        case "Lt":
            return value is not None and int(value) < int(values[0])
    raise ValueError(f"no operator of a node selector: {expression['operator']}")
