"""What foreign sharing layers publish in a cluster, at one instant, reduced to what their modules read.

Amounts of a node or pod are integers by resource: ``cpu`` in millicores, ``memory`` and storage in bytes, others as
they are counted. The `of` functions read objects as the API server writes them; a malformed object raises ValueError,
KeyError or TypeError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from gpushare_spawner.model.kubernetes import PREFIX, is_mirror, millicores, quantity

PRODUCT_LABEL = "nvidia.com/gpu.product"
"""The GPU model of a node, with dashes for spaces. (NVIDIA's GPU feature discovery.)"""
MEMORY_LABEL = "nvidia.com/gpu.memory"
"""The memory of one GPU of a node, in MiB. (NVIDIA's GPU feature discovery.)"""
COUNT_LABEL = "nvidia.com/gpu.count"
"""The GPUs of a node. (NVIDIA's GPU feature discovery.)"""

Amounts = Mapping[str, int]

_PART = re.compile(r"[0-9]{1,9}(\.[0-9]{0,18})?|\.[0-9]{1,18}")


def amounts(written: Mapping[str, Any] | None) -> dict[str, int]:
    """Return amounts as the API server writes them as integers. Raises ValueError for what is no quantity."""
    written = written or {}
    return {name: millicores(written) if name == "cpu" else int(quantity(value)) for name, value in written.items()}


def gpu_part(written: str) -> Fraction:
    """Return an amount of GPUs that a label or annotation of a pod has, like 0.25. Raises ValueError for what is none.

    Anybody who may make a pod writes these: a negative amount would make room, and of an exponent like 1e999999999 the
    exact value takes hours.
    """
    if not _PART.fullmatch(written):
        raise ValueError(f"{written[:20]!r} is not an amount of GPUs like 0.25")
    return Fraction(written)


@dataclass(frozen=True)
class ClusterNode:
    """A node on which servers can run."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    allocatable: Amounts = field(default_factory=dict)
    unschedulable: bool = False

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> ClusterNode:
        """Return what is read of a Node."""
        metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
        return cls(
            name=metadata["name"],
            labels=metadata.get("labels") or {},
            annotations=metadata.get("annotations") or {},
            allocatable=amounts(status.get("allocatable")),
            unschedulable=bool(spec.get("unschedulable")),
        )

    @property
    def model(self) -> str:
        """The GPU model's name as the node's label has it, without what the device plugin appends; empty: unknown."""
        product = self.labels.get(PRODUCT_LABEL, "")
        return product.removesuffix("-SHARED").partition("-MIG-")[0]

    @property
    def gpu_memory_bytes(self) -> int | None:
        """The memory of one GPU; None: no label says it."""
        return self.mebibytes(MEMORY_LABEL)

    @property
    def gpu_count(self) -> int | None:
        """The GPUs of the node; None: no label says it."""
        return self.number(COUNT_LABEL)

    def number(self, label: str) -> int | None:
        """Return the number that a label has; None: there is no such label, or it has none."""
        written = self.labels.get(label, "")
        return int(written) if written.isdecimal() else None

    def mebibytes(self, label: str) -> int | None:
        """Return the bytes that a label has in MiB; None as `number`."""
        found = self.number(label)
        return found * 2**20 if found is not None else None


@dataclass(frozen=True)
class ClusterPod:
    """A pod that has not finished; `node` is empty while the scheduler has not bound it."""

    name: str
    namespace: str
    node: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    requests: Amounts = field(default_factory=dict)
    """As the scheduler counts them for the pod as a whole."""
    phase: str = "Running"

    @classmethod
    def of(cls, pod: Mapping[str, Any], requests: Mapping[str, Any]) -> ClusterPod:
        """Return what is read of a Pod. ``requests``: quantities that the pod requests as a whole."""
        metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
        return cls(
            name=metadata["name"],
            namespace=metadata["namespace"],
            node=spec.get("nodeName") or "",
            labels=_vouched(metadata, "labels"),
            annotations=_vouched(metadata, "annotations"),
            requests=amounts(requests),
            phase=status.get("phase") or "Pending",
        )


@dataclass(frozen=True)
class ClusterQueue:
    """A queue of KAI Scheduler (scheduling.run.ai/v2). GPU amounts are GPUs; None: unlimited."""

    name: str
    parent: str = ""
    quota: float | None = 0.0
    """GPUs that the queue deserves."""
    limit: float | None = 0.0
    """GPUs that it can have at most."""
    allocated: float = 0.0
    allocated_non_preemptible: float = 0.0

    @classmethod
    def of(cls, queue: Mapping[str, Any]) -> ClusterQueue:
        """Return what is read of a Queue."""
        spec, status = queue.get("spec") or {}, queue.get("status") or {}
        gpu = (spec.get("resources") or {}).get("gpu") or {}
        return cls(
            name=queue["metadata"]["name"],
            parent=spec.get("parentQueue") or "",
            quota=_bound(gpu.get("quota", 0)),
            limit=_bound(gpu.get("limit", 0)),
            allocated=_gpus(status.get("allocated")),
            allocated_non_preemptible=_gpus(status.get("allocatedNonPreemptible")),
        )


@dataclass(frozen=True)
class ClusterDevice:
    """A device of a ResourceSlice (resource.k8s.io/v1)."""

    name: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Without the type: ``{"uuid": "GPU-.."}``."""
    capacity: Amounts = field(default_factory=dict)
    shared: bool = False
    """Whether several claims can have a part of it."""
    tainted: bool = False
    """A taint keeps new claims away."""
    counters: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """What the device consumes of the slice's counters, by counter set and counter."""
    defaults: Amounts = field(default_factory=dict)
    """What a claim consumes of a capacity that it does not name."""


@dataclass(frozen=True)
class ClusterSlice:
    """A ResourceSlice of one node."""

    driver: str
    pool: str
    node: str
    devices: tuple[ClusterDevice, ...] = ()
    generation: int = 0
    counters: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Counters that the pool's devices share, by counter set and counter."""

    @classmethod
    def of(cls, slice_: Mapping[str, Any]) -> ClusterSlice:
        """Return what is read of a ResourceSlice."""
        spec = slice_["spec"]
        return cls(
            driver=spec["driver"],
            pool=spec["pool"]["name"],
            node=spec.get("nodeName") or "",
            devices=tuple(_device(device) for device in spec.get("devices") or []),
            generation=spec["pool"].get("generation") or 0,
            counters=dict(_counters(spec.get("sharedCounters") or [], "name")),
        )


@dataclass(frozen=True)
class ClaimedDevice:
    """A device, or a part of it, that is allocated to a claim."""

    driver: str
    pool: str
    device: str
    consumed: Amounts = field(default_factory=dict)
    """Of the device's capacity; empty: the whole device."""


@dataclass(frozen=True)
class ClusterClaim:
    """A ResourceClaim. Devices for monitoring (adminAccess) are not allocated, and are left out."""

    name: str
    namespace: str
    devices: tuple[ClaimedDevice, ...] = ()
    pods: frozenset[str] = frozenset()
    """Names of the pods of its namespace that it is allocated for."""

    @classmethod
    def of(cls, claim: Mapping[str, Any]) -> ClusterClaim:
        """Return what is read of a ResourceClaim."""
        status = claim.get("status") or {}
        allocation = status.get("allocation") or {}
        users = [one for one in status.get("reservedFor") or [] if one.get("resource") == "pods"]
        results = (allocation.get("devices") or {}).get("results") or []
        return cls(
            name=claim["metadata"]["name"],
            namespace=claim["metadata"]["namespace"],
            devices=tuple(
                ClaimedDevice(one["driver"], one["pool"], one["device"], amounts(one.get("consumedCapacity")))
                for one in results
                if not one.get("adminAccess")
            ),
            pods=frozenset(one["name"] for one in users),
        )


@dataclass(frozen=True)
class ClusterFacts:
    """What is known of a cluster. ``nodes``: those on which the hub's servers can run; ``pods``: all pods on them that
    have not finished, of all namespaces, and those that are not bound yet."""

    nodes: tuple[ClusterNode, ...] = ()
    pods: tuple[ClusterPod, ...] = ()
    queues: tuple[ClusterQueue, ...] = ()
    slices: tuple[ClusterSlice, ...] = ()
    claims: tuple[ClusterClaim, ...] = ()
    taken_at: float = 0.0
    """Seconds since the epoch."""

    def without(self, pods: Set[tuple[str, str]]) -> ClusterFacts:
        """Return the facts once pods have ended, by namespace and name. What else their ends change is not known."""
        return replace(
            self,
            pods=tuple(pod for pod in self.pods if (pod.namespace, pod.name) not in pods),
            claims=tuple(
                claim
                for claim in self.claims
                if not claim.pods or not all((claim.namespace, name) in pods for name in claim.pods)
            ),
        )

    @cached_property
    def _pods_by_node(self) -> dict[str, list[ClusterPod]]:
        found: dict[str, list[ClusterPod]] = {}
        for pod in self.pods:
            if pod.node:
                found.setdefault(pod.node, []).append(pod)
        return found

    def pods_on(self, node: str) -> list[ClusterPod]:
        """Return the pods that are bound to a node."""
        return self._pods_by_node.get(node, [])

    @cached_property
    def _requested(self) -> dict[tuple[str, str], int]:
        found: dict[tuple[str, str], int] = {}
        for pod in self.pods:
            if pod.node:
                for resource, amount in pod.requests.items():
                    found[pod.node, resource] = found.get((pod.node, resource), 0) + amount
        return found

    def requested(self, node: str, resource: str) -> int:
        """Return what the pods on a node request of a resource."""
        return self._requested.get((node, resource), 0)

    def free(self, node: ClusterNode, resource: str) -> int:
        """Return what a node has left of a resource, at least 0."""
        return max(0, node.allocatable.get(resource, 0) - self.requested(node.name, resource))


def _vouched(metadata: Mapping[str, Any], part: str) -> Mapping[str, str]:
    """Return the labels or annotations of a pod, without ours where its node has made it."""
    given: Mapping[str, str] = metadata.get(part) or {}
    if is_mirror(metadata):
        return {name: text for name, text in given.items() if not name.startswith(PREFIX)}
    return given


def _bound(value: float) -> float | None:
    """Return an amount of a queue in GPUs; None for -1, which is no bound. A bound that is left out is 0."""
    return None if value == -1 else float(value)


def _gpus(status: Mapping[str, Any] | None) -> float:
    """Return the GPUs in a queue's status, which names them by resource; fractions are part of them."""
    return float(quantity((status or {}).get("nvidia.com/gpu", 0)))


def _device(device: Mapping[str, Any]) -> ClusterDevice:
    capacity: Mapping[str, Any] = device.get("capacity") or {}
    policies = {name: (one.get("requestPolicy") or {}).get("default") for name, one in capacity.items()}
    return ClusterDevice(
        name=device["name"],
        attributes={name: next(iter(typed.values())) for name, typed in (device.get("attributes") or {}).items()},
        capacity=amounts({name: one["value"] for name, one in capacity.items()}),
        shared=bool(device.get("allowMultipleAllocations")),
        tainted=any(taint.get("effect") in ("NoSchedule", "NoExecute") for taint in device.get("taints") or []),
        counters=dict(_counters(device.get("consumesCounters") or [], "counterSet")),
        defaults=amounts({name: default for name, default in policies.items() if default is not None}),
    )


def _counters(sets: Iterable[Mapping[str, Any]], named: str) -> Iterator[tuple[tuple[str, str], int]]:
    for one in sets:
        for name, counter in (one.get("counters") or {}).items():
            yield (one[named], name), int(quantity(counter["value"]))
