"""The subresource pods/resize: changes of running containers' CPU and memory. Measured on Kubernetes 1.36.2."""

from __future__ import annotations

import copy
from decimal import Decimal
from typing import Any

from .errors import forbidden, invalid
from .kinds import NODES, PODS
from .quantities import quantity
from .scheduler import requests
from .store import Store

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


def check_node(store: Store, pod: dict[str, Any]) -> None:
    """Raises ApiError 403 where the pod's node is not there, is not a Linux node, or could never have so much.

    From 1.36 on; before that the kubelet calls such a resize Infeasible. Source: kubernetes/kubernetes
    plugin/pkg/admission/podresize/admission.go, validatePodResize.
    """
    node_name = pod["spec"].get("nodeName")
    if not node_name:
        return
    refused = f'pods "{pod["metadata"]["name"]}" is forbidden: '
    stored = store.get(NODES, ("", node_name))
    if stored is None:
        raise forbidden(f'{refused}node "{node_name}" not found')
    allocatable = stored.item.get("status", {}).get("allocatable") or {}
    wanted = requests({**pod, "status": {}})
    beyond = []
    for name, unit in (("cpu", 1000), ("memory", 1)):
        amount, most = wanted.get(name, Decimal(0)) * unit, quantity(allocatable.get(name, 0)) * unit
        if amount > most:
            beyond.append(f"{name}, requested: {int(amount)}, allocatable: {int(most)}")
    if beyond:
        raise forbidden(f"{refused}Node didn't have enough allocatable resources: {'; '.join(beyond)}")
    system = (stored.item["metadata"].get("labels") or {}).get("kubernetes.io/os", "")
    if system != "linux":
        raise forbidden(f'{refused}pod resize is only supported on linux nodes, node "{node_name}" is "{system}"')


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
