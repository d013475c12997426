"""What the API server checks of a pod's spec."""

from __future__ import annotations

import re
from typing import Any

from .errors import Causes, Undecodable
from .kinds import PODS
from .names import is_qualified, quoted
from .quantities import is_extended, quantity

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_RESOURCES = {"cpu", "memory", "ephemeral-storage"}
_POLICIES = ("Always", "OnFailure", "Never")
_VOLUME_FIELDS = ("metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid")
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")


def check_pod(spec: dict[str, Any], causes: Causes) -> None:
    if not spec.get("containers"):
        causes.append(("spec.containers", "Required value"))
    _check_whole_numbers(spec, ("terminationGracePeriodSeconds", "activeDeadlineSeconds"), "PodSpec")
    if (policy := spec.get("restartPolicy")) not in _POLICIES:
        causes.append(("spec.restartPolicy", _unsupported(policy, _POLICIES)))
    if (hostname := spec.get("hostname")) and not _LABEL.fullmatch(hostname):
        said = f"Invalid value: {quoted(hostname)}: a lowercase RFC 1123 label is needed"
        causes.append(("spec.hostname", said))
    volumes: set[str] = set()
    for number, volume in enumerate(spec.get("volumes") or []):
        name = volume.get("name") or ""
        if name in volumes:
            causes.append((f"spec.volumes[{number}].name", f"Duplicate value: {quoted(name)}"))
        volumes.add(name)
        _check_downward(volume, f"spec.volumes[{number}].downwardAPI", causes)
    names: set[str] = set()
    for list_name in ("containers", "initContainers"):
        for number, container in enumerate(spec.get(list_name) or []):
            _check_container(container, f"spec.{list_name}[{number}]", names, volumes, causes)
    _check_tolerations(spec, causes)
    _check_affinity(spec, causes)


def check_amounts(amounts: dict[str, Any], where: str, causes: Causes) -> None:
    """Extended resources come in whole numbers; nothing is negative."""
    for name, amount in amounts.items():
        number, at = quantity(amount), f"{where}[{name}]"
        if number < 0:
            causes.append((at, f"Invalid value: {quoted(str(amount))}: must be greater than or equal to 0"))
        if is_extended(name) and number != number.to_integral_value():
            causes.append((at, f"Invalid value: {quoted(str(amount))}: must be an integer"))


def _check_container(container: dict[str, Any], where: str, names: set[str], volumes: set[str], causes: Causes) -> None:
    name = container.get("name") or ""
    if not _LABEL.fullmatch(name):
        causes.append((f"{where}.name", f"Invalid value: {quoted(name)}: a lowercase RFC 1123 label is needed"))
    if name in names:
        causes.append((f"{where}.name", f"Duplicate value: {quoted(name)}"))
    names.add(name)
    if not container.get("image"):
        causes.append((f"{where}.image", "Required value"))
    _check_env(container, where, causes)
    _check_mounts(container, where, volumes, causes)
    for number, port in enumerate(container.get("ports") or []):
        _check_whole_numbers(port, ("containerPort", "hostPort"), "ContainerPort")
        if not 0 < port.get("containerPort", 0) < 65536:
            said = f"Invalid value: {port.get('containerPort', 0)}: must be between 1 and 65535, inclusive"
            causes.append((f"{where}.ports[{number}].containerPort", said))
    _check_resources(container.get("resources") or {}, f"{where}.resources", causes)


def _check_env(container: dict[str, Any], where: str, causes: Causes) -> None:
    for number, entry in enumerate(container.get("env") or []):
        name = entry.get("name") or ""
        if not _ENV_NAME.fullmatch(name):
            said = f"Invalid value: {quoted(name)}: a valid environment variable name is needed"
            causes.append((f"{where}.env[{number}].name", said if name else "Required value"))
        if not isinstance(entry.get("value", ""), str):
            raise Undecodable(PODS, "json: cannot unmarshal into Go struct field EnvVar.value of type string")


def _check_downward(volume: dict[str, Any], where: str, causes: Causes) -> None:
    """Source: kubernetes pkg/apis/core/validation, validDownwardAPIVolumeFieldPathExpressions and
    validateObjectFieldSelector."""
    for number, item in enumerate((volume.get("downwardAPI") or {}).get("items") or []):
        at, path = f"{where}.items[{number}]", (item.get("fieldRef") or {}).get("fieldPath") or ""
        found = re.fullmatch(r"metadata\.(annotations|labels)\['([^']*)'\]", path)
        if found is None and path not in _VOLUME_FIELDS:
            causes.append((f"{at}.fieldRef.fieldPath", _unsupported(path, _VOLUME_FIELDS)))
        elif found is not None and not is_qualified(found[2].lower()):
            said = f"Invalid value: {quoted(path)}: a qualified name is needed"
            causes.append((f"{at}.fieldRef.fieldPath", said))
        if not item.get("path") or ".." in item["path"] or item["path"].startswith("/"):
            causes.append((f"{at}.path", f"Invalid value: {quoted(item.get('path') or '')}: must be a relative path"))


def _check_mounts(container: dict[str, Any], where: str, volumes: set[str], causes: Causes) -> None:
    paths: set[str] = set()
    for number, mount in enumerate(container.get("volumeMounts") or []):
        at, name, path = f"{where}.volumeMounts[{number}]", mount.get("name") or "", mount.get("mountPath") or ""
        if name not in volumes:
            causes.append((f"{at}.name", f"Not found: {quoted(name)}"))
        if not path:
            causes.append((f"{at}.mountPath", "Required value"))
        elif path in paths:
            causes.append((f"{at}.mountPath", f"Invalid value: {quoted(path)}: must be unique"))
        paths.add(path)


def _check_resources(resources: dict[str, Any], where: str, causes: Causes) -> None:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for side, amounts in (("limits", limits), ("requests", requests)):
        for name in amounts:
            if "/" not in name and name not in _RESOURCES and not name.startswith("hugepages-"):
                said = f"Invalid value: {quoted(name)}: must be a standard resource type or fully qualified"
                causes.append((f"{where}.{side}[{name}]", said))
            elif not is_qualified(name):
                causes.append((f"{where}.{side}[{name}]", f"Invalid value: {quoted(name)}: a qualified name is needed"))
        check_amounts(amounts, f"{where}.{side}", causes)
    for name, amount in requests.items():
        said = f"Invalid value: {quoted(str(amount))}: must be"
        if is_extended(name) and name not in limits:
            causes.append((f"{where}.limits", "Required value: Limit must be set for non overcommitable resources"))
        elif is_extended(name) and quantity(limits[name]) != quantity(amount):
            causes.append((f"{where}.requests", f"{said} equal to {name} limit"))
        elif name in limits and quantity(limits[name]) < quantity(amount):
            causes.append((f"{where}.requests", f"{said} less than or equal to {name} limit"))


def _check_tolerations(spec: dict[str, Any], causes: Causes) -> None:
    for number, toleration in enumerate(spec.get("tolerations") or []):
        at, operator = f"spec.tolerations[{number}].operator", toleration.get("operator") or "Equal"
        if operator not in ("Equal", "Exists"):
            causes.append((at, _unsupported(operator, ("Equal", "Exists"))))
        elif operator == "Exists" and toleration.get("value"):
            why = "value must be empty when `operator` is 'Exists'"
            causes.append((at, f"Invalid value: {quoted(str(toleration))}: {why}"))
        elif not toleration.get("key") and operator != "Exists":
            why = "operator must be Exists when `key` is empty"
            causes.append((at, f"Invalid value: {quoted(operator)}: {why}"))


def _check_affinity(spec: dict[str, Any], causes: Causes) -> None:
    path = "requiredDuringSchedulingIgnoredDuringExecution"
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(path)
    if required is None:
        return
    where = f"spec.affinity.nodeAffinity.{path}.nodeSelectorTerms"
    terms = required.get("nodeSelectorTerms") or []
    if not terms:
        causes.append((where, "Required value: must have at least one node selector term"))
    for term_number, term in enumerate(terms):
        for number, expression in enumerate(term.get("matchExpressions") or []):
            at = f"{where}[{term_number}].matchExpressions[{number}]"
            operator, values = expression.get("operator") or "", expression.get("values") or []
            if operator not in _OPERATORS:
                said = f"Invalid value: {quoted(operator)}: not a valid selector operator"
                causes.append((f"{at}.operator", said))
            elif operator in ("Exists", "DoesNotExist") and values:
                why = "may not be specified when `operator` is 'Exists' or 'DoesNotExist'"
                causes.append((f"{at}.values", f"Forbidden: {why}"))
            elif operator in ("In", "NotIn") and not values:
                why = "must be specified when `operator` is 'In' or 'NotIn'"
                causes.append((f"{at}.values", f"Required value: {why}"))


def _check_whole_numbers(item: dict[str, Any], fields: tuple[str, ...], what: str) -> None:
    for field in fields:
        if not isinstance(item.get(field, 0), int):
            raise Undecodable(PODS, f"json: cannot unmarshal into Go struct field {what}.{field} of type int")


def _unsupported(value: Any, supported: tuple[str, ...]) -> str:
    return f"Unsupported value: {quoted(str(value))}: supported values: {', '.join(map(quoted, supported))}"
