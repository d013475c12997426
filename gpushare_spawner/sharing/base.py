"""A sharing layer: renders a share that was granted into what a notebook server is started from.

What a server is started from differs: a process has an environment, a pod has a manifest. A layer takes the form as it
is without a GPU and returns it with the share. It only renders: it asks no agent and no API server. One module for each
layer; native.py and native.py are ours.

What a sharing layer changes in a pod, apart from how it decides on it. Pods are plain data, and are never changed in
place.

What foreign sharing layers publish in a cluster, at one instant, reduced to what their modules read.

Amounts of a node or pod are integers by resource: ``cpu`` in millicores, ``memory`` and storage in bytes, others as
they are counted. The `of` functions read objects as the API server writes them; a malformed object raises ValueError,
KeyError or TypeError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from gpushare_spawner.model.kubernetes import PREFIX, is_mirror, millicores, quantity, required_of_node
from gpushare_spawner.model.layer_rules import LayerOptions, LayerRule, MigProfile
from gpushare_spawner.model.share import session_id
from gpushare_spawner.model.template import Template, TemplateGpu

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
                ClaimedDevice(
                    result["driver"], result["pool"], result["device"], amounts(result.get("consumedCapacity"))
                )
                for result in results
                if not result.get("adminAccess")
            ),
            pods=frozenset(user["name"] for user in users),
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


Environment: TypeAlias = dict[str, str]
"""What a process is started with."""
PodSpec: TypeAlias = dict[str, Any]
"""A pod's manifest, as plain data."""

Form = TypeVar("Form", Environment, PodSpec)


@dataclass(frozen=True)
class Tenant:
    """The user of the notebook server."""

    user: str
    server: str = ""
    """The server's name; the default server has none."""
    uid: int = 0
    """The user id of the server's processes; not used in a cluster."""
    quota: str = ""
    """The account that the share is charged to, see `quota.Account`; empty: there are no quotas."""
    user_units: int | None = None
    """What the user's sessions in that quota have at most together on one GPU, in units of 1 %; None: no bound."""

    @property
    def session(self) -> str:
        """The session's id."""
        return session_id(self.user, self.server)


class SharingLayer(Protocol[Form]):
    """One granted share of a kind of GPU sharing."""

    name: ClassVar[str]
    """The kind, as admins write it."""

    def render(self, form: Form) -> Form:
        """Return the form with the share in it; the one given is not changed."""


class LayerCannot(ValueError):
    """A layer has no way to give a server this share; the message is a sentence for the admin."""


@dataclass(frozen=True)
class LayerRequest:
    """One share that a layer with a scheduler of its own is asked for.

    Nothing is placed: the scheduler chooses node and GPU when it sees the pod.
    """

    tenant: Tenant
    template: Template
    options: LayerOptions
    """Those of the layer, see `LayersFile.options_of`."""
    facts: ClusterFacts = field(default_factory=ClusterFacts)
    """``nodes``: only those that the rule applies to, and that the server can run on."""
    rule: LayerRule | None = None
    """The rule of `layers.yaml` that the options are from; the pod is kept on the rule's nodes. None: there is none."""

    @property
    def gpu(self) -> TemplateGpu:
        """The template's share of GPUs. Raises ValueError for a template without a GPU."""
        if self.template.gpu is None:
            raise ValueError(f"template {self.template.name} asks for no GPU: there is nothing to share")
        return self.template.gpu

    @property
    def models(self) -> tuple[str, ...]:
        """The patterns of GPU model names that nodes are chosen by: the template's, else the rule's; empty: any."""
        return self.gpu.models or (self.rule.models if self.rule is not None else ())


@dataclass(frozen=True)
class LayerCapacity:
    """What a layer has for servers of one template, by what it publishes."""

    servers: int = 0
    """Servers that could start now: GPU, CPU, memory and pods of the nodes are counted."""
    at_most: int = 0
    """Servers that an empty cluster could run; 0: none ever, so that it is no use to wait."""
    limited_by: str = ""
    """What else holds servers up, as half a sentence, like a queue's limit; empty: nothing."""
    by_node: Mapping[str, int] = field(default_factory=dict, compare=False)
    """How many of these servers each node could start now, whatever else holds servers up."""
    able: frozenset[str] = field(default=frozenset(), compare=False)
    """Nodes that could start one if nothing ran there, and that take new pods."""
    profile: MigProfile | None = None
    """That of the MIG device that a server gets; None: it gets none."""


NOTEBOOK = "notebook"
"""KubeSpawner's name of the container that the notebook server runs in."""


@dataclass(frozen=True)
class PodChange:
    """Additions to a pod. What the pod has already under the same name is replaced."""

    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    """Of the notebook server's container. Of these resources requests equal limits."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the notebook server's container."""
    node_labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The values of which a node's label must have one."""
    scheduler: str = ""
    """Empty: the pod's own."""
    priority_class: str = ""
    """Empty: the pod's own."""
    claim_templates: Mapping[str, str] = field(default_factory=dict)
    """ResourceClaimTemplates that the notebook server's container has a claim of, by the claim's name in the pod."""
    volumes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Sources of volumes by name."""
    mounts: Sequence[Mapping[str, Any]] = ()
    """Where the notebook server's container has them."""

    def apply(self, form: PodSpec) -> PodSpec:
        """Return the pod with the additions. Raises ValueError for a pod without containers."""
        metadata, spec = form.get("metadata") or {}, form.get("spec") or {}
        notebook = notebook_container(spec)
        changed = self._container(notebook)
        named = {
            "annotations": {**(metadata.get("annotations") or {}), **self.annotations},
            "labels": {**(metadata.get("labels") or {}), **self.labels},
        }
        new_spec = {**spec, "containers": [changed if one is notebook else one for one in spec["containers"]]}
        if self.node_labels:
            new_spec["affinity"] = with_node_labels(spec.get("affinity"), self.node_labels)
        if self.scheduler:
            new_spec["schedulerName"] = self.scheduler
        if self.priority_class:
            new_spec["priorityClassName"] = self.priority_class
        if self.claim_templates:
            claims = [{"name": name, "resourceClaimTemplateName": of} for name, of in self.claim_templates.items()]
            new_spec["resourceClaims"] = _replaced(spec.get("resourceClaims") or [], claims)
        if self.volumes:
            volumes = [{"name": name, **source} for name, source in self.volumes.items()]
            new_spec["volumes"] = _replaced(spec.get("volumes") or [], volumes)
        return {**form, "metadata": {**metadata, **named}, "spec": new_spec}

    def _container(self, notebook: dict[str, Any]) -> dict[str, Any]:
        resources = dict(notebook.get("resources") or {})
        resources["limits"] = {**(resources.get("limits") or {}), **self.limits}
        if self.claim_templates:
            names = [{"name": name} for name in self.claim_templates]
            resources["claims"] = _replaced(resources.get("claims") or [], names)
        changed = {**notebook, "resources": resources}
        if self.variables:
            variables = [{"name": name, "value": value} for name, value in self.variables.items()]
            changed["env"] = _replaced(notebook.get("env") or [], variables)
        if self.mounts:
            changed["volumeMounts"] = [*(notebook.get("volumeMounts") or []), *self.mounts]
        return changed


def notebook_container(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notebook server's container: the one with that name, else the first. Raises ValueError without one."""
    containers: list[dict[str, Any]] = spec.get("containers") or []
    if not containers:
        raise ValueError("the pod has no container")
    return next((container for container in containers if container.get("name") == NOTEBOOK), containers[0])


def with_node_labels(affinity: Mapping[str, Any] | None, labels: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return a pod's affinity that also requires of each of these labels of a node one of the values."""
    added = [{"key": key, "operator": "In", "values": list(values)} for key, values in labels.items()]
    return required_of_node(affinity, "matchExpressions", added)


def _replaced(there: Iterable[Mapping[str, Any]], added: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a list of named parts with these parts, which replace those with the same names."""
    names = {part["name"] for part in added}
    return [*(dict(part) for part in there if part.get("name") not in names), *(dict(part) for part in added)]
