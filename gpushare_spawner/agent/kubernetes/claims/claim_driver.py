"""GPUs for pods through claims: handles claims, and maintains the node's ResourceSlice, sockets and health.

The pod names the claim of a share, and none of its containers does. Therefore Kubernetes can resize the container's CPU
and memory in place, which it refuses for a container with a claim. The driver adds nothing to the container: the
spawner takes environment and mounts from the node's report and writes them into the pod. The driver could add them
through CDI, but containerd before 1.7.2 silently ignores CDI names. For GPUs through device plugins, see
devices/plugin.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.kubernetes.claims.allocation import (
    AllocatedDevice,
    ClaimKey,
    PreparedClaim,
    PreparedClaims,
    claim_allocation,
)
from gpushare_spawner.agent.kubernetes.claims.plugin import ClaimPlugin, DeviceHealth, DriverSockets
from gpushare_spawner.agent.kubernetes.claims.slices import OfferedGpu, PublishedSlice
from gpushare_spawner.agent.kubernetes.devices import owners
from gpushare_spawner.agent.kubernetes.devices.owners import AllocatedDevices, DevicesRefused, devices_for
from gpushare_spawner.agent.kubernetes.devices.pod_resources import KubeletAssignments, PodResources
from gpushare_spawner.agent.kubernetes.settings import ClusterSettings
from gpushare_spawner.agent.node import Node
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.background import Repeated
from gpushare_spawner.clients.api import ApiFailure, ClusterApi
from gpushare_spawner.model.kubernetes.objects import device_name

log = logging.getLogger(__name__)

UNHEALTHY, CORDONED = "unhealthy", "cordoned"
"""Values of a GPU's taint."""


FORGOTTEN_EVERY = 30.0
"""Seconds between checks for claims that the kubelet will never unprepare.

If a claim is missing from the API in two checks, its containers have ended: a pod's termination takes 30 s by default.
"""


class ClaimDriver:
    """The agent as a DRA driver. cluster_agent.py runs either this driver or device plugins."""

    def __init__(
        self,
        node: Node,
        api: ClusterApi,
        allocated: AllocatedDevices,
        prepared: PreparedClaims,
        settings: ClusterSettings,
        kubelet: PodResources,
        end: Callable[[Session, str], None],
        registered: Callable[[], None],
    ) -> None:
        """`end` ends a session. `registered` is called each time a kubelet registers the driver."""
        self._node = node
        self._api = api
        self._allocated = allocated
        self._prepared = prepared
        self._kubelet = kubelet
        self._end = end
        self._claims_lock = asyncio.Lock()
        name = node.settings.name
        self._slice = PublishedSlice(api, name, self.offered, allocated.unit_size, settings.taints)
        self._health = DeviceHealth(name, self._healthy)
        plugin = ClaimPlugin(self.prepare, self.unprepare)
        self._sockets = DriverSockets(plugin, self._health, settings.kubelet_dir, registered)
        self._last: list[OfferedGpu] = []
        self._gone: frozenset[str] = frozenset()
        self._checking = Repeated(FORGOTTEN_EVERY, self._unprepare_forgotten, log, "cannot check for forgotten claims")

    async def start(self) -> None:
        """Serve the kubelet, and publish the slice."""
        await self._sockets.start()
        self._slice.start()
        self._checking.start()

    async def close(self) -> None:
        """Stop; pods keep running."""
        await self._checking.close()
        await self._slice.close()
        await self._sockets.close()

    def poll(self) -> bool:
        """Publish the GPUs to offer if they have changed. Return whether they have changed."""
        self._health.poll()
        now = self.offered()
        if now == self._last:
            return False
        self._last = now
        self._slice.changed()
        return True

    def joined(self, assignments: KubeletAssignments) -> KubeletAssignments:
        """Return the kubelet's list with the pods of prepared claims added."""
        return self._prepared.joined(assignments, {uuid: gpu.index for uuid, gpu in self._node.gpus.items()})

    def offered(self) -> list[OfferedGpu]:
        """Return the GPUs to offer to the scheduler now: their capacity rises while sessions lend units."""
        claimed, size = self._prepared.ids, self._allocated.unit_size
        return [
            OfferedGpu(gpu, self._allocated.claimable(uuid, claimed) * size, self._trouble(gpu))
            for uuid, gpu in self._node.gpus.items()
        ]

    async def prepare(self, key: ClaimKey) -> tuple[AllocatedDevice, ...]:
        """Create the folder of a claim's session, and reserve its units. Raises DevicesRefused."""
        async with self._claims_lock:
            previous = self._prepared.get(key.uid)
            if previous is not None:
                # The kubelet repeats the request after a failure of its own. The session's files in the folder stay.
                owners.make(self._allocated.folder / previous.folder)
                return previous.devices
            try:
                claim = await self._api.get(key.path)
            except ApiFailure as failure:
                raise DevicesRefused(f"{key} cannot be read: {failure}") from None
            allocation = claim_allocation(claim, key, self._node.settings.name, self._node.gpus)
            # another plugin for this GPU may have appeared
            await self._kubelet.once()
            # There is no await from here on, so the counts stay valid.
            held: dict[str, tuple[str, ...]] = {}
            for uuid, units in allocation.units.items():
                if (trouble := self._node.rounds.trouble(uuid)) is not None:
                    raise DevicesRefused(trouble)
                count, free = (
                    devices_for(units, self._allocated.unit_size),
                    self._allocated.free_ids(uuid, self._prepared.ids),
                )
                if len(free) < count:
                    raise DevicesRefused(
                        f"GPU {self._node.gpus[uuid].index} has {len(free) * self._allocated.unit_size} free units and "
                        f"{key} has {units}: sessions that had lent units work again. The kubelet tries again"
                    )
                held[uuid] = tuple(free[:count])
            prepared = PreparedClaim(
                namespace=key.namespace,
                name=key.name,
                uid=key.uid,
                pod=allocation.pod,
                held=held,
                devices=allocation.devices,
            )
            try:
                self._prepared.put(prepared)
            except OSError as error:
                raise DevicesRefused(f"{key} cannot be recorded: {error}") from None
            granted = []
            try:
                for uuid, ids in held.items():
                    granted.append(self._allocated.grant(uuid, ids))
            except DevicesRefused:
                # Drop the grants first, because their folder has the name of the prepared claim.
                for grant in granted:
                    self._allocated.forget(grant)
                self._prepared.remove(key.uid)
                raise
        log.info(
            "%s is prepared: %s", key, ", ".join(f"{units} units of {gpu}" for gpu, units in allocation.units.items())
        )
        self._kubelet.soon()
        return prepared.devices

    async def unprepare(self, key: ClaimKey) -> None:
        """Free the devices of an ended pod's claim. Raises DevicesRefused."""
        async with self._claims_lock:
            claim = self._prepared.get(key.uid)
            if claim is None:
                return
            try:
                self._prepared.remove(key.uid)
            except OSError as error:
                raise DevicesRefused(f"the record of {key} cannot be removed: {error}") from None
            for uuid, ids in claim.held.items():
                for session in self._allocated.holders(uuid, ids):
                    self._end(session, f"{key} was unprepared")
                self._allocated.drop_pending(uuid, frozenset(ids))
            owners.remove(self._allocated.folder / claim.folder)
        log.info("%s is unprepared", key)
        self._kubelet.soon()

    async def _unprepare_forgotten(self) -> None:
        """Free claims that no longer exist in the API: a kubelet that has lost its state does not unprepare them."""
        gone = set()
        for claim in self._prepared.without(self._allocated.ids_of_visible_pods()):
            key = ClaimKey(claim.namespace, claim.name, claim.uid)
            try:
                stored = await self._api.get(key.path)
            except ApiFailure as failure:
                if failure.status != 404:
                    continue
                stored = {}
            if (stored.get("metadata") or {}).get("uid") != claim.uid:
                gone.add(claim.uid)
                if claim.uid in self._gone:
                    log.warning("%s no longer exists in the API, and the kubelet did not unprepare it", key)
                    await self.unprepare(key)
        self._gone = frozenset(gone)

    def _healthy(self) -> dict[str, bool]:
        return {device_name(uuid): self._node.rounds.healthy(uuid) for uuid in self._node.gpus}

    def _trouble(self, gpu: Gpu) -> str | None:
        if not self._node.rounds.healthy(gpu.uuid):
            return UNHEALTHY
        cordoned = any(cordon.gpu in ("", gpu.uuid) for cordon in self._node.cordons.now)
        return CORDONED if cordoned else None
