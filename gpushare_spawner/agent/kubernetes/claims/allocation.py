"""Allocations of ResourceClaims, and the claims that are prepared on this node.

`claim_allocation` parses a ResourceClaim from the API server and checks that a session on this node can have it.
`PreparedClaims` stores the prepared claims on disk, one JSON file each, because the kubelet does not list them for a
new agent. A prepared claim holds devices by number, like a pod of the device plugin, but the agent chooses them.
Therefore the same code counts devices for both. For the driver, see claim_driver.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from gpushare_spawner.agent.kubernetes.devices.owners import DevicesRefused, grant_name
from gpushare_spawner.agent.kubernetes.devices.pod_resources import DeviceIds, KubeletAssignments, PodKey
from gpushare_spawner.agent.session_records import regular_content, replace_file, short_name, sync_folder
from gpushare_spawner.clients.api import Json
from gpushare_spawner.model.kubernetes.container_requests import quantity
from gpushare_spawner.model.kubernetes.objects import (
    CLAIMS_API,
    DRIVER,
    UNITS_CAPACITY,
    claim_folder,
    device_name,
    resource_name,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClaimKey:
    """A claim, identified by the kubelet's names."""

    namespace: str
    name: str
    uid: str

    @property
    def path(self) -> str:
        """The object's path in the API."""
        return f"{CLAIMS_API}/namespaces/{self.namespace}/resourceclaims/{self.name}"

    def __str__(self) -> str:
        return f"claim {self.namespace}/{self.name}"


class AllocatedDevice(BaseModel):
    """A device of a claim, as the driver returns it to the kubelet."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    request: str
    pool: str
    device: str
    share: str | None = None
    """The scheduler's ID for this part of the device."""


@dataclass(frozen=True)
class ClaimAllocation:
    """The devices that the scheduler has allocated to a claim on this node."""

    pod: str
    """Name of the pod that the claim is reserved for."""
    devices: tuple[AllocatedDevice, ...]
    units: Mapping[str, int]
    """Units of 1 %, keyed by GPU UUID."""


def claim_allocation(claim: Json, key: ClaimKey, node: str, gpus: Mapping[str, Any]) -> ClaimAllocation:
    """Return the allocation of a claim. `gpus`: the node's GPUs, by UUID.

    Raises DevicesRefused, with the reason, if no session can have it.
    """
    uid = (claim.get("metadata") or {}).get("uid")
    if uid != key.uid:
        raise DevicesRefused(f"{key} is not the claim that the kubelet requests: its uid is {uid}, not {key.uid}")
    status = claim.get("status") or {}
    pods = [consumer for consumer in status.get("reservedFor") or [] if consumer.get("resource") == "pods"]
    if not pods:
        raise DevicesRefused(f"{key} is not reserved for a pod")
    results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or []
    by_device = {device_name(uuid): uuid for uuid in gpus}
    devices: list[AllocatedDevice] = []
    units: dict[str, int] = {}
    for result in results:
        if result.get("driver") != DRIVER:
            continue
        if result.get("pool") != node:
            raise DevicesRefused(f"{key} is allocated on node {result.get('pool')}, and this is node {node}")
        gpu = by_device.get(result.get("device"))
        if gpu is None:
            raise DevicesRefused(f"{key} has device {result.get('device')}, not a GPU of this agent (any more)")
        if result.get("adminAccess"):
            raise DevicesRefused(
                f"{key} has device {result.get('device')} with admin access, for monitoring: it holds no units, and "
                "this driver prepares sessions only. Claim units instead, without adminAccess"
            )
        consumed = (result.get("consumedCapacity") or {}).get(UNITS_CAPACITY)
        if consumed is None:
            # This is a whole device. The scheduler would not allocate it to any other claim.
            raise DevicesRefused(
                f"{key} has device {result.get('device')} as a whole, without units: the feature gate "
                "DRAConsumableCapacity is off in the scheduler"
            )
        try:
            amount = math.ceil(quantity(consumed))
        except ValueError as error:
            raise DevicesRefused(f"{key}: its units are not valid: {error}") from None
        if amount < 1:
            raise DevicesRefused(f"{key} has {amount} units; a share is at least 1 unit")
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
        raise DevicesRefused(f"{key} has no device of {DRIVER}")
    return ClaimAllocation(str(pods[0]["name"]), tuple(devices), units)


class PreparedClaim(BaseModel):
    """A claim that was prepared for the kubelet."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    namespace: str
    name: str
    uid: str
    pod: str
    """Name of the pod that the claim is reserved for."""
    held: dict[str, tuple[str, ...]]
    """IDs of the devices that represent the claim's units, keyed by GPU UUID."""
    devices: tuple[AllocatedDevice, ...]
    """The devices that were returned to the kubelet."""

    @property
    def folder(self) -> str:
        """The name of the folder mounted by the pod."""
        return claim_folder(self.namespace, self.name)

    @property
    def ids(self) -> frozenset[str]:
        """The IDs of the claim's devices on all GPUs."""
        return frozenset(id for ids in self.held.values() for id in ids)


class PreparedClaims:
    """The prepared claims, in memory and on disk."""

    def __init__(self, folder: Path) -> None:
        """Read the files. An unreadable file is skipped and logged. Raises OSError."""
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._claims: dict[str, PreparedClaim] = {}
        for path in sorted(folder.glob("*.json")):
            try:
                claim = PreparedClaim.model_validate_json(regular_content(path))
            except (OSError, ValueError) as error:
                log.error(
                    "the prepared claim in %s cannot be read; only its session's record shows its devices: %s",
                    path,
                    error,
                )
            else:
                self._claims[claim.uid] = claim

    def get(self, uid: str) -> PreparedClaim | None:
        """Return the claim with this uid; None if it is not prepared."""
        return self._claims.get(uid)

    def put(self, claim: PreparedClaim) -> None:
        """Store a claim, on disk first. After an OSError nothing has changed."""
        replace_file(self._path(claim.uid), claim.model_dump_json().encode())
        self._claims[claim.uid] = claim

    def remove(self, uid: str) -> None:
        """Remove a claim. After an OSError nothing has changed."""
        self._path(uid).unlink(missing_ok=True)
        sync_folder(self._folder)
        self._claims.pop(uid, None)

    @property
    def ids(self) -> frozenset[str]:
        """The IDs of all prepared claims' devices."""
        return frozenset(id for claim in self._claims.values() for id in claim.ids)

    def without(self, held: Collection[str]) -> list[PreparedClaim]:
        """Return the claims that hold none of these IDs."""
        return [claim for claim in self._claims.values() if claim.ids.isdisjoint(held)]

    def folder_name(self, ids: Iterable[str]) -> str:
        """Return the folder's name for devices assigned together; for a claim's devices, the claim's folder."""
        requested = frozenset(ids)
        for claim in self._claims.values():
            if not requested.isdisjoint(claim.ids):
                return claim.folder
        return grant_name(requested)

    def joined(self, assignments: KubeletAssignments, indices: Mapping[str, int]) -> KubeletAssignments:
        """Return the kubelet's list with the claims' pods added. No container names the claim, so the list lacks them.

        `indices`: the indices of the GPUs, by UUID.
        """
        by_pod: dict[PodKey, dict[str, DeviceIds]] = {key: dict(held) for key, held in assignments.by_pod.items()}
        for claim in self._claims.values():
            held = by_pod.setdefault((claim.namespace, claim.pod), {})
            for gpu, ids in claim.held.items():
                resource = resource_name(indices.get(gpu, 0))
                held[resource] = (*held.get(resource, ()), frozenset(ids))
        return replace(assignments, by_pod=by_pod)

    def _path(self, uid: str) -> Path:
        return self._folder / f"{short_name(uid)}.json"
