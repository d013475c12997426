"""The kubelet's side of dynamic resource allocation: it finds plugins by their sockets, and has claims prepared.

As a kubelet does: it deletes all slices of its node when it starts, and those of a driver that is gone for some time;
a claim that cannot be prepared is tried again, and its pod waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from gpushare_spawner.agent.kubernetes.kubelet import dra_health_pb2 as health_messages
from gpushare_spawner.agent.kubernetes.kubelet import dra_health_pb2_grpc as health_services
from gpushare_spawner.agent.kubernetes.kubelet import dra_pb2 as messages
from gpushare_spawner.agent.kubernetes.kubelet import dra_pb2_grpc as services
from gpushare_spawner.agent.kubernetes.kubelet import pluginregistration_pb2 as registration_messages
from gpushare_spawner.agent.kubernetes.kubelet import pluginregistration_pb2_grpc as registration

from .claim_allocator import GROUP
from .client import ApiStatus, KubeClient, path
from .resource_claims import claim_names

log = logging.getLogger(__name__)

_LOOK_EVERY = 0.05
WANTED = ("v1.DRAPlugin", "v1alpha1.DRAResourceHealth")


class NotPrepared(Exception):
    """A claim of a pod cannot be prepared now."""


class ClaimPlugins:
    """Drivers that have registered, and the claims that they have prepared."""

    def __init__(self, node: str, client: KubeClient, folder: Path, grace: float) -> None:
        """`folder`: the kubelet's root. `grace`: seconds from a driver's end until its slices are deleted."""
        self.registry = folder / "plugins_registry"
        self.health: dict[str, dict[str, str]] = {}
        """By driver: the health of its devices by name."""
        self.calls: list[tuple[str, str]] = []
        """(prepare or unprepare, name of the claim), the oldest first."""
        self._node = node
        self._client = client
        self._grace = grace
        self._state = folder / "dra_manager_state"
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: dict[Path, asyncio.Task[None]] = {}
        self._look: asyncio.Task[None] | None = None
        for name in ("plugins_registry", "plugins"):
            (folder / name).mkdir(exist_ok=True)
        self.prepared: dict[str, list[dict[str, str]]] = {}
        """By the pod's uid: its claims, with their drivers."""

    async def start(self) -> None:
        if self._state.is_file():
            self.prepared = json.loads(self._state.read_text())
        await self._delete_slices(f"spec.nodeName={self._node}")
        self._look = asyncio.create_task(self._watch_folder())

    async def stop(self) -> None:
        tasks = [task for task in (self._look, *self._tasks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def prepare(self, pod: dict[str, Any]) -> None:
        """Have all claims of a pod prepared that are not. Raises NotPrepared."""
        uid, namespace = pod["metadata"]["uid"], pod["metadata"]["namespace"]
        ready = self.prepared.get(uid, [])
        for name in claim_names(pod):
            if any(claim["name"] == name for claim in ready):
                continue
            claim = await self._client.get(path("resourceclaims", namespace, name, group=GROUP))
            status = claim.get("status") or {}
            if not any(one["uid"] == uid for one in status.get("reservedFor") or []):
                raise NotPrepared(f"pod {pod['metadata']['name']} is not allowed to use resourceclaim {name}")
            drivers = {result["driver"] for result in status["allocation"]["devices"]["results"]}
            for driver in sorted(drivers):
                asked = messages.Claim(namespace=namespace, name=name, uid=claim["metadata"]["uid"])
                request = messages.NodePrepareResourcesRequest(claims=[asked])
                answer = await self._call(driver, "NodePrepareResources", name, request)
                if answer.claims[asked.uid].error:
                    raise NotPrepared(f"prepare failed for claim {name}: {answer.claims[asked.uid].error}")
                ready = [*ready, {"driver": driver, "namespace": namespace, "name": name, "uid": asked.uid}]
                self._keep(uid, ready)

    async def unprepare(self, uid: str) -> None:
        """Until each driver has answered: a driver that is gone is waited for."""
        while claims := self.prepared.get(uid):
            claim = claims[0]
            asked = messages.Claim(namespace=claim["namespace"], name=claim["name"], uid=claim["uid"])
            request = messages.NodeUnprepareResourcesRequest(claims=[asked])
            with contextlib.suppress(NotPrepared):
                answer = await self._call(claim["driver"], "NodeUnprepareResources", claim["name"], request)
                if not answer.claims[asked.uid].error:
                    self._keep(uid, claims[1:])
                    continue
            await asyncio.sleep(0.2)

    def _keep(self, uid: str, claims: list[dict[str, str]]) -> None:
        self.prepared[uid] = claims
        if not claims:
            del self.prepared[uid]
        self._state.write_text(json.dumps(self.prepared))

    async def _call(self, driver: str, method: str, claim: str, request: Any) -> Any:
        channel = self._channels.get(driver)
        if channel is None:
            raise NotPrepared(f"DRA driver {driver} is not registered")
        self.calls.append((method.removeprefix("Node").removesuffix("Resources").lower(), claim))
        stub = services.DRAPluginStub(channel)  # type: ignore[no-untyped-call]
        try:
            answer = await getattr(stub, method)(request, timeout=45)
        except grpc.aio.AioRpcError as error:
            raise NotPrepared(f"{method} failed: {error.details()}") from None
        if set(answer.claims) != {one.uid for one in request.claims}:
            raise NotPrepared(f"{method}: the driver {driver} left out a claim")
        return answer

    async def _watch_folder(self) -> None:
        while True:
            there = {entry for entry in self.registry.iterdir() if entry.is_socket()}
            for entry in there - self._tasks.keys():
                self._tasks[entry] = asyncio.create_task(self._serve(entry))
            for entry in self._tasks.keys() - there:
                self._tasks.pop(entry).cancel()
            for entry in [entry for entry, task in self._tasks.items() if task.done()]:
                del self._tasks[entry]
            await asyncio.sleep(_LOOK_EVERY)

    async def _serve(self, entry: Path) -> None:
        """Register a plugin, and follow it until it is gone."""
        driver = ""
        try:
            async with grpc.aio.insecure_channel(f"unix:{entry}") as channel:
                stub = registration.RegistrationStub(channel)  # type: ignore[no-untyped-call]
                info = await stub.GetInfo(registration_messages.InfoRequest(), timeout=1)
                status = registration_messages.RegistrationStatus(plugin_registered=True)
                if info.type != "DRAPlugin" or not set(WANTED) <= set(info.supported_versions):
                    status = registration_messages.RegistrationStatus(error=f"{info.supported_versions} not supported")
                else:
                    driver = info.name
                    self._channels[driver] = grpc.aio.insecure_channel(f"unix:{info.endpoint}")
                await stub.NotifyRegistrationStatus(status, timeout=1)
            if driver:
                await self._follow(driver)
        except grpc.aio.AioRpcError as error:
            log.info("the plugin at %s cannot be reached: %s", entry, error.code())
            await asyncio.sleep(_LOOK_EVERY)
        finally:
            channel = self._channels.pop(driver, None)
            if channel is not None:
                self.health.pop(driver, None)
                asyncio.get_running_loop().create_task(self._gone(driver, channel))

    async def _follow(self, driver: str) -> None:
        stub = health_services.DRAResourceHealthStub(self._channels[driver])  # type: ignore[no-untyped-call]
        async for message in stub.NodeWatchResources(health_messages.NodeWatchResourcesRequest()):
            self.health[driver] = {
                each.device.device_name: health_messages.HealthStatus.Name(each.health) for each in message.devices
            }

    async def _gone(self, driver: str, channel: grpc.aio.Channel) -> None:
        await channel.close()
        if self._look is None or self._look.done():
            return  # the kubelet itself has ended
        await asyncio.sleep(self._grace)
        if driver not in self._channels and not self._look.done():
            await self._delete_slices(f"spec.nodeName={self._node},spec.driver={driver}")

    async def _delete_slices(self, fields: str) -> None:
        with contextlib.suppress(ApiStatus, aiohttp.ClientError, OSError):
            for item in await self._client.list(path("resourceslices", group=GROUP), fields=fields):
                await self._client.delete(path("resourceslices", name=item["metadata"]["name"], group=GROUP))
