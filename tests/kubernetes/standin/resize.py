"""The subresource pods/resize: changes of running containers' CPU and memory. Measured on Kubernetes 1.36.2."""

from __future__ import annotations

import copy
from typing import Any

from .errors import invalid
from .kinds import PODS

RESIZABLE = ("cpu", "memory")


def resized(before: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """What a resize makes of a pod, before defaults are filled in. Raises ApiError 422 for any other change of its
    spec; changes of its metadata and status are dropped."""
    after: dict[str, Any] = copy.deepcopy(before)
    name, wanted = before["metadata"]["name"], {one.get("name"): one for one in changed["spec"].get("containers") or []}
    for number, container in enumerate(after["spec"]["containers"]):
        new = wanted.get(container["name"])
        if new is None:
            raise invalid(PODS.kind, name, [("spec.containers", "Forbidden: containers may not be added or removed")])
        at = f"spec.containers[{number}].resources"
        old = container.get("resources") or {}
        resources = new.get("resources") or {}
        if _fixed(old) != _fixed(resources) or (old.get("claims") or resources.get("claims")):
            raise invalid(PODS.kind, name, [(at, "Forbidden: only cpu and memory resources are mutable")])
        container["resources"] = copy.deepcopy(resources)
    if [{**one, "resources": None} for one in after["spec"]["containers"]] != [
        {**one, "resources": None} for one in changed["spec"]["containers"]
    ]:
        raise invalid(PODS.kind, name, [("spec", "Forbidden: only cpu and memory resources are mutable")])
    return after


def check_quality(name: str, before: str, after: str) -> None:
    """Raises ApiError 422 where the QoS class would be another."""
    if before != after:
        why = "Invalid value: Pod QOS Class may not change as a result of resizing"
        raise invalid(PODS.kind, name, [("metadata", why)])


def quality(spec: dict[str, Any]) -> str:
    """The QoS class of a pod."""
    sides = [container.get("resources") or {} for container in spec["containers"]]
    named = [{**(side.get("limits") or {}), **(side.get("requests") or {})} for side in sides]
    if not any({"cpu", "memory"} & set(names) for names in named):
        return "BestEffort"
    guaranteed = all(
        {"cpu", "memory"} <= set(side.get("limits") or {}) and side.get("limits") == side.get("requests")
        for side in sides
    )
    return "Guaranteed" if guaranteed else "Burstable"


def _fixed(resources: dict[str, Any]) -> dict[str, Any]:
    return {
        side: {name: amount for name, amount in (resources.get(side) or {}).items() if name not in RESIZABLE}
        for side in ("limits", "requests")
    }
