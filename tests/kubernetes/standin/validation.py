"""What the API server checks before it keeps an object, and what it fills in: what our clients can get wrong."""

from __future__ import annotations

import re
from typing import Any

from .errors import ApiError, invalid
from .kinds import NODES, PODS, Kind
from .quantities import canonical, is_extended, quantity

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_ENV_NAME = re.compile(r"[ -<>-~]+")
_ANNOTATIONS_BYTES = 256 * 1024
_OBJECT_BYTES = 1536 * 1024
_DATA_BYTES = 1024 * 1024
# RFC 1123 subdomains are the rule; these kinds' names are DNS labels, or free path segments
_LABEL_NAMES = {"namespaces", "services"}
_FREE_NAMES = {"roles", "rolebindings", "clusterroles", "clusterrolebindings"}

Causes = list[tuple[str, str]]


def check(kind: Kind, item: dict[str, Any]) -> None:
    """Raises ApiError 422 that names every wrong field, or 400 for a field of the wrong type."""
    metadata = item["metadata"]
    causes: Causes = []
    _check_name(kind, metadata.get("name") or "", causes)
    _check_labels(metadata.get("labels") or {}, "metadata.labels", causes)
    _check_annotations(metadata.get("annotations") or {}, causes)
    if kind is PODS:
        _check_pod(item.get("spec") or {}, causes)
    if kind.plural == "configmaps":
        _check_data(item.get("data") or {}, causes)
    if causes:
        raise invalid(kind.kind, metadata.get("name") or "", causes)


def check_size(raw: bytes) -> None:
    if len(raw) > _OBJECT_BYTES:
        raise ApiError(500, "InternalError", "etcdserver: request is too large")


def fill_in(kind: Kind, item: dict[str, Any]) -> None:
    """Defaults of a new or changed object."""
    if kind is PODS:
        _fill_in_pod(item)
    elif kind is NODES:
        item.setdefault("spec", {})
        for amounts in ("capacity", "allocatable"):
            _canonical_amounts(item.get("status") or {}, amounts)
    elif kind.plural == "persistentvolumeclaims":
        _canonical_amounts((item.get("spec") or {}).get("resources") or {}, "requests")


def check_pod_update(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Almost nothing of a pod's spec can be changed."""
    if _fixed_spec(before["spec"]) != _fixed_spec(after["spec"]):
        message = (
            "Forbidden: pod updates may not change fields other than `spec.containers[*].image`, "
            "`spec.initContainers[*].image`, `spec.activeDeadlineSeconds`, `spec.tolerations` "
            "(only additions to existing tolerations), `spec.terminationGracePeriodSeconds`"
        )
        raise invalid("Pod", after["metadata"]["name"], [("spec", message)])


def _fixed_spec(spec: dict[str, Any]) -> dict[str, Any]:
    fixed = {name: value for name, value in spec.items() if name not in ("activeDeadlineSeconds", "tolerations")}
    for containers in ("containers", "initContainers"):
        if containers in fixed:
            fixed[containers] = [{**container, "image": ""} for container in fixed[containers]]
    return fixed


def _check_name(kind: Kind, name: str, causes: Causes) -> None:
    if not name:
        causes.append(("metadata.name", "Required value: name or generateName is required"))
    elif kind.plural in _FREE_NAMES:
        if name in (".", "..") or "/" in name or "%" in name:
            causes.append(("metadata.name", f"Invalid value: {name!r}: may not contain '/' or '%'"))
    elif kind.plural in _LABEL_NAMES:
        if not _LABEL.fullmatch(name):
            causes.append(("metadata.name", f"Invalid value: {name!r}: a lowercase RFC 1123 label is needed"))
    elif len(name) > 253 or not _SUBDOMAIN.fullmatch(name):
        causes.append(("metadata.name", f"Invalid value: {name!r}: a lowercase RFC 1123 subdomain is needed"))


def _is_qualified(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > 253 or not _SUBDOMAIN.fullmatch(prefix)):
        return False
    return bool(_QUALIFIED.fullmatch(name))


def _check_strings(values: Any, what: str) -> None:
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        # the server fails to read such an object at all
        message = f"unable to decode: json: cannot unmarshal into Go struct field ObjectMeta.{what} of type string"
        raise ApiError(400, "BadRequest", message)


def _check_labels(labels: Any, where: str, causes: Causes) -> None:
    _check_strings(labels, "metadata.labels")
    for key, value in labels.items():
        if not _is_qualified(key):
            causes.append((where, f"Invalid value: {key!r}: a qualified name is needed"))
        if not _LABEL_VALUE.fullmatch(value):
            causes.append((where, f"Invalid value: {value!r}: a valid label must be an empty string or consist of "
                           "alphanumeric characters, '-', '_' or '.', at most 63"))  # fmt: skip


def _check_annotations(annotations: Any, causes: Causes) -> None:
    _check_strings(annotations, "metadata.annotations")
    for key in annotations:
        if not _is_qualified(key.lower()):
            causes.append(("metadata.annotations", f"Invalid value: {key!r}: a qualified name is needed"))
    if sum(len(key) + len(value.encode()) for key, value in annotations.items()) > _ANNOTATIONS_BYTES:
        causes.append(("metadata.annotations", f"Too long: may not be more than {_ANNOTATIONS_BYTES} bytes"))


def _check_data(data: Any, causes: Causes) -> None:
    _check_strings(data, "data")
    if sum(len(value.encode()) for value in data.values()) > _DATA_BYTES:
        causes.append(("data", f"Too long: may not be more than {_DATA_BYTES} bytes"))


def _check_pod(spec: dict[str, Any], causes: Causes) -> None:
    containers = spec.get("containers") or []
    if not containers:
        causes.append(("spec.containers", "Required value"))
    volumes = {volume.get("name") for volume in spec.get("volumes") or []}
    if len(volumes) != len(spec.get("volumes") or []):
        causes.append(("spec.volumes", "Duplicate value"))
    _check_labels(spec.get("nodeSelector") or {}, "spec.nodeSelector", causes)
    names = set()
    for list_name in ("containers", "initContainers"):
        for number, container in enumerate(spec.get(list_name) or []):
            where = f"spec.{list_name}[{number}]"
            name = container.get("name") or ""
            if not _LABEL.fullmatch(name):
                causes.append((f"{where}.name", f"Invalid value: {name!r}: a lowercase RFC 1123 label is needed"))
            if name in names:
                causes.append((f"{where}.name", f"Duplicate value: {name!r}"))
            names.add(name)
            if not container.get("image"):
                causes.append((f"{where}.image", "Required value"))
            _check_env(container, where, causes)
            for mount in container.get("volumeMounts") or []:
                if mount.get("name") not in volumes:
                    causes.append((f"{where}.volumeMounts[0].name", f"Not found: {mount.get('name')!r}"))
            _check_resources(container.get("resources") or {}, f"{where}.resources", causes)


def _check_env(container: dict[str, Any], where: str, causes: Causes) -> None:
    for entry in container.get("env") or []:
        if not _ENV_NAME.fullmatch(entry.get("name") or ""):
            causes.append((f"{where}.env[0].name", f"Invalid value: {entry.get('name')!r}"))
        if not isinstance(entry.get("value", ""), str):
            message = "unable to decode: json: cannot unmarshal into Go struct field EnvVar.value of type string"
            raise ApiError(400, "BadRequest", message)


def _check_resources(resources: dict[str, Any], where: str, causes: Causes) -> None:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for side, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            number = quantity(amount)
            if number < 0:
                causes.append((f"{where}.{side}[{name}]", "Invalid value: must be greater than or equal to 0"))
            if is_extended(name) and number != number.to_integral_value():
                causes.append((f"{where}.{side}[{name}]", f"Invalid value: {amount!r}: must be an integer"))
    for name, amount in requests.items():
        if is_extended(name) and name not in limits:
            causes.append((f"{where}.limits", "Required value: Limit must be set for non overcommitable resources"))
        elif is_extended(name) and quantity(limits[name]) != quantity(amount):
            causes.append((f"{where}.requests", f"Invalid value: {amount!r}: must be equal to {name} limit"))
        elif name in limits and quantity(limits[name]) < quantity(amount):
            causes.append(
                (f"{where}.requests", f"Invalid value: {amount!r}: must be less than or equal to {name} limit")
            )


def _canonical_amounts(parent: dict[str, Any], side: str) -> None:
    if not parent.get(side):
        return
    try:
        parent[side] = {name: canonical(amount) for name, amount in parent[side].items()}
    except ValueError as error:
        raise ApiError(400, "BadRequest", f"unable to decode: json: cannot unmarshal into {side}: {error}") from None


def _fill_in_pod(pod: dict[str, Any]) -> None:
    spec = pod.setdefault("spec", {})
    for name, value in (
        ("restartPolicy", "Always"),
        ("dnsPolicy", "ClusterFirst"),
        ("terminationGracePeriodSeconds", 30),
        ("schedulerName", "default-scheduler"),
        ("serviceAccountName", "default"),
        ("securityContext", {}),
        ("enableServiceLinks", True),
        ("priority", 0),
    ):
        if spec.get(name) is None:
            spec[name] = value
    tolerations = spec.setdefault("tolerations", [])
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if not any(toleration.get("key") in (key, None) for toleration in tolerations):
            tolerations.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})
    for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
        resources = container.setdefault("resources", {})
        _canonical_amounts(resources, "limits")
        _canonical_amounts(resources, "requests")
        if resources.get("limits"):
            resources["requests"] = {**resources["limits"], **(resources.get("requests") or {})}
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        container.setdefault("imagePullPolicy", "IfNotPresent" if ":" in (container.get("image") or "") else "Always")
        for port in container.get("ports") or []:
            port.setdefault("protocol", "TCP")
