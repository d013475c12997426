"""GPUs for pods by claims: prepares and unprepares them, and keeps the node's ResourceSlice, sockets and health.

A share is a claim that the pod names and none of its containers does. So Kubernetes resizes the container's CPU and
memory in place, which it refuses for a container with a claim; and the driver puts nothing into the container: the
spawner writes environment and mounts into the pod, by what the node's report says. CDI, by which a driver could do it,
is passed over without an error by containerd before 1.7.2.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.kubernetes.api import ApiFailure, ClusterApi
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
from gpushare_spawner.agent.kubernetes.devices.owners import DevicesRefused, HeldDevices, devices_for
from gpushare_spawner.agent.kubernetes.devices.pod_resources import Handed
from gpushare_spawner.agent.node import Node
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.model.kubernetes import device_name

log = logging.getLogger(__name__)

UNHEALTHY, CORDONED = "unhealthy", "cordoned"
"""Values of the taint of a GPU."""


FORGOTTEN_EVERY = 30.0
"""Seconds between looks for claims that the kubelet will never have unprepared. Of those that are gone from the API in
two looks the containers have ended: a pod's end takes 30 s by default."""


class ClaimDriver:
    """The agent as a DRA driver. cluster_agent.py runs it in the place of device plugins."""

    def __init__(
        self,
        node: Node,
        api: ClusterApi,
        held: HeldDevices,
        prepared: PreparedClaims,
        kubelet_dir: Path,
        *,
        taints: bool,
        ask_kubelet: Callable[[], Awaitable[None]],
        changed: Callable[[], None],
        end: Callable[[Session, str], None],
        registered: Callable[[], None],
    ) -> None:
        """`ask_kubelet` reads its assignments now. `changed` has sessions and claims brought together soon. `end` ends
        a session. `taints`: see `resource_slice`."""
        self._node = node
        self._api = api
        self._held = held
        self._prepared = prepared
        self._ask_kubelet = ask_kubelet
        self._changed = changed
        self._end = end
        self._one_by_one = asyncio.Lock()
        name = node.settings.name
        self._slice = PublishedSlice(api, name, self.offered, held.unit_size, taints)
        self._health = DeviceHealth(name, self._healthy)
        self._sockets = DriverSockets(ClaimPlugin(self.prepare, self.unprepare), self._health, kubelet_dir, registered)
        self._last: list[OfferedGpu] = []
        self._gone: frozenset[str] = frozenset()
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve the kubelet, and publish the slice."""
        await self._sockets.start()
        self._slice.start()
        self._looking = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """Stop; pods run on."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._slice.close()
        await self._sockets.close()

    def look(self) -> bool:
        """See whether something else is to be offered, and publish it then; whether it is."""
        self._health.look()
        now = self.offered()
        if now == self._last:
            return False
        self._last = now
        self._slice.changed()
        return True

    def joined(self, handed: Handed) -> Handed:
        """The kubelet's list with the pods of prepared claims in it."""
        return self._prepared.joined(handed, {uuid: gpu.index for uuid, gpu in self._node.gpus.items()})

    def offered(self) -> list[OfferedGpu]:
        """The GPUs as the scheduler is to see them now: their capacity rises while sessions lend units."""
        claimed, size = self._prepared.ids, self._held.unit_size
        return [
            OfferedGpu(gpu, self._held.claimable(uuid, claimed) * size, self._trouble(gpu))
            for uuid, gpu in self._node.gpus.items()
        ]

    async def prepare(self, key: ClaimKey) -> tuple[AllocatedDevice, ...]:
        """Give a claim's session its folder, and count its units. Raises Refused."""
        async with self._one_by_one:
            known = self._prepared.get(key.uid)
            if known is not None:
                # the kubelet asks again after a failure of its own: what a session has in its folder stays
                owners.make(self._held.folder / known.folder)
                return known.devices
            try:
                claim = await self._api.get(key.path)
            except ApiFailure as failure:
                raise DevicesRefused(f"{key} cannot be read: {failure}") from None
            allocation = claim_allocation(claim, key, self._node.settings.name, self._node.gpus)
            # another plugin for this GPU may have come a moment ago
            await self._ask_kubelet()
            # from here on at one stroke: what is counted now is what is given
            held: dict[str, tuple[str, ...]] = {}
            for uuid, units in allocation.units.items():
                if (trouble := self._node.health.trouble(uuid)) is not None:
                    raise DevicesRefused(trouble)
                wanted, free = devices_for(units, self._held.unit_size), self._held.free_ids(uuid, self._prepared.ids)
                if len(free) < wanted:
                    raise DevicesRefused(
                        f"GPU {self._node.gpus[uuid].index} has {len(free) * self._held.unit_size} free units and "
                        f"{key} has {units}: sessions that had lent units work again. The kubelet tries again"
                    )
                held[uuid] = tuple(free[:wanted])
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
                raise DevicesRefused(f"{key} cannot be written down: {error}") from None
            granted = []
            try:
                for uuid, ids in held.items():
                    granted.append(self._held.grant(uuid, ids))
            except DevicesRefused:
                # first the grants: their folder is named after the prepared claim
                for grant in granted:
                    self._held.forget(grant)
                self._prepared.remove(key.uid)
                raise
        log.info(
            "%s is prepared: %s", key, ", ".join(f"{units} units of {gpu}" for gpu, units in allocation.units.items())
        )
        self._changed()
        return prepared.devices

    async def unprepare(self, key: ClaimKey) -> None:
        """Free what a claim holds: its pod has ended. Raises Refused."""
        async with self._one_by_one:
            known = self._prepared.get(key.uid)
            if known is None:
                return
            try:
                self._prepared.remove(key.uid)
            except OSError as error:
                raise DevicesRefused(f"{key} cannot be forgotten: {error}") from None
            for uuid, ids in known.held.items():
                for session in self._held.holders(uuid, ids):
                    self._end(session, f"{key} was unprepared")
                self._held.settled(uuid, frozenset(ids))
            owners.remove(self._held.folder / known.folder)
        log.info("%s is unprepared", key)
        self._changed()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(FORGOTTEN_EVERY)
            try:
                await self._unprepare_forgotten()
            except Exception:
                log.exception("cannot look for claims that were forgotten; retrying")

    async def _unprepare_forgotten(self) -> None:
        """Free claims that are gone from the API: a kubelet that lost its state does not unprepare them."""
        gone = set()
        for claim in self._prepared.without(self._held.ids_of_known_pods()):
            key = ClaimKey(claim.namespace, claim.name, claim.uid)
            try:
                found = await self._api.get(key.path)
            except ApiFailure as failure:
                if failure.status != 404:
                    continue
                found = {}
            if (found.get("metadata") or {}).get("uid") != claim.uid:
                gone.add(claim.uid)
                if claim.uid in self._gone:
                    log.warning("%s is gone from the API, and the kubelet has not had it unprepared", key)
                    await self.unprepare(key)
        self._gone = frozenset(gone)

    def _healthy(self) -> dict[str, bool]:
        return {device_name(uuid): self._node.health.healthy(uuid) for uuid in self._node.gpus}

    def _trouble(self, gpu: Gpu) -> str | None:
        if not self._node.health.healthy(gpu.uuid):
            return UNHEALTHY
        cordoned = any(cordon.gpu in ("", gpu.uuid) for cordon in self._node.cordons.now)
        return CORDONED if cordoned else None
