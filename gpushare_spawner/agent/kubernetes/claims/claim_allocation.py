"""What a ResourceClaim of the API server says that one of this node's sessions may have. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from gpushare_spawner.agent.kubernetes.cluster_api import Json
from gpushare_spawner.agent.kubernetes.devices.device_owners import Refused
from gpushare_spawner.model.kubernetes import CLAIMS_API, DRIVER, UNITS_CAPACITY, device_name, quantity


@dataclass(frozen=True)
class ClaimKey:
    """A claim as the kubelet names it."""

    namespace: str
    name: str
    uid: str

    @property
    def path(self) -> str:
        """Its path in the API."""
        return f"{CLAIMS_API}/namespaces/{self.namespace}/resourceclaims/{self.name}"

    def __str__(self) -> str:
        return f"claim {self.namespace}/{self.name}"


class AllocatedDevice(BaseModel):
    """One of a claim's devices, as the kubelet is told it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    request: str
    pool: str
    device: str
    share: str | None = None
    """The scheduler's id of this part of the device."""


@dataclass(frozen=True)
class ClaimAllocation:
    """What the scheduler has allocated to a claim on this node."""

    pod: str
    """Name of the pod that the claim is reserved for."""
    pod_uid: str
    devices: tuple[AllocatedDevice, ...]
    units: Mapping[str, int]
    """Units of 1 % by the GPU's UUID."""


def claim_allocation(claim: Json, key: ClaimKey, node: str, gpus: Mapping[str, Any]) -> ClaimAllocation:
    """Read a claim. `gpus`: the node's, by UUID. Raises Refused, with the reason, where no session can have it."""
    uid = (claim.get("metadata") or {}).get("uid")
    if uid != key.uid:
        raise Refused(f"{key} is another one than the kubelet asks for: its uid is {uid}, not {key.uid}")
    status = claim.get("status") or {}
    pods = [one for one in status.get("reservedFor") or [] if one.get("resource") == "pods"]
    if not pods:
        raise Refused(f"{key} is not reserved for a pod")
    results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or []
    by_device = {device_name(uuid): uuid for uuid in gpus}
    devices: list[AllocatedDevice] = []
    units: dict[str, int] = {}
    for result in results:
        if result.get("driver") != DRIVER:
            continue
        if result.get("pool") != node:
            raise Refused(f"{key} is allocated on node {result.get('pool')}, and this is node {node}")
        gpu = by_device.get(result.get("device"))
        if gpu is None:
            raise Refused(f"{key} has device {result.get('device')}, which is no GPU of this agent (any more)")
        if result.get("adminAccess"):
            raise Refused(
                f"{key} has device {result.get('device')} with admin access, for monitoring: it holds no units, and "
                "this driver prepares sessions only. Claim units instead, without adminAccess"
            )
        consumed = (result.get("consumedCapacity") or {}).get(UNITS_CAPACITY)
        if consumed is None:
            # a whole device: the scheduler would give it to nobody else
            raise Refused(
                f"{key} has device {result.get('device')} as a whole, without units: the feature gate "
                "DRAConsumableCapacity is off in the scheduler"
            )
        try:
            amount = math.ceil(quantity(consumed))
        except ValueError as error:
            raise Refused(f"{key}: its units are not valid: {error}") from None
        if amount < 1:
            raise Refused(f"{key} has {amount} units; a share is at least 1 unit")
        units[gpu] = units.get(gpu, 0) + amount
        devices.append(
            AllocatedDevice(
                request=str(result.get("request", "")),
                pool=node,
                device=str(result["device"]),
                share=result.get("shareID"),
            )
        )
    if not devices:
        raise Refused(f"{key} has no device of {DRIVER}")
    return ClaimAllocation(str(pods[0]["name"]), str(pods[0]["uid"]), tuple(devices), units)
