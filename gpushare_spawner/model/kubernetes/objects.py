"""Names and contents of the Kubernetes objects that the agent, spawner, service and chart share. Pure data.

- The ConfigMap with a node's report.
- Devices and claims of dynamic resource allocation (resource.k8s.io/v1): the agent publishes each GPU as one device
  with consumable capacity, and the spawner makes one claim for each session.
- Extended resources, the alternative: one for each GPU of a node. Nodes of other layers have one for observers.
- The downwardAPI volume with a pod's annotations as files, for a notebook server of another layer, which can be without
  an agent. The kubelet updates the files after a change: usually at once, always within its sync period of about 1 min.
- Node affinity: a pod is pinned by the node's name, in every term of the required node affinity.
- The rules by which the cluster's scheduler decides whether a node's taints and labels accept a pod.
- Mirror pods, the API server's copies of the kubelet's static pods.

Annotations of pods are in `annotations`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gpushare_spawner.model.controls import Cordon
from gpushare_spawner.model.kubernetes.annotations import (
    EFFECTIVE_SHARE,
    EXEMPTION,
    GPU_COUNT,
    KEEP,
    MESSAGES,
    NOTICE,
    PREFIX,
    SESSION,
    SHARE,
    TEMPLATE,
    TIER,
    TIER_SINCE,
)
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.share import UNITS_PER_GPU, Share

REPORT_COMPONENT_LABEL = "app.kubernetes.io/component"
REPORT_COMPONENT = "gpushare-report"
REPORT_SELECTOR = f"{REPORT_COMPONENT_LABEL}={REPORT_COMPONENT}"
"""Label selector: the reports' ConfigMaps, in the hub's namespace."""
REPORT_KEY = "report.json"
"""Key in a report's ConfigMap that has `model.report.Report` as JSON."""
PUBLISHED_AT = PREFIX + "published-at"
"""Annotation of a report's ConfigMap: seconds since the epoch (UTC)."""
REPORT_REFRESH_SECONDS = 60.0
"""Maximum interval between two publications of an agent's report, even if nothing has changed."""
REPORT_STALE_SECONDS = 120.0
"""Age above which a report is stale: the hub places nothing on its node (spawner/kubernetes/cluster/snapshot.py), and
the service treats its agent as unreachable (service/kubernetes/cluster.py)."""

CORDON = PREFIX + "cordon"
"""Annotation of a report's ConfigMap, written by the service: JSON of the node's `model.controls.Cordon`. For a GPU's
cordon, a dash and the GPU's UUID are appended to this name."""

_MAX_NAME = 253  # an object's name is a DNS subdomain (RFC 1123)
_DIGEST = 8


def report_name(node: str) -> str:
    """Return the name of a node's report ConfigMap.

    Node names are usually valid object names. An invalid or too long name is made valid, with a digest that
    distinguishes it from others.
    """
    name = f"{REPORT_COMPONENT}-{node}"
    valid = re.sub(r"[^a-z0-9.-]+", "-", name.lower())
    # a label of a DNS name must not be empty, or start or end with '-'
    valid = re.sub(r"-*\.[.-]*", ".", valid).strip(".-")
    if valid == name and len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(node.encode()).hexdigest()[:_DIGEST]
    return f"{valid[: _MAX_NAME - _DIGEST - 1].rstrip('.-')}-{digest}"


def cordon_name(gpu: str) -> str:
    """Return the name of the annotation for a GPU's cordon (UUID) or the node's cordon (empty)."""
    return f"{CORDON}-{gpu}" if gpu else CORDON


def cordon_annotations(cordons: Iterable[Cordon]) -> dict[str, str]:
    """Return these cordons as annotations."""
    return {cordon_name(cordon.gpu): cordon.model_dump_json(exclude_defaults=True) for cordon in cordons}


def cordons_of(annotations: Mapping[str, str] | None) -> tuple[Cordon, ...]:
    """Return the cordons in the annotations of a report's ConfigMap. Raises pydantic.ValidationError."""
    return tuple(
        Cordon.model_validate_json(text)
        for name, text in sorted((annotations or {}).items())
        if name == CORDON or name.startswith(f"{CORDON}-")
    )


def read_report(config_map: Mapping[str, Any]) -> Report:
    """Return the report of a ConfigMap, with the cordons of its annotations. Raises pydantic.ValidationError.

    The annotations are authoritative: the cordons in the agent's report can be older.
    """
    report = Report.model_validate_json((config_map.get("data") or {}).get(REPORT_KEY) or "")
    return report.with_cordons(cordons_of(config_map["metadata"].get("annotations")))


def misplaced_report(config_map: str, report: Report) -> str | None:
    """Return why a report is rejected, as a sentence, or None if it is in its own node's ConfigMap.

    `config_map` is the ConfigMap's name. The API server allows each agent to write only its own node's ConfigMap, but
    with any content. So the name identifies the node, not the content.
    """
    expected = report_name(report.node)
    if config_map == expected:
        return None
    return f"the ConfigMap {config_map} has a report of node {report.node}, whose ConfigMap is {expected}"


def written_report(report: Report) -> str:
    """Return a report as text for its ConfigMap; `Report.model_validate_json` reads it.

    Default values are omitted: a ConfigMap is limited to 1 MiB, and the API server sends every report to every hub.
    """
    content = report.model_dump(mode="json", exclude_defaults=True)
    return json.dumps({"version": report.version, **content}, separators=(",", ":"), ensure_ascii=False)


DRIVER = PREFIX.rstrip("/")
"""The driver's name, a DNS subdomain. It is also the domain of its devices' attributes."""
DEVICE_CLASS = DRIVER
"""The DeviceClass that selects the driver's devices. The chart creates it."""
CLAIMS_API = "/apis/resource.k8s.io/v1"
"""API path. Available in Kubernetes 1.34 and later."""
UNITS_CAPACITY = "units"
"""Capacity of a device, in units of 1 %."""
MEMORY_CAPACITY = "memory"
"""Capacity of a device, in bytes."""
UUID_ATTRIBUTE = "uuid"
"""Attribute of a device with the GPU's UUID. CEL expressions have no access to a device's name."""
POD_CLAIM = "gpushare"
"""The name of the claim in ``pod.spec.resourceClaims``."""

_MEBIBYTE = 2**20
_DEVICE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # a DNS label


def device_name(uuid: str) -> str:
    """Return the name of a GPU's device.

    The scheduler accounts for claims by this name, so it must not depend on the GPU's index, which can change.
    """
    name = uuid.lower()
    return name if _DEVICE_NAME.fullmatch(name) else f"gpu-{_digest(uuid)}"


def slice_name(node: str) -> str:
    """Return the name of the ResourceSlice with a node's GPUs."""
    name = f"{node}-{DRIVER}"
    return name if len(name) <= _MAX_NAME else f"{node[: _MAX_NAME - len(DRIVER) - 18]}-{_digest(node)}-{DRIVER}"


def claim_name(pod: str, token: str) -> str:
    """Return the name of a session's claim. `token` distinguishes spawns with the same pod name."""
    return f"{pod[: _MAX_NAME - len(token) - 1]}-{token}"


def claim_folder(namespace: str, claim: str) -> str:
    """Return the name of the folder, within the agent's folder, with the sockets of a claim's session.

    Both the spawner and the agent compute it, because the pod names the folder before the claim is prepared.
    """
    return _digest(f"{namespace}/{claim}")


def capacity_of(units: int, gpu_memory_bytes: int) -> dict[str, str]:
    """Return a device's capacity for some units of its GPU: the units and a proportional amount of memory."""
    mebibytes = gpu_memory_bytes * units // UNITS_PER_GPU // _MEBIBYTE
    return {UNITS_CAPACITY: str(units), MEMORY_CAPACITY: f"{mebibytes}Mi"}


def claim_spec(device_class: str, share: Share, memory_by_gpu: Mapping[str, int]) -> dict[str, Any]:
    """Return the spec of a claim for a share of some GPUs. `memory_by_gpu`: bytes by GPU UUID, in the share's order."""
    requests = [
        {
            "name": f"gpu-{number}",
            "exactly": {
                "deviceClassName": device_class,
                "capacity": {"requests": capacity_of(units, memory)},
                "selectors": [{"cel": {"expression": _is_gpu(uuid)}}],
            },
        }
        for number, ((uuid, memory), units) in enumerate(zip(memory_by_gpu.items(), share.each, strict=True))
    ]
    return {"devices": {"requests": requests}}


def has_claim(spec: Mapping[str, Any]) -> bool:
    """Return whether a pod's spec names the claim of a session."""
    return any(claim.get("name") == POD_CLAIM for claim in spec.get("resourceClaims") or [])


def _is_gpu(uuid: str) -> str:
    # a missing device attribute is an error that aborts the whole allocation, so the driver is compared first
    driver, value = json.dumps(DRIVER), json.dumps(uuid)
    return f"device.driver == {driver} && device.attributes[{driver}].{UUID_ATTRIBUTE} == {value}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


SESSION_FILES_FOLDER = "/var/run/gpushare-session"
"""The mount point of the volume."""
SESSION_FILES = {
    name: name.removeprefix(PREFIX)
    for name in (
        SESSION, TEMPLATE, SHARE, GPU_COUNT, TIER, TIER_SINCE, EFFECTIVE_SHARE, NOTICE, KEEP, EXEMPTION, MESSAGES,
    )
}  # fmt: skip
"""File names by annotation, for annotations that the user may see. The file for an absent annotation is empty."""


def session_files_volume() -> dict[str, Any]:
    """Return the source of the volume."""
    items = [
        {"path": file, "fieldRef": {"fieldPath": f"metadata.annotations['{name}']"}}
        for name, file in SESSION_FILES.items()
    ]
    return {"downwardAPI": {"items": items}}


RESOURCE_PREFIX = PREFIX + "gpu-"
"""Prefix of the extended resources. There is one per physical GPU, so the scheduler places all units of a share on one
GPU."""

OBSERVER = PREFIX + "observer"
"""The extended resource of an agent that only observes. A pod that requests one gets a socket and the library."""


def resource_name(gpu_index: int) -> str:
    """Return the extended resource for the node's GPU with this index."""
    if gpu_index < 0:
        raise ValueError(f"a GPU's index is 0 or more, not {gpu_index}")
    return f"{RESOURCE_PREFIX}{gpu_index}"


def gpu_index_of(resource: str) -> int | None:
    """Return the GPU index of an extended resource (the inverse of `resource_name`); None for other resources."""
    digits = resource.removeprefix(RESOURCE_PREFIX)
    if digits == resource or not re.fullmatch(r"0|[1-9]\d*", digits, re.ASCII):
        return None
    return int(digits)


def resource_limits(share: Share, gpu_indices: Iterable[int], unit_size: int = 1) -> dict[str, str]:
    """Return the resource limits of a notebook container: the devices of each of its GPUs, in the share's order.

    `unit_size`: share units per device of the plugin. A share that is not a multiple of it is rounded up, because
    otherwise it would promise units that the scheduler has not reserved.
    """
    if unit_size < 1:
        raise ValueError(f"the unit size is 1 share unit or more, not {unit_size}")
    each = zip(gpu_indices, share.each, strict=True)
    return {resource_name(index): str(-(-units // unit_size)) for index, units in each}


HOSTNAME_LABEL = "kubernetes.io/hostname"
"""A node label that admins use to pin servers. Its value can differ from the node's name, so sessions are not pinned
with it; pods of earlier releases are."""

NAME_FIELD = "metadata.name"
"""The only field of a node that an affinity term can match (kubernetes pkg/apis/core/validation)."""

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def pinned(affinity: Mapping[str, Any] | None, node: str) -> dict[str, Any]:
    """Return a pod's affinity, restricted to one node."""
    return required_of_node(affinity, "matchFields", [_field("In", node)])


def excluding(affinity: Mapping[str, Any] | None, nodes: Iterable[str]) -> dict[str, Any]:
    """Return a pod's affinity that also excludes ``nodes``, at least one."""
    # the API server accepts only one value per field (kubernetes pkg/apis/core/validation)
    return required_of_node(affinity, "matchFields", [_field("NotIn", node) for node in sorted(nodes)])


def node_of(spec: Mapping[str, Any]) -> str:
    """Return the node that a pod is on, or is pinned to; empty if several are possible."""
    if spec.get("nodeName"):
        return str(spec["nodeName"])
    node_affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    named = {
        value
        for term in (node_affinity.get(_REQUIRED) or {}).get("nodeSelectorTerms") or []
        for field in term.get("matchFields") or []
        if field.get("key") == NAME_FIELD and field.get("operator") == "In"
        for value in field.get("values") or []
    }
    if len(named) == 1:
        return str(named.pop())
    return str((spec.get("nodeSelector") or {}).get(HOSTNAME_LABEL) or "")


def _field(operator: str, node: str) -> dict[str, Any]:
    return {"key": NAME_FIELD, "operator": operator, "values": [node]}


def required_of_node(
    affinity: Mapping[str, Any] | None, field: str, conditions: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a pod's affinity with further conditions on its node. ``field``: matchFields or matchExpressions.

    Terms are alternatives, so the conditions are added to each of them.
    """
    affinity = affinity or {}
    node_affinity = affinity.get("nodeAffinity") or {}
    required = node_affinity.get(_REQUIRED) or {}
    terms = [
        {**term, field: [*(term.get(field) or []), *conditions]} for term in required.get("nodeSelectorTerms") or [{}]
    ]
    return {**affinity, "nodeAffinity": {**node_affinity, _REQUIRED: {**required, "nodeSelectorTerms": terms}}}


_KEEP_OUT = ("NoSchedule", "NoExecute")
"""Taint effects that the scheduler enforces; PreferNoSchedule is only a preference."""

_PASSING = (
    "node.kubernetes.io/",
    "node.cloudprovider.kubernetes.io/",
    "startup-taint.cluster-autoscaler.kubernetes.io/",
    "status-taint.cluster-autoscaler.kubernetes.io/",
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/",
    "node.cilium.io/agent-not-ready",
    "ebs.csi.aws.com/agent-not-ready",
    "efs.csi.aws.com/agent-not-ready",
    "cloud.google.com/impending-node-termination",
)
"""Key prefixes of temporary taints. Kubernetes, autoscalers (cluster-autoscaler, Karpenter), cloud providers, and
network and volume agents set them while a node is not ready, is being drained or is being added. Spawns wait for such a
node, or try another. Source: the documentation of each."""


@dataclass(frozen=True)
class NodeFacts:
    """The labels and lasting taints of a node, which decide whether it accepts a pod regardless of free capacity."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[tuple[str, str, str], ...] = ()
    """Key, value and effect of each taint that is not temporary."""

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> NodeFacts:
        """Read a node from the API server's JSON."""
        metadata, taints = node["metadata"], (node.get("spec") or {}).get("taints") or []
        lasting = (
            (taint["key"], taint.get("value") or "", taint["effect"])
            for taint in taints
            if taint.get("effect") in _KEEP_OUT and not taint["key"].startswith(_PASSING)
        )
        return cls(metadata["name"], dict(metadata.get("labels") or {}), tuple(lasting))


@dataclass(frozen=True)
class PodConstraints:
    """A pod's conditions on node labels, and its tolerations. Equal pods have equal constraints."""

    written: str
    """JSON: `nodeSelector`, `terms` (alternatives of required node affinity) and `tolerations` as in a pod's spec."""

    @classmethod
    def of(cls, node_selector: Mapping[str, str], terms: list[Any], tolerations: list[Any]) -> PodConstraints:
        """Build the constraints from three parts of a pod's spec, in the API server's form."""
        parts = {"nodeSelector": dict(node_selector), "terms": terms, "tolerations": tolerations}
        return cls(json.dumps(parts, sort_keys=True))

    @cached_property
    def _parts(self) -> Mapping[str, Any]:
        parts: Mapping[str, Any] = json.loads(self.written)
        return parts

    def accept(self, node: NodeFacts) -> bool:
        """Return whether the node accepts the pod, regardless of free capacity."""
        if any(node.labels.get(label) != value for label, value in self._parts["nodeSelector"].items()):
            return False
        terms = self._parts["terms"]
        if terms and not any(_matches(term, node) for term in terms):
            return False
        return all(
            any(_tolerates(toleration, taint) for toleration in self._parts["tolerations"]) for taint in node.taints
        )

    def rejected(self, nodes: Iterable[NodeFacts]) -> frozenset[str]:
        """Return the names of the nodes that `accept` rejects. Nodes with equal relevant labels are checked once."""
        named = {
            expression["key"] for term in self._parts["terms"] for expression in term.get("matchExpressions") or []
        }
        keys = sorted({*self._parts["nodeSelector"], *named})
        by_name = any(term.get("matchFields") for term in self._parts["terms"])
        judged: dict[tuple[Any, ...], bool] = {}
        rejected = []
        for node in nodes:
            alike = (node.taints, *map(node.labels.get, keys), node.name if by_name else None)
            accepted = judged.get(alike)
            if accepted is None:
                accepted = judged[alike] = self.accept(node)
            if not accepted:
                rejected.append(node.name)
        return frozenset(rejected)


def _matches(term: Mapping[str, Any], node: NodeFacts) -> bool:
    expressions, fields = term.get("matchExpressions") or [], term.get("matchFields") or []
    # a term without a condition matches no node (kubernetes component-helpers/scheduling/corev1/nodeaffinity)
    return bool(expressions or fields) and (
        all(_satisfies(expression, node.labels) for expression in expressions)
        and all(_satisfies(field, {NAME_FIELD: node.name}) for field in fields)
    )


def _satisfies(condition: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(condition["key"]), condition.get("values") or []
    match condition["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            with contextlib.suppress(ValueError, IndexError):
                difference = int(value or "") - int(values[0])
                return difference > 0 if operator == "Gt" else difference < 0
            return False
    # an operator of a later Kubernetes version: the scheduler decides
    return True


def _tolerates(toleration: Mapping[str, Any], taint: tuple[str, str, str]) -> bool:
    key, value, effect = taint
    if toleration.get("effect") not in (None, "", effect):
        return False
    operator = toleration.get("operator") or "Equal"
    if operator == "Equal":
        return toleration.get("key") == key and (toleration.get("value") or "") == value
    # operators of later versions, like Gt, compare values: the scheduler decides
    return not toleration.get("key") or toleration["key"] == key


FINISHED = ("Failed", "Succeeded")
"""Phases of a pod after all its containers have ended and will not restart. Such a pod no longer holds resources."""

MIRROR = "kubernetes.io/config.mirror"
"""Annotation of a mirror pod. The API server allows a node to create only mirror pods (admission plugin
NodeRestriction), and no client to add or remove the annotation later."""


def is_mirror(metadata: Mapping[str, Any]) -> bool:
    """Return whether the metadata belongs to a pod that a node created.

    A node can set any labels and annotations on such a pod, so they do not describe sessions.
    """
    owners = metadata.get("ownerReferences") or ()
    return MIRROR in (metadata.get("annotations") or {}) or any(owner.get("kind") == "Node" for owner in owners)
