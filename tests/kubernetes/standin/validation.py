"""What the API server checks before it keeps an object: what our clients can get wrong."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable
from typing import Any

from .errors import ApiError, Causes, Undecodable, invalid
from .kinds import NODES, PODS, Kind
from .names import SUBDOMAIN, is_qualified, quoted
from .pod_validation import check_amounts, check_pod

_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SERVICE_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_DATA_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_ANNOTATIONS_BYTES = 256 * 1024
_OBJECT_BYTES = 1536 * 1024
_DATA_BYTES = 1024 * 1024
# RFC 1123 subdomains are the rule; these kinds' names are DNS labels, or free path segments
_FREE_NAMES = {"roles", "rolebindings", "clusterroles", "clusterrolebindings"}
_FINALIZERS = {"orphan", "foregroundDeletion", "kubernetes"}
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def check(kind: Kind, item: dict[str, Any]) -> None:
    """Raises ApiError 422 that names every wrong field, or 400 for a field of the wrong type."""
    metadata = item["metadata"]
    causes: Causes = []
    _check_name(kind, metadata.get("name") or "", causes)
    check_labels(kind, metadata.get("labels") or {}, "metadata.labels", causes)
    _check_annotations(kind, metadata.get("annotations") or {}, causes)
    _check_references(metadata, causes)
    if kind is PODS:
        spec = item.get("spec") or {}
        _check_strings(kind, spec.get("nodeSelector") or {}, "spec.nodeSelector")
        check_labels(kind, spec.get("nodeSelector") or {}, "spec.nodeSelector", causes)
        check_pod(spec, causes)
    elif kind is NODES:
        _check_node(item, causes)
    elif rule := _RULES.get(kind.plural):
        rule(kind, item, causes)
    if causes:
        raise invalid(kind.kind, metadata.get("name") or "", causes, kind.group)


def check_size(raw: bytes) -> None:
    if len(raw) > _OBJECT_BYTES:
        raise ApiError(500, "InternalError", "etcdserver: request is too large")


def check_labels(kind: Kind, labels: Any, where: str, causes: Causes) -> None:
    _check_strings(kind, labels, where)
    for key, value in labels.items():
        if not is_qualified(key):
            causes.append((where, f"Invalid value: {quoted(key)}: a qualified name is needed"))
        if not _LABEL_VALUE.fullmatch(value):
            said = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.'"
            causes.append((where, f"Invalid value: {quoted(value)}: {said}, at most 63"))


def _check_name(kind: Kind, name: str, causes: Causes) -> None:
    wrong = f"Invalid value: {quoted(name)}:"
    if not name:
        causes.append(("metadata.name", "Required value: name or generateName is required"))
    elif kind.plural in _FREE_NAMES:
        if name in (".", "..") or "/" in name or "%" in name:
            causes.append(("metadata.name", f"{wrong} may not contain '/' or '%'"))
    elif kind.plural == "namespaces":
        if not _DNS_LABEL.fullmatch(name):
            causes.append(("metadata.name", f"{wrong} a lowercase RFC 1123 label is needed"))
    elif kind.plural == "services":
        if not _SERVICE_NAME.fullmatch(name):
            causes.append(("metadata.name", f"{wrong} a DNS-1035 label is needed"))
    elif len(name) > 253 or not SUBDOMAIN.fullmatch(name):
        causes.append(("metadata.name", f"{wrong} a lowercase RFC 1123 subdomain is needed"))


def _check_strings(kind: Kind, values: Any, what: str) -> None:
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        # the server fails to read such an object at all
        raise Undecodable(kind, f"json: cannot unmarshal into Go struct field {what} of type string")


def _check_annotations(kind: Kind, annotations: Any, causes: Causes) -> None:
    _check_strings(kind, annotations, "metadata.annotations")
    for key in annotations:
        if not is_qualified(key.lower()):
            causes.append(("metadata.annotations", f"Invalid value: {quoted(key)}: a qualified name is needed"))
    if sum(len(key) + len(value.encode()) for key, value in annotations.items()) > _ANNOTATIONS_BYTES:
        causes.append(("metadata.annotations", f"Too long: must have at most {_ANNOTATIONS_BYTES} bytes"))


def _check_references(metadata: dict[str, Any], causes: Causes) -> None:
    for number, name in enumerate(metadata.get("finalizers") or []):
        if name not in _FINALIZERS and not ("/" in name and is_qualified(name)):
            why = "name is neither a standard finalizer name nor is it fully qualified"
            causes.append((f"metadata.finalizers[{number}]", f"Invalid value: {quoted(name)}: {why}"))
    for reference in metadata.get("ownerReferences") or []:
        for field in ("apiVersion", "kind", "name", "uid"):
            if not reference.get(field):
                where = f"metadata.ownerReferences.{field}"
                causes.append((where, f'Invalid value: "": {field} must not be empty'))


def _check_node(node: dict[str, Any], causes: Causes) -> None:
    for number, taint in enumerate((node.get("spec") or {}).get("taints") or []):
        if taint.get("effect") not in _EFFECTS:
            supported = ", ".join(map(quoted, _EFFECTS))
            said = f"Unsupported value: {quoted(taint.get('effect') or '')}: supported values: {supported}"
            causes.append((f"metadata.taints[{number}].effect", said))
    for side in ("capacity", "allocatable"):
        check_amounts((node.get("status") or {}).get(side) or {}, f"status.{side}", causes)


def _check_config_map(kind: Kind, item: dict[str, Any], causes: Causes) -> None:
    data = item.get("data") or {}
    _check_strings(kind, data, "data")
    _check_data(data, causes)


def _check_secret(kind: Kind, item: dict[str, Any], causes: Causes) -> None:
    data = item.get("data") or {}
    _check_strings(kind, data, "data")
    try:
        for value in data.values():
            base64.b64decode(value, validate=True)
    except binascii.Error:
        raise Undecodable(kind, "illegal base64 data") from None
    _check_data(data, causes)


def _check_data(data: dict[str, str], causes: Causes) -> None:
    for key in data:
        if not _DATA_KEY.fullmatch(key):
            causes.append((f"data[{key}]", f"Invalid value: {quoted(key)}: a valid config key is needed"))
    if sum(len(value.encode()) for value in data.values()) > _DATA_BYTES:
        causes.append(("data", f"Too long: must have at most {_DATA_BYTES} bytes"))


def _check_claim(kind: Kind, item: dict[str, Any], causes: Causes) -> None:
    spec = item.get("spec") or {}
    if not spec.get("accessModes"):
        causes.append(("spec.accessModes", "Required value: at least 1 access mode is required"))
    if "storage" not in ((spec.get("resources") or {}).get("requests") or {}):
        causes.append(("spec.resources[storage]", "Required value"))


def _check_service(kind: Kind, item: dict[str, Any], causes: Causes) -> None:
    spec = item.get("spec") or {}
    if not spec.get("ports") and spec.get("clusterIP") != "None" and spec.get("type") != "ExternalName":
        causes.append(("spec.ports", "Required value"))


def _check_role(kind: Kind, item: dict[str, Any], causes: Causes) -> None:
    for number, rule in enumerate(item.get("rules") or []):
        if not rule.get("verbs"):
            causes.append((f"rules[{number}].verbs", "Required value: verbs must contain at least one value"))
        if not rule.get("nonResourceURLs"):
            for field in ("apiGroups", "resources"):
                if not rule.get(field):
                    why = "resource rules must supply at least one"
                    causes.append((f"rules[{number}].{field}", f"Required value: {why}"))


def _check_binding(kind: Kind, item: dict[str, Any], causes: Causes) -> None:
    reference = item.get("roleRef") or {}
    kinds = ("Role", "ClusterRole") if kind.namespaced else ("ClusterRole",)
    if reference.get("kind") not in kinds:
        supported = ", ".join(map(quoted, kinds))
        said = f"Unsupported value: {quoted(reference.get('kind') or '')}: supported values: {supported}"
        causes.append(("roleRef.kind", said))
    if not reference.get("name"):
        causes.append(("roleRef.name", "Required value"))


def _check_event(kind: Kind, item: dict[str, Any], causes: Causes) -> None:
    namespace = (item.get("involvedObject") or {}).get("namespace") or ""
    if namespace != item["metadata"].get("namespace"):
        said = f"Invalid value: {quoted(namespace)}: does not match event.namespace"
        causes.append(("involvedObject.namespace", said))


_RULES: dict[str, Callable[[Kind, dict[str, Any], Causes], None]] = {
    "configmaps": _check_config_map,
    "secrets": _check_secret,
    "persistentvolumeclaims": _check_claim,
    "services": _check_service,
    "roles": _check_role,
    "clusterroles": _check_role,
    "rolebindings": _check_binding,
    "clusterrolebindings": _check_binding,
    "events": _check_event,
}


def wrong_patch(after: dict[str, Any], why: str) -> ApiError:
    """A patch that makes something of an object that cannot be read."""
    shown = json.dumps(json.dumps(after))[:2000]
    return invalid("", "", [("patch", f"Invalid value: {shown}: {why}")])
