"""What a pod requests of its node, and what a node has, as the cluster's scheduler counts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from gpushare_spawner.model.kubernetes import quantity

Amounts = dict[str, Decimal]
"""By resource: cores of ``cpu``, bytes of ``memory``; others as they are counted."""


def pod_requests(pod: Mapping[str, Any]) -> Amounts:
    """Return what a pod requests of its node.

    Containers and sidecars are added up; an ordinary init container runs before the containers and beside the sidecars
    that were started before it, and the larger amount counts. Of a container that was resized in place the largest of
    what is requested, allocated and in force counts. The pod's overhead is added. (kubernetes
    component-helpers/resource/helpers.go; measured on 1.36.)
    """
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    in_force = {found.get("name"): found for found in _statuses(status)}
    running = _total(_requested(container, in_force) for container in spec.get("containers") or [])
    sidecars: Amounts = {}
    most: Amounts = {}
    for container in spec.get("initContainers") or []:
        asked = _requested(container, in_force)
        if container.get("restartPolicy") == "Always":
            sidecars = _total([sidecars, asked])
            most = _largest([most, sidecars])
        else:
            most = _largest([most, _total([sidecars, asked])])
    total = _largest([_total([running, sidecars]), most])
    # requests of the pod as a whole (1.34 and later) take the place of the sum
    of_pod = _amounts((spec.get("resources") or {}).get("requests"))
    return _total([{**total, **of_pod}, _amounts(spec.get("overhead"))])


def _statuses(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*(status.get("containerStatuses") or []), *(status.get("initContainerStatuses") or [])]


def _requested(container: Mapping[str, Any], in_force: Mapping[Any, Mapping[str, Any]]) -> Amounts:
    resources = container.get("resources") or {}
    # the API server writes a limit without a request as a request; a manifest that it has not seen lacks that
    asked_for = _amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})
    known = in_force.get(container.get("name"), {})
    actual = (known.get("resources") or {}).get("requests")
    return _largest([asked_for, _amounts(known.get("allocatedResources")), _amounts(actual)])


def _amounts(written: Mapping[str, Any] | None) -> Amounts:
    return {name: quantity(amount) for name, amount in (written or {}).items()}


def _total(parts: Iterable[Amounts]) -> Amounts:
    total: Amounts = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, Decimal(0)) + amount
    return total


def _largest(parts: Iterable[Amounts]) -> Amounts:
    most: Amounts = {}
    for part in parts:
        for name, amount in part.items():
            most[name] = max(most.get(name, amount), amount)
    return most
