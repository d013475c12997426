"""The claims that are prepared on this node, one JSON file each: the kubelet does not say them again to a new agent.

A prepared claim holds devices by their numbers, as a pod of the device plugin does; here the agent chooses them itself.
So everything that counts and follows devices is the same for both.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from gpushare_spawner.agent.kubernetes.claims.claim_allocation import AllocatedDevice
from gpushare_spawner.agent.kubernetes.devices.grant_folders import grant_name
from gpushare_spawner.agent.kubernetes.devices.pod_resources import Given, Handed, PodKey
from gpushare_spawner.agent.state.session_records import short_name
from gpushare_spawner.agent.state.state_file import regular_content, replace_file, sync_folder
from gpushare_spawner.model.kubernetes import claim_folder, resource_name

log = logging.getLogger(__name__)


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
