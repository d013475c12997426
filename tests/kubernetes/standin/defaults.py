"""What the API server makes of an object before it keeps it: defaults, canonical quantities, nothing empty."""

from __future__ import annotations

import base64
from typing import Any

from .errors import Undecodable
from .kinds import CLAIM_TEMPLATES, NODES, PODS, RESOURCE_CLAIMS, Kind
from .quantities import canonical

_POD = {
    "restartPolicy": "Always",
    "dnsPolicy": "ClusterFirst",
    "terminationGracePeriodSeconds": 30,
    "schedulerName": "default-scheduler",
    "serviceAccountName": "default",
    "securityContext": {},
    "enableServiceLinks": True,
    "priority": 0,
    "preemptionPolicy": "PreemptLowerPriority",
}
# maps and lists that are left out when they are empty; other empty objects mean something
_METADATA = ("labels", "annotations", "finalizers", "ownerReferences")
_POD_SPEC = ("nodeSelector", "tolerations", "volumes", "initContainers", "imagePullSecrets", "hostAliases")
_CONTAINER = ("command", "args", "env", "envFrom", "ports", "volumeMounts", "volumeDevices")
_DATA = ("data", "binaryData")


def fill_in(kind: Kind, item: dict[str, Any]) -> None:
    """Of a new or changed object."""
    _drop_nothing(item)
    _drop_empty(item["metadata"], _METADATA)
    if kind is PODS:
        _fill_in_pod(item)
    elif kind is NODES:
        item.setdefault("spec", {})
        for amounts in ("capacity", "allocatable"):
            _canonical_amounts(kind, item.get("status") or {}, amounts)
    elif kind.plural == "persistentvolumeclaims":
        spec = item.setdefault("spec", {})
        spec.setdefault("volumeMode", "Filesystem")
        _canonical_amounts(kind, spec.get("resources") or {}, "requests")
    elif kind is CLAIM_TEMPLATES:
        _fill_in_claim(item["spec"]["spec"])
    elif kind is RESOURCE_CLAIMS:
        _fill_in_claim(item["spec"])
    elif kind.plural == "secrets":
        item.setdefault("type", "Opaque")
        for key, value in item.pop("stringData", {}).items():
            item.setdefault("data", {})[key] = base64.b64encode(value.encode()).decode()
        _drop_empty(item, _DATA)
    elif kind.plural == "configmaps":
        _drop_empty(item, _DATA)
    elif kind.plural == "services":
        _fill_in_service(item.setdefault("spec", {}))


def _drop_nothing(value: Any) -> None:
    """A field that is null is none."""
    if isinstance(value, dict):
        for name in [name for name, inner in value.items() if inner is None]:
            del value[name]
        for inner in value.values():
            _drop_nothing(inner)
    elif isinstance(value, list):
        for inner in value:
            _drop_nothing(inner)


def _drop_empty(item: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if name in item and not item[name]:
            del item[name]


def _fill_in_pod(pod: dict[str, Any]) -> None:
    spec = pod.setdefault("spec", {})
    for name, value in _POD.items():
        spec.setdefault(name, dict(value) if isinstance(value, dict) else value)
    spec["serviceAccount"] = spec["serviceAccountName"]
    tolerations = spec.setdefault("tolerations", [])
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if not any(toleration.get("key") in (key, None) for toleration in tolerations):
            tolerations.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})
    _drop_empty(spec, _POD_SPEC)
    for volume in spec.get("volumes") or []:
        _fill_in_volume(volume)
    for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
        _fill_in_container(container)
    status = pod.get("status") or {}
    if status.get("podIP") and not status.get("podIPs"):
        status["podIPs"] = [{"ip": status["podIP"]}]


def _fill_in_claim(spec: dict[str, Any]) -> None:
    """kubernetes pkg/apis/resource/v1/defaults.go."""
    for request in (spec.get("devices") or {}).get("requests") or []:
        exactly = request.get("exactly")
        if exactly is not None:
            exactly.setdefault("allocationMode", "ExactCount")
            if exactly["allocationMode"] == "ExactCount":
                exactly.setdefault("count", 1)
            _canonical_amounts(RESOURCE_CLAIMS, exactly.get("capacity") or {}, "requests")


def _fill_in_volume(volume: dict[str, Any]) -> None:
    if len(volume) == 1:
        volume["emptyDir"] = {}
    for source in ("secret", "configMap", "projected", "downwardAPI"):
        if source in volume:
            volume[source].setdefault("defaultMode", 0o644)
    if "hostPath" in volume:
        volume["hostPath"].setdefault("type", "")


def _fill_in_container(container: dict[str, Any]) -> None:
    resources = container.setdefault("resources", {})
    for side in ("limits", "requests"):
        _canonical_amounts(PODS, resources, side)
    if resources.get("limits"):
        resources["requests"] = {**resources["limits"], **(resources.get("requests") or {})}
    _drop_empty(resources, ("limits", "requests"))
    image = (container.get("image") or "").rpartition("/")[2]
    latest = ":" not in image and "@" not in image
    for name, value in (
        ("terminationMessagePath", "/dev/termination-log"),
        ("terminationMessagePolicy", "File"),
        ("imagePullPolicy", "Always" if latest or image.endswith(":latest") else "IfNotPresent"),
    ):
        container.setdefault(name, value)
    for port in container.get("ports") or []:
        port.setdefault("protocol", "TCP")
    for entry in container.get("env") or []:
        _drop_empty(entry, ("value",))
    _drop_empty(container, _CONTAINER)


def _fill_in_service(spec: dict[str, Any]) -> None:
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    for port in spec.get("ports") or []:
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port.get("port"))


def _canonical_amounts(kind: Kind, parent: dict[str, Any], side: str) -> None:
    if not parent.get(side):
        return
    try:
        parent[side] = {name: canonical(amount) for name, amount in parent[side].items()}
    except ValueError as error:
        raise Undecodable(kind, f"{side}: {error}") from None
