"""Common parts of the sharing layers: changes to a pod, and the facts that foreign layers publish.

A layer renders a granted share into a pod's manifest: it takes the pod without a GPU and returns it with the share. It
sends no requests to an agent or the API server. Each layer has one module; native.py is ours. Pods are plain data and
are never changed in place. The end of the module handles the nodes for a server with a foreign layer: suitable nodes,
labels that keep a pod on them, and the number of servers that fit.

`ClusterFacts` is a snapshot of a cluster, reduced to the fields that layers read. Amounts of a node or pod are integers
by resource: ``cpu`` in millicores, ``memory`` and storage in bytes, other resources in their own unit. The `of`
functions read objects as the API server writes them; a malformed object raises ValueError, KeyError or TypeError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from gpushare_spawner.model.kubernetes.annotations import PREFIX
from gpushare_spawner.model.kubernetes.container_requests import millicores, notebook_container, quantity
from gpushare_spawner.model.kubernetes.objects import is_mirror, pinned, required_of_node
from gpushare_spawner.model.layers_file import LayerOptions, LayerRule, MigProfile, matches
from gpushare_spawner.model.quantity import resolve_bytes, whole_millicores
from gpushare_spawner.model.share import UNITS_PER_GPU, session_id
from gpushare_spawner.model.template import Template, TemplateGpu

PRODUCT_LABEL = "nvidia.com/gpu.product"
"""The GPU model of a node, with dashes instead of spaces. (NVIDIA's GPU feature discovery.)"""
MEMORY_LABEL = "nvidia.com/gpu.memory"
"""The memory of one GPU of the node, in MiB. (NVIDIA's GPU feature discovery.)"""
COUNT_LABEL = "nvidia.com/gpu.count"
"""The number of GPUs of a node. (NVIDIA's GPU feature discovery.)"""

Amounts = Mapping[str, int]

_PART = re.compile(r"[0-9]{1,9}(\.[0-9]{0,18})?|\.[0-9]{1,18}")


def amounts(written: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the API server's amounts as integers. Raises ValueError for an invalid quantity."""
    written = written or {}
    return {name: millicores(written) if name == "cpu" else int(quantity(value)) for name, value in written.items()}


def gpu_part(written: str) -> Fraction:
    """Return an amount of GPUs, such as 0.25, from a label or annotation of a pod. Raises ValueError for other text.

    Users with the right to create pods write these texts: a negative amount would free capacity, and computing the
    exact value of 1e999999999 takes hours.
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
        """Return the relevant fields of a Node."""
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
        """The GPU model's name from the node's label, without the device plugin's suffixes; empty: unknown."""
        product = self.labels.get(PRODUCT_LABEL, "")
        return product.removesuffix("-SHARED").partition("-MIG-")[0]

    @property
    def gpu_memory_bytes(self) -> int | None:
        """The memory of one GPU in bytes; None if the label is missing."""
        return self.mebibytes(MEMORY_LABEL)

    @property
    def gpu_count(self) -> int | None:
        """The number of GPUs of the node; None if the label is missing."""
        return self.number(COUNT_LABEL)

    def number(self, label: str) -> int | None:
        """Return the number in a label; None if the label is missing or is not a number."""
        written = self.labels.get(label, "")
        return int(written) if written.isdecimal() else None

    def mebibytes(self, label: str) -> int | None:
        """Return a label in MiB as bytes; None under the same conditions as in `number`."""
        mib = self.number(label)
        return mib * 2**20 if mib is not None else None


@dataclass(frozen=True)
class ClusterPod:
    """A pod that has not finished. `node` is empty until the scheduler binds the pod."""

    name: str
    namespace: str
    node: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    requests: Amounts = field(default_factory=dict)
    """The requests of the whole pod, as the scheduler counts them."""
    phase: str = "Running"

    @classmethod
    def of(cls, pod: Mapping[str, Any], requests: Mapping[str, Any]) -> ClusterPod:
        """Return the relevant fields of a Pod. ``requests``: the quantities that the whole pod requests."""
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
    """A queue of KAI Scheduler (scheduling.run.ai/v2). Amounts are numbers of GPUs; None: unlimited."""

    name: str
    parent: str = ""
    quota: float | None = 0.0
    """The number of GPUs that the queue deserves."""
    limit: float | None = 0.0
    """The maximum number of GPUs."""
    allocated: float = 0.0
    allocated_non_preemptible: float = 0.0

    @classmethod
    def of(cls, queue: Mapping[str, Any]) -> ClusterQueue:
        """Return the relevant fields of a Queue."""
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
    """The attributes without their types: ``{"uuid": "GPU-.."}``."""
    capacity: Amounts = field(default_factory=dict)
    shared: bool = False
    """Whether several claims can each have a part of the device."""
    tainted: bool = False
    """Whether a taint excludes new claims."""
    counters: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """The device's consumption of the slice's counters, by counter set and counter."""
    defaults: Amounts = field(default_factory=dict)
    """The default consumption of a capacity that a claim does not name."""


@dataclass(frozen=True)
class ClusterSlice:
    """A ResourceSlice of one node."""

    driver: str
    pool: str
    node: str
    devices: tuple[ClusterDevice, ...] = ()
    generation: int = 0
    counters: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """The counters that the pool's devices share, by counter set and counter."""

    @classmethod
    def of(cls, slice_: Mapping[str, Any]) -> ClusterSlice:
        """Return the relevant fields of a ResourceSlice."""
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
    """A device, or a part of a device, that is allocated to a claim."""

    driver: str
    pool: str
    device: str
    consumed: Amounts = field(default_factory=dict)
    """The consumption of the device's capacity; empty: the whole device."""


@dataclass(frozen=True)
class ClusterClaim:
    """A ResourceClaim. Devices for monitoring (adminAccess) are not allocated and are left out."""

    name: str
    namespace: str
    devices: tuple[ClaimedDevice, ...] = ()
    pods: frozenset[str] = frozenset()
    """The names of the pods in its namespace for which it is allocated."""

    @classmethod
    def of(cls, claim: Mapping[str, Any]) -> ClusterClaim:
        """Return the relevant fields of a ResourceClaim."""
        status = claim.get("status") or {}
        allocation = status.get("allocation") or {}
        users = [user for user in status.get("reservedFor") or [] if user.get("resource") == "pods"]
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
    """A snapshot of a cluster.

    ``nodes``: the nodes on which the hub's servers can run. ``pods``: all unfinished pods on these nodes, in all
    namespaces, and pods that are not bound yet.
    """

    nodes: tuple[ClusterNode, ...] = ()
    pods: tuple[ClusterPod, ...] = ()
    queues: tuple[ClusterQueue, ...] = ()
    slices: tuple[ClusterSlice, ...] = ()
    claims: tuple[ClusterClaim, ...] = ()
    taken_at: float = 0.0
    """Seconds since the epoch."""

    def without(self, pods: Set[tuple[str, str]]) -> ClusterFacts:
        """Return the facts without some pods, given by namespace and name. Other effects of their end are unknown."""
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
        by_node: dict[str, list[ClusterPod]] = {}
        for pod in self.pods:
            if pod.node:
                by_node.setdefault(pod.node, []).append(pod)
        return by_node

    def pods_on(self, node: str) -> list[ClusterPod]:
        """Return the pods bound to a node."""
        return self._pods_by_node.get(node, [])

    @cached_property
    def _requested(self) -> dict[tuple[str, str], int]:
        totals: dict[tuple[str, str], int] = {}
        for pod in self.pods:
            if pod.node:
                for resource, amount in pod.requests.items():
                    totals[pod.node, resource] = totals.get((pod.node, resource), 0) + amount
        return totals

    def requested(self, node: str, resource: str) -> int:
        """Return the amount of a resource that the pods on a node request."""
        return self._requested.get((node, resource), 0)

    def free(self, node: ClusterNode, resource: str) -> int:
        """Return the free amount of a resource on a node, at least 0."""
        return max(0, node.allocatable.get(resource, 0) - self.requested(node.name, resource))


def _vouched(metadata: Mapping[str, Any], part: str) -> Mapping[str, str]:
    """Return the labels or annotations of a pod, without ours for a mirror pod, because its node has written them."""
    given: Mapping[str, str] = metadata.get(part) or {}
    if is_mirror(metadata):
        return {name: text for name, text in given.items() if not name.startswith(PREFIX)}
    return given


def _bound(value: float) -> float | None:
    """Return a queue's number of GPUs; None for -1, which means unlimited. The default is 0."""
    return None if value == -1 else float(value)


def _gpus(status: Mapping[str, Any] | None) -> float:
    """Return the number of GPUs in a queue's status, over all resource names and including fractions."""
    return float(quantity((status or {}).get("nvidia.com/gpu", 0)))


def _device(device: Mapping[str, Any]) -> ClusterDevice:
    capacity: Mapping[str, Any] = device.get("capacity") or {}
    policies = {name: (value.get("requestPolicy") or {}).get("default") for name, value in capacity.items()}
    return ClusterDevice(
        name=device["name"],
        attributes={name: next(iter(typed.values())) for name, typed in (device.get("attributes") or {}).items()},
        capacity=amounts({name: value["value"] for name, value in capacity.items()}),
        shared=bool(device.get("allowMultipleAllocations")),
        tainted=any(taint.get("effect") in ("NoSchedule", "NoExecute") for taint in device.get("taints") or []),
        counters=dict(_counters(device.get("consumesCounters") or [], "counterSet")),
        defaults=amounts({name: default for name, default in policies.items() if default is not None}),
    )


def _counters(sets: Iterable[Mapping[str, Any]], named: str) -> Iterator[tuple[tuple[str, str], int]]:
    for counter_set in sets:
        for name, counter in (counter_set.get("counters") or {}).items():
            yield (counter_set[named], name), int(quantity(counter["value"]))


PodSpec: TypeAlias = dict[str, Any]
"""A pod's manifest as plain data."""

_Options = TypeVar("_Options", bound=LayerOptions)


@dataclass(frozen=True)
class Tenant:
    """The user of a notebook server."""

    user: str
    server: str = ""
    """The name of the server; empty for the default server."""
    uid: int = 0
    """The user ID of the server's processes; not used in a cluster."""
    quota: str = ""
    """The account to which the share is charged, see `quota.Account`; empty: there are no quotas."""
    user_units: int | None = None
    """The maximum units of 1 % of the user's sessions in that quota in total on one GPU; None: unlimited."""

    @property
    def session(self) -> str:
        """The ID of the session."""
        return session_id(self.user, self.server)


class LayerCannot(ValueError):
    """The layer cannot give a server this share. The message is a sentence for the admin."""


ENOUGH = 10**6
"""The number of servers that fit if there is no limit."""


@dataclass(frozen=True)
class LayerRequest:
    """A request for one share to a layer with its own scheduler, which chooses the node and the GPU for the pod."""

    tenant: Tenant
    template: Template
    options: LayerOptions
    """The options of the layer, see `LayersFile.options_of`."""
    facts: ClusterFacts = field(default_factory=ClusterFacts)
    """The snapshot, with ``nodes`` limited to the rule's nodes on which the server can run."""
    rule: LayerRule | None = None
    """The rule of `layers.yaml` with the options, which restricts the pod to the rule's nodes. None if there is no
    rule.
    """

    def options_as(self, kind: type[_Options]) -> _Options:
        """Return the options of the layer, which must be of this type."""
        assert isinstance(self.options, kind)
        return self.options

    @property
    def gpu(self) -> TemplateGpu:
        """The GPU part of the template. Raises ValueError for a template without a GPU."""
        if self.template.gpu is None:
            raise ValueError(f"template {self.template.name} asks for no GPU: there is nothing to share")
        return self.template.gpu

    @property
    def models(self) -> tuple[str, ...]:
        """The patterns of suitable GPU model names, from the template or else the rule; empty: any model."""
        return self.gpu.models or (self.rule.models if self.rule is not None else ())

    def suitable_nodes(self) -> list[ClusterNode]:
        """Return the nodes with a suitable GPU model, including nodes that accept no new pods now."""
        return [node for node in self.facts.nodes if self.accepts(node.model)]

    def accepts(self, model: str) -> bool:
        """Return whether a GPU with this model name is suitable."""
        return not self.models or any(matches(model, pattern) for pattern in self.models)

    def rule_labels(self) -> dict[str, Sequence[str]]:
        """Return the labels that restrict a pod to the nodes of the layer's rule in `layers.yaml`."""
        return {name: [value] for name, value in self.rule.nodes.items()} if self.rule is not None else {}

    def node_labels(self) -> dict[str, Sequence[str]]:
        """Return the labels that restrict a pod to suitable nodes. Raises LayerCannot if no node is suitable."""
        labels = self.rule_labels()
        if not self.models:
            return labels
        products = sorted(
            {node.labels[PRODUCT_LABEL] for node in self.suitable_nodes() if PRODUCT_LABEL in node.labels}
        )
        if not products:
            raise LayerCannot(
                f"No node's label {PRODUCT_LABEL} matches {' or '.join(self.models)}. NVIDIA's GPU feature discovery "
                "sets that label."
            )
        return {**labels, PRODUCT_LABEL: products}

    def requested_memory(self, memory_bytes: int) -> int:
        """Return the memory in bytes that a server requests on a GPU with ``memory_bytes``."""
        gpu = self.gpu
        return resolve_bytes(gpu.memory.guarantee or f"{gpu.share.units}%", memory_bytes)

    def units_with_memory(self, node: ClusterNode) -> int:
        """Return the units that a server needs on a node's GPUs: its share, or more for its memory.

        A guarantee in bytes is ignored for a GPU of unknown memory.
        """
        units, guarantee = self.gpu.share.units, self.gpu.memory.guarantee
        if guarantee is None:
            return units
        whole = node.gpu_memory_bytes if not guarantee.endswith("%") else 10**6
        return max(units, -(-self.requested_memory(whole) * UNITS_PER_GPU // whole)) if whole else units

    def counted(
        self, nodes: Sequence[ClusterNode], free: Callable[[ClusterNode], int], most: Callable[[ClusterNode], int]
    ) -> LayerCapacity:
        """Return the capacity of nodes. ``free``: servers that fit on a node's free GPUs; ``most``: on all its GPUs."""
        open_nodes = [node for node in nodes if not node.unschedulable]
        by_node = {node.name: min(free(node), self._beside(node)) for node in open_nodes}
        at_most = {node.name: min(most(node), self._beside(node, empty=True)) for node in nodes}
        able = frozenset(node.name for node in open_nodes if at_most[node.name] > 0)
        return LayerCapacity(sum(by_node.values()), sum(at_most.values()), by_node=by_node, able=able)

    def resource_capacity(self, choice: ResourceChoice) -> LayerCapacity:
        """Return the capacity of a choice's nodes, by its resource."""
        capacity = self.counted(
            choice.nodes,
            lambda node: self.facts.free(node, choice.resource) // choice.amount,
            lambda node: node.allocatable.get(choice.resource, 0) // choice.amount,
        )
        return replace(capacity, profile=choice.profile)

    def _beside(self, node: ClusterNode, *, empty: bool = False) -> int:
        """Return the number of the template's servers that fit on a node by its CPU, memory and number of pods.

        ``empty``: assume that no pod runs there. Resources that a node does not report do not limit the number.
        """
        cpu, memory = self.template.resources.cpu, self.template.resources.memory
        # a limit without a request is requested in full
        cores = cpu.guarantee if cpu.guarantee is not None else cpu.limit
        needed = {
            "cpu": whole_millicores(cores or 0.0),
            "memory": (memory.guarantee if memory.guarantee is not None else memory.limit) or 0,
        }
        facts = self.facts
        fit = ENOUGH
        for resource, amount in needed.items():
            if amount > 0 and resource in node.allocatable:
                fit = min(fit, (node.allocatable[resource] if empty else facts.free(node, resource)) // amount)
        if "pods" in node.allocatable:
            fit = min(fit, max(0, node.allocatable["pods"] - (0 if empty else len(facts.pods_on(node.name)))))
        return fit


@dataclass(frozen=True)
class LayerCapacity:
    """A layer's capacity for servers of one template, from published facts."""

    servers: int = 0
    """The number of servers that could start now, by GPU, CPU, memory and pods of the nodes."""
    at_most: int = 0
    """The number of servers that an empty cluster could run; 0: waiting is useless."""
    limited_by: str = ""
    """Another limit, such as a queue's, as a clause; empty: none."""
    by_node: Mapping[str, int] = field(default_factory=dict, compare=False)
    """The number of servers that each node could start now, without other limits."""
    able: frozenset[str] = field(default=frozenset(), compare=False)
    """The nodes that accept new pods and could start a server if they were empty."""
    profile: MigProfile | None = None
    """The profile of the MIG device that a server gets; None if it gets none."""


@dataclass(frozen=True)
class ResourceChoice:
    """The extended resource with which a device plugin gives a server its share, and the nodes with this resource."""

    resource: str
    amount: int
    nodes: Sequence[ClusterNode]
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The labels of these nodes, in addition to those of `LayerRequest.node_labels`."""
    profile: MigProfile | None = None
    """The profile of the MIG device; None: no MIG device."""


@dataclass(frozen=True)
class PodChange:
    """Additions to a pod, which replace entries of the same name."""

    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    """Limits of the notebook server's container; requests of these resources equal the limits."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of the notebook server's container."""
    node_labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Allowed values of each label of a node."""
    node: str = ""
    """The required node; empty: any."""
    scheduler: str = ""
    """The scheduler; empty: the pod's own."""
    priority_class: str = ""
    """The priority class; empty: the pod's own."""
    claim_templates: Mapping[str, str] = field(default_factory=dict)
    """ResourceClaimTemplates for claims of the notebook server's container, by the claim's name in the pod."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """ResourceClaims of the pod that no container names, by the claim's name in the pod."""
    volumes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Sources of volumes by name."""
    mounts: Sequence[Mapping[str, Any]] = ()
    """Mounts of the volumes in the notebook server's container."""

    def apply(self, pod: PodSpec) -> PodSpec:
        """Return the pod with these additions. Raises ValueError for a pod without containers."""
        metadata, spec = pod.get("metadata") or {}, pod.get("spec") or {}
        notebook = notebook_container(spec)
        changed = self._container(notebook)
        named = {
            "annotations": {**(metadata.get("annotations") or {}), **self.annotations},
            "labels": {**(metadata.get("labels") or {}), **self.labels},
        }
        new_spec = {
            **spec,
            "containers": [changed if container is notebook else container for container in spec["containers"]],
        }
        if self.node_labels:
            new_spec["affinity"] = with_node_labels(spec.get("affinity"), self.node_labels)
        if self.node:
            new_spec["affinity"] = pinned(new_spec.get("affinity"), self.node)
        if self.scheduler:
            new_spec["schedulerName"] = self.scheduler
        if self.priority_class:
            new_spec["priorityClassName"] = self.priority_class
        claims = [{"name": name, "resourceClaimTemplateName": of} for name, of in self.claim_templates.items()]
        claims += [{"name": name, "resourceClaimName": of} for name, of in self.claims.items()]
        if claims:
            new_spec["resourceClaims"] = _replaced(spec.get("resourceClaims") or [], claims)
        if self.volumes:
            volumes = [{"name": name, **source} for name, source in self.volumes.items()]
            new_spec["volumes"] = _replaced(spec.get("volumes") or [], volumes)
        return {**pod, "metadata": {**metadata, **named}, "spec": new_spec}

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


def servers_by_parts(whole: int, used: Iterable[Fraction], each: Fraction) -> int:
    """Return the number of servers that fit on GPUs. ``each``: the GPUs of one server, a fraction or whole GPUs.

    ``whole``: the number of unused GPUs; ``used``: the used part of each other GPU.
    """
    if each >= 1:
        return max(0, whole) // int(each)
    return max(0, whole) * int(1 / each) + sum(max(0, int((1 - part) / each)) for part in used)


def with_node_labels(affinity: Mapping[str, Any] | None, labels: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return a pod's affinity that also requires one of the values for each of these node labels."""
    added = [{"key": key, "operator": "In", "values": list(values)} for key, values in labels.items()]
    return required_of_node(affinity, "matchExpressions", added)


def _replaced(there: Iterable[Mapping[str, Any]], added: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a list of named parts with the added parts, which replace parts of the same name."""
    names = {part["name"] for part in added}
    return [*(dict(part) for part in there if part.get("name") not in names), *(dict(part) for part in added)]
