"""The scheduler's part of resource.k8s.io/v1: devices for a pod's claims, with consumable capacity, chosen by CEL.

What it does not know: alternatives in a request, constraints between requests, admin access, partitions.
"""

from __future__ import annotations

import uuid
from decimal import ROUND_CEILING, Decimal
from functools import cache
from typing import Any

from cel_expr_python import cel

from .kinds import RESOURCE_GROUP
from .quantities import canonical, quantity
from .resource_claims import claim_names, requests_of

GROUP = f"{RESOURCE_GROUP}/v1"
CANNOT = "cannot allocate all claims"
"""All that the scheduler says, whatever the cause is."""

Item = dict[str, Any]


class ClaimAllocator:
    """Slices, claims and classes by name, as the scheduler has seen them last."""

    def __init__(self) -> None:
        self.slices: dict[str, Item] = {}
        self.claims: dict[str, Item] = {}
        """By namespace/name."""
        self.classes: dict[str, Item] = {}

    def claims_of(self, pod: Item) -> list[Item] | None:
        """The claims that a pod names; None while one of them is not there."""
        found = [self.claims.get(f"{pod['metadata']['namespace']}/{name}") for name in claim_names(pod)]
        return None if None in found else [one for one in found if one is not None]

    def allocations(self, claims: list[Item], node: str) -> list[Item] | None:
        """What to write into `status.allocation` of each claim so that its pod can run on the node; None: it cannot."""
        used = self._used()
        made = []
        for claim in claims:
            present = (claim.get("status") or {}).get("allocation")
            if present is not None:
                if any(result["pool"] != node for result in present["devices"]["results"]):
                    return None
                made.append(present)
                continue
            results = []
            for request in requests_of(claim):
                result = self._result(request, node, used)
                if result is None:
                    return None
                results.append(result)
            made.append({"devices": {"results": results}})
        return made

    def _used(self) -> dict[tuple[str, str, str], list[Item]]:
        """Allocated parts by (driver, pool, device)."""
        used: dict[tuple[str, str, str], list[Item]] = {}
        for claim in self.claims.values():
            allocation = (claim.get("status") or {}).get("allocation") or {}
            for result in (allocation.get("devices") or {}).get("results") or []:
                used.setdefault((result["driver"], result["pool"], result["device"]), []).append(result)
        return used

    def _result(self, request: Item, node: str, used: dict[tuple[str, str, str], list[Item]]) -> Item | None:
        exactly = request["exactly"]
        device_class = self.classes.get(exactly["deviceClassName"])
        if device_class is None:
            return None
        selectors = [*(device_class["spec"].get("selectors") or []), *(exactly.get("selectors") or [])]
        for item in self.slices.values():
            spec = item["spec"]
            if spec.get("nodeName") != node:
                continue
            for device in spec.get("devices") or []:
                if any(taint["effect"] in ("NoSchedule", "NoExecute") for taint in device.get("taints") or []):
                    continue
                if not all(_matches(each["cel"]["expression"], spec["driver"], device) for each in selectors):
                    continue
                key = spec["driver"], spec["pool"]["name"], device["name"]
                part = _part(device, (exactly.get("capacity") or {}).get("requests") or {}, used.get(key, []))
                if part is None:
                    continue
                result = {"request": request["name"], "driver": key[0], "pool": key[1], "device": key[2], **part}
                used.setdefault(key, []).append(result)
                return result
        return None


def _part(device: Item, asked: Item, used: list[Item]) -> Item | None:
    """What a request takes of a device; None where it does not fit."""
    if not device.get("allowMultipleAllocations"):
        # capacity in the request or not: it is the whole device
        return None if used else {}
    consumed: dict[str, Decimal] = {}
    for name, capacity in (device.get("capacity") or {}).items():
        value, policy = quantity(capacity["value"]), capacity.get("requestPolicy")
        if name in asked:
            amount = quantity(asked[name])
            limits = (policy or {}).get("validRange") or {}
            least, step = quantity(limits.get("min", 0)), quantity(limits.get("step", 0))
            amount = max(amount, least)
            if step:
                amount = least + ((amount - least) / step).to_integral_value(ROUND_CEILING) * step
        else:
            amount = quantity(policy["default"]) if policy else value
        taken = sum((quantity(one["consumedCapacity"][name]) for one in used), Decimal(0))
        if taken + amount > value:
            return None
        consumed[name] = amount
    amounts = {name: canonical(str(amount)) for name, amount in consumed.items()}
    return {"consumedCapacity": amounts, "shareID": str(uuid.uuid4())}


def _matches(expression: str, driver: str, device: Item) -> bool:
    """Raises ValueError for what has no value: one unknown attribute ends the whole allocation."""
    attributes: dict[str, Item] = {}
    for name, value in (device.get("attributes") or {}).items():
        domain, _, short = name.rpartition("/")
        attributes.setdefault(domain or driver, {})[short] = next(iter(value.values()))
    capacity = {driver: {name: str(one["value"]) for name, one in (device.get("capacity") or {}).items()}}
    multiple = bool(device.get("allowMultipleAllocations"))
    seen = {"driver": driver, "attributes": attributes, "capacity": capacity, "allowMultipleAllocations": multiple}
    result = _compiled(expression).eval(data={"device": seen})
    if result.type() == cel.Type.ERROR:
        raise ValueError(f"selector {expression}: {result.value()}")
    return result.plain_value() is True


@cache
def _compiled(expression: str) -> Any:
    return cel.NewEnv(variables={"device": cel.Type.DYN}).compile(expression)
