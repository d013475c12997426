"""What the API server and its controllers do with resource.k8s.io/v1: slices, claims, classes.

Fields of a feature gate that is off are dropped without an error, as by a real server. Facts: Kubernetes 1.36.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .errors import Causes, invalid
from .kinds import PODS, RESOURCE_CLAIMS, RESOURCE_SLICES, Kind
from .quantities import canonical, quantity
from .store import Event, Store

GATES = frozenset({"DRAConsumableCapacity", "DRADeviceTaints"})
"""On by default from 1.36 on."""
_MOST_DEVICES, _MOST_TAINTED = 128, 64


def keep(kind: Kind, item: dict[str, Any], gates: Iterable[str]) -> None:
    """Make of a new or changed object what the server keeps of it."""
    consumable, taints = "DRAConsumableCapacity" in gates, "DRADeviceTaints" in gates
    if kind is RESOURCE_SLICES:
        for device in item["spec"].get("devices") or []:
            if not taints:
                device.pop("taints", None)
            if not consumable:
                device.pop("allowMultipleAllocations", None)
                for capacity in (device.get("capacity") or {}).values():
                    capacity.pop("requestPolicy", None)
            for capacity in (device.get("capacity") or {}).values():
                capacity["value"] = canonical(capacity["value"])
    elif kind is RESOURCE_CLAIMS and not consumable:
        for request in requests_of(item):
            request["exactly"].pop("capacity", None)


def check(kind: Kind, item: dict[str, Any]) -> None:
    """Raises ApiError 422."""
    causes: Causes = []
    if kind is RESOURCE_SLICES:
        causes.extend(_wrong_in_slice(item["spec"]))
    elif kind is RESOURCE_CLAIMS:
        for number, request in enumerate(requests_of(item)):
            if not request["exactly"].get("deviceClassName"):
                causes.append((f"spec.devices.requests[{number}].exactly.deviceClassName", "Required value"))
    if causes:
        raise invalid(kind.kind, item["metadata"]["name"], causes, kind.group)


def check_update(kind: Kind, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raises ApiError 422 for a change of what cannot be changed."""
    causes: Causes = []
    if kind is RESOURCE_CLAIMS and before["spec"] != after["spec"]:
        causes.append(("spec", "Invalid value: field is immutable"))
    if kind is RESOURCE_SLICES:
        for field in ("driver", "nodeName"):
            if before["spec"].get(field) != after["spec"].get(field):
                causes.append((f"spec.{field}", "Invalid value: field is immutable"))
    if causes:
        raise invalid(kind.kind, after["metadata"]["name"], causes, kind.group)


def requests_of(claim: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests of a claim for exactly some devices; others are not known here."""
    return [one for one in claim["spec"].get("devices", {}).get("requests") or [] if "exactly" in one]


def claim_names(pod: dict[str, Any]) -> list[str]:
    """The names of a pod's claims; empty where the claim of a template is not made yet.

    The resource claim controller makes it, and writes its name into the pod's status.
    """
    made = {one["name"]: one for one in (pod.get("status") or {}).get("resourceClaimStatuses") or []}
    asked = [{**one, **made.get(one["name"], {})} for one in pod["spec"].get("resourceClaims") or []]
    return [one.get("resourceClaimName", "") for one in asked]


def release(store: Store, kind: Kind, event: Event) -> None:
    """A pod has ended or is gone: its claims are no longer reserved for it, and what it owns goes."""
    if kind is not PODS:
        return
    pod = event.after.item
    if not pod["spec"].get("resourceClaims"):
        return
    if not event.deleted and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
        return
    uid, namespace = pod["metadata"]["uid"], pod["metadata"]["namespace"]
    for stored in list(store.items(RESOURCE_CLAIMS, namespace)):
        reserved = (stored.item.get("status") or {}).get("reservedFor") or []
        owners = stored.item["metadata"].get("ownerReferences") or []
        if any(owner["uid"] == uid and owner.get("controller") for owner in owners):
            store.remove(RESOURCE_CLAIMS, stored.key)
        elif any(one["uid"] == uid for one in reserved):
            left = [one for one in reserved if one["uid"] != uid]
            claim = stored.copy()
            claim["status"] = {**claim["status"], "reservedFor": left} if left else {}
            store.put(RESOURCE_CLAIMS, claim)


def _wrong_in_slice(spec: dict[str, Any]) -> Iterator[tuple[str, str]]:
    devices = spec.get("devices") or []
    most = _MOST_TAINTED if any(device.get("taints") for device in devices) else _MOST_DEVICES
    if len(devices) > most:
        yield "spec.devices", f"Too long: must have at most {most} items"
    for number, device in enumerate(devices):
        for name, capacity in (device.get("capacity") or {}).items():
            where, value = f"spec.devices[{number}].capacity[{name}]", quantity(capacity["value"])
            policy = capacity.get("requestPolicy") or {}
            if policy and not device.get("allowMultipleAllocations"):
                yield f"{where}.requestPolicy", "Forbidden: allowMultipleAllocations must be true"
            limits = policy.get("validRange") or {}
            if "max" in limits and quantity(limits["max"]) > value:
                yield f"{where}.requestPolicy.validRange.max", "Invalid value: max is larger than capacity value"
            if "min" in limits and quantity(limits["min"]) > value:
                yield f"{where}.requestPolicy.validRange.min", "Invalid value: min is larger than capacity value"
