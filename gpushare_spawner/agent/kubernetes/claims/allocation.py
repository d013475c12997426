"""The claims that are prepared on this node, one JSON file each: the kubelet does not say them again to a new agent.

A prepared claim holds devices by their numbers, as a pod of the device plugin does; here the agent chooses them itself.
So everything that counts and follows devices is the same for both.

What a ResourceClaim of the API server says that one of this node's sessions may have. Pure.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from gpushare_spawner.agent.kubernetes.api import Json
from gpushare_spawner.agent.kubernetes.devices.owners import DevicesRefused, grant_name
from gpushare_spawner.agent.kubernetes.devices.pod_resources import Given, Handed, PodKey
from gpushare_spawner.agent.state.records import regular_content, replace_file, short_name, sync_folder
from gpushare_spawner.model.kubernetes import (
    CLAIMS_API,
    DRIVER,
    UNITS_CAPACITY,
    claim_folder,
    device_name,
    quantity,
    resource_name,
)

log = logging.getLogger(__name__)


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
        raise DevicesRefused(f"{key} is another one than the kubelet asks for: its uid is {uid}, not {key.uid}")
    status = claim.get("status") or {}
    pods = [one for one in status.get("reservedFor") or [] if one.get("resource") == "pods"]
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
            raise DevicesRefused(f"{key} has device {result.get('device')}, which is no GPU of this agent (any more)")
        if result.get("adminAccess"):
            raise DevicesRefused(
                f"{key} has device {result.get('device')} with admin access, for monitoring: it holds no units, and "
                "this driver prepares sessions only. Claim units instead, without adminAccess"
            )
        consumed = (result.get("consumedCapacity") or {}).get(UNITS_CAPACITY)
        if consumed is None:
            # a whole device: the scheduler would give it to nobody else
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
    return ClaimAllocation(str(pods[0]["name"]), str(pods[0]["uid"]), tuple(devices), units)


class PreparedClaim(BaseModel):
    """A claim that the kubelet had prepared."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    namespace: str
    name: str
    uid: str
    pod: str
    """Name of the pod that the claim is reserved for."""
    held: dict[str, tuple[str, ...]]
    """GPU's UUID -> ids of the devices that stand for the claim's units."""
    devices: tuple[AllocatedDevice, ...]
    """What the kubelet was told."""

    @property
    def folder(self) -> str:
        """The name of the folder that the pod has mounted."""
        return claim_folder(self.namespace, self.name)

    @property
    def ids(self) -> frozenset[str]:
        """The ids of all its GPUs."""
        return frozenset(id for ids in self.held.values() for id in ids)


class PreparedClaims:
    """Keeps them in memory and on the disk."""

    def __init__(self, folder: Path) -> None:
        """Reads the files. One that cannot be read is left aside, and the log says so. Raises OSError."""
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._claims: dict[str, PreparedClaim] = {}
        for path in sorted(folder.glob("*.json")):
            try:
                claim = PreparedClaim.model_validate_json(regular_content(path))
            except (OSError, ValueError) as error:
                log.error(
                    "the prepared claim in %s cannot be read; only the record of its session says what it holds: %s",
                    path,
                    error,
                )
            else:
                self._claims[claim.uid] = claim

    def get(self, uid: str) -> PreparedClaim | None:
        """The claim of that uid, if it is prepared."""
        return self._claims.get(uid)

    def put(self, claim: PreparedClaim) -> None:
        """Keep a claim, on the disk first. Raises OSError, and has changed nothing then."""
        replace_file(self._path(claim.uid), claim.model_dump_json().encode())
        self._claims[claim.uid] = claim

    def remove(self, uid: str) -> None:
        """Forget a claim. Raises OSError, and has changed nothing then."""
        self._path(uid).unlink(missing_ok=True)
        sync_folder(self._folder)
        self._claims.pop(uid, None)

    @property
    def ids(self) -> frozenset[str]:
        """The ids of all prepared claims' devices."""
        return frozenset(id for claim in self._claims.values() for id in claim.ids)

    def without(self, held: Collection[str]) -> list[PreparedClaim]:
        """The claims of which none of these ids is."""
        return [claim for claim in self._claims.values() if claim.ids.isdisjoint(held)]

    def folder_name(self, ids: Iterable[str]) -> str:
        """The name of the folder for devices that were given together; of a claim's: the claim's folder."""
        wanted = frozenset(ids)
        for claim in self._claims.values():
            if not wanted.isdisjoint(claim.ids):
                return claim.folder
        return grant_name(wanted)

    def joined(self, handed: Handed, indices: Mapping[str, int]) -> Handed:
        """The kubelet's list with the claims' pods in it, which it leaves out: no container of theirs names the claim.

        `indices`: of the GPUs, by UUID.
        """
        by_pod: dict[PodKey, dict[str, Given]] = {key: dict(held) for key, held in handed.by_pod.items()}
        for claim in self._claims.values():
            held = by_pod.setdefault((claim.namespace, claim.pod), {})
            for gpu, ids in claim.held.items():
                resource = resource_name(indices.get(gpu, 0))
                held[resource] = (*held.get(resource, ()), frozenset(ids))
        return replace(handed, by_pod=by_pod)

    def _path(self, uid: str) -> Path:
        return self._folder / f"{short_name(uid)}.json"
