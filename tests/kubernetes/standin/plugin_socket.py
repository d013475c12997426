"""The kubelet's side of the device plugin API: plugins register on its socket, and it dials back to theirs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2 as messages
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2_grpc as services

from .devices import Devices, allocation_failed
from .quantities import quantity

log = logging.getLogger(__name__)

API_VERSION = "v1beta1"
SOCKET = "kubelet.sock"


@dataclass
class Plugin:
    """A registered plugin and its connection."""

    resource: str
    channel: grpc.aio.Channel
    prefers: bool
    stream: asyncio.Task[None] | None = None

    @property
    def stub(self) -> Any:
        return services.DevicePluginStub(self.channel)  # type: ignore[no-untyped-call]


class PluginSocket(services.RegistrationServicer):
    """Serves `kubelet.sock` in the folder; like a kubelet, it deletes all other sockets there when it starts."""

    def __init__(self, folder: Path, devices: Devices, changed: Callable[[], None]) -> None:
        self._folder = folder
        self._devices = devices
        self._changed = changed
        self._server: grpc.aio.Server | None = None
        self._plugins: dict[str, Plugin] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.iterdir():
            if left.is_socket():
                left.unlink()
        self._server = grpc.aio.server()
        services.add_RegistrationServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{self._folder / SOCKET}")
        await self._server.start()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for plugin in self._plugins.values():
            await plugin.channel.close()
        self._plugins.clear()
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    async def Register(self, request: messages.RegisterRequest, context: Any) -> messages.Empty:
        if request.version != API_VERSION:
            text = f"requested API version {request.version!r} is not supported by kubelet, which has {API_VERSION}"
            await context.abort(grpc.StatusCode.UNKNOWN, text)
        domain, slash, name = request.resource_name.partition("/")
        if not (slash and domain and name) or domain.endswith("kubernetes.io"):
            text = f"the ResourceName {request.resource_name!r} is invalid"
            await context.abort(grpc.StatusCode.UNKNOWN, text)
        # the kubelet dials back at once, whether or not the plugin has had its answer
        task = asyncio.create_task(self._follow(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return messages.Empty()

    async def _follow(self, request: messages.RegisterRequest) -> None:
        resource = request.resource_name
        channel = grpc.aio.insecure_channel(f"unix:{self._folder / request.endpoint}")
        plugin = Plugin(resource, channel, request.options.get_preferred_allocation_available)
        try:
            options = await plugin.stub.GetDevicePluginOptions(messages.Empty(), timeout=10)
            plugin.prefers = options.get_preferred_allocation_available
            self._plugins[resource] = plugin
            async for message in plugin.stub.ListAndWatch(messages.Empty()):
                states = {device.ID: device.health == "Healthy" for device in message.devices}
                healthy = [one for one, good in states.items() if good]
                unhealthy = [one for one, good in states.items() if not good]
                self._devices.offered(resource, healthy, unhealthy)
                self._changed()
        except grpc.aio.AioRpcError as error:
            log.info("the plugin of %s has gone: %s", resource, error.code())
        finally:
            # one that was replaced leaves nothing behind
            if self._plugins.get(resource) is plugin:
                del self._plugins[resource]
                self._devices.plugin_gone(resource)
                self._changed()
            with contextlib.suppress(Exception):
                await channel.close()

    async def allocate(self, pod: dict[str, Any], container: dict[str, Any]) -> messages.ContainerAllocateResponse:
        """Devices for a container, for all its resources: what its plugins said. Raises AdmissionError."""
        uid, name = pod["metadata"]["uid"], container["name"]
        for resource, amount in ((container.get("resources") or {}).get("limits") or {}).items():
            if resource not in self._devices.offers:
                continue
            missing = self._devices.missing(uid, name, resource, int(quantity(amount)))
            if not missing:
                continue
            plugin = self._plugins.get(resource)
            if plugin is None:
                raise allocation_failed(f"endpoint {resource} has been stopped")
            ids = await self._choose(plugin, missing)
            answer = await self._ask(plugin, ids)
            self._devices.hold(pod, name, resource, ids, answer.SerializeToString())
        return self.given(uid, name)

    def given(self, uid: str, container: str) -> messages.ContainerAllocateResponse:
        """What the plugins said when the container got its devices; a container that restarts gets the same.

        Where the answers for several resources differ, one of them wins, and none knows which.
        """
        prefix = f"{uid}/{container}/"
        answers = [answer for key, answer in self._devices.given.items() if key.startswith(prefix)]
        random.shuffle(answers)
        given = messages.ContainerAllocateResponse()
        for answer in answers:
            given.MergeFromString(answer)
        return given

    async def _choose(self, plugin: Plugin, count: int) -> set[str]:
        async def prefer(free: list[str]) -> list[str]:
            asked = messages.ContainerPreferredAllocationRequest(available_deviceIDs=free, allocation_size=count)
            request = messages.PreferredAllocationRequest(container_requests=[asked])
            try:
                answer = await plugin.stub.GetPreferredAllocation(request, timeout=10)
            except grpc.aio.AioRpcError as error:
                raise allocation_failed(_worded(error)) from None
            return list(answer.container_responses[0].deviceIDs) if answer.container_responses else []

        return await self._devices.choose(plugin.resource, count, prefer if plugin.prefers else None)

    async def _ask(self, plugin: Plugin, ids: set[str]) -> messages.ContainerAllocateResponse:
        order = list(ids)
        request = messages.AllocateRequest(container_requests=[messages.ContainerAllocateRequest(devices_ids=order)])
        try:
            answer = await plugin.stub.Allocate(request, timeout=10)
        except grpc.aio.AioRpcError as error:
            raise allocation_failed(_worded(error)) from None
        if not answer.container_responses:
            raise allocation_failed(f"no containers return in allocation response {answer}")
        first: messages.ContainerAllocateResponse = answer.container_responses[0]
        return first


def _worded(error: grpc.aio.AioRpcError) -> str:
    code = "".join(part.capitalize() for part in error.code().name.split("_"))
    return f"rpc error: code = {code} desc = {error.details()}"
