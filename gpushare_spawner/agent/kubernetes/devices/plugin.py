"""Device plugins for the kubelet (API v1beta1): one plugin with one socket for each of the node's GPUs.

`DevicePlugin` answers the kubelet for one resource. `PluginSocket` serves the plugin before registering it, and
registers it again whenever the kubelet starts. `DevicePlugins` composes them for all GPUs. For GPUs through claims, see
claims/claim_driver.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.kubernetes.devices.cdi import CdiNames
from gpushare_spawner.agent.kubernetes.devices.container import ContainerResponses
from gpushare_spawner.agent.kubernetes.devices.owners import AllocatedDevices, DevicesRefused, preferred
from gpushare_spawner.agent.kubernetes.devices.pod_resources import KubeletAssignments, PodResources
from gpushare_spawner.agent.kubernetes.grpc_socket import GrpcSockets, Identity, News, socket_identity
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2 as messages
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2_grpc as services
from gpushare_spawner.agent.node import Node
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.background import Background
from gpushare_spawner.model.kubernetes.annotations import PREFIX
from gpushare_spawner.model.kubernetes.objects import resource_name

log = logging.getLogger(__name__)


HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"


def options() -> messages.DevicePluginOptions:
    """Return the plugin's options: the kubelet requests a preferred allocation, so the lowest IDs are used first."""
    return messages.DevicePluginOptions(get_preferred_allocation_available=True, pre_start_required=False)


class DevicePlugin(services.DevicePluginServicer):
    """Answers the kubelet for one GPU."""

    def __init__(
        self,
        resource: str,
        offered: Callable[[], list[str]],
        healthy: Callable[[], bool],
        grant: Callable[[list[str]], Awaitable[messages.ContainerAllocateResponse]],
    ) -> None:
        """`offered` returns the IDs to offer now.

        `grant` grants devices to a container and can raise DevicesRefused.
        """
        self.resource = resource
        self._offered = offered
        self._healthy = healthy
        self._grant = grant
        self._news = News()
        self._reported: tuple[list[str], bool] = ([], True)
        self.poll()

    @property
    def is_heard(self) -> bool:
        """Whether the kubelet is connected to the list of devices."""
        return bool(self._news)

    def poll(self) -> bool:
        """Send the kubelet a new list if the devices or their health have changed. Return whether they have changed."""
        now = (self._offered(), self._healthy())
        if now == self._reported:
            return False
        log.debug("%s: %d devices, %s", self.resource, len(now[0]), HEALTHY if now[1] else UNHEALTHY)
        self._reported = now
        self._news.notify()
        return True

    async def GetDevicePluginOptions(
        self, request: messages.Empty, context: grpc.aio.ServicerContext
    ) -> messages.DevicePluginOptions:
        return options()

    async def ListAndWatch(
        self, request: messages.Empty, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[messages.ListAndWatchResponse]:
        """Send the whole list initially and after each change."""
        async with contextlib.aclosing(self._news.changes()) as changes:
            async for _ in changes:
                ids, healthy = self._reported
                health = HEALTHY if healthy else UNHEALTHY
                yield messages.ListAndWatchResponse(devices=[messages.Device(ID=id, health=health) for id in ids])

    async def GetPreferredAllocation(
        self, request: messages.PreferredAllocationRequest, context: grpc.aio.ServicerContext
    ) -> messages.PreferredAllocationResponse:
        return messages.PreferredAllocationResponse(
            container_responses=[
                messages.ContainerPreferredAllocationResponse(
                    deviceIDs=preferred(
                        container.available_deviceIDs, container.must_include_deviceIDs, container.allocation_size
                    )
                )
                for container in request.container_requests
            ]
        )

    async def Allocate(
        self, request: messages.AllocateRequest, context: grpc.aio.ServicerContext
    ) -> messages.AllocateResponse:
        """Grant devices. A failure becomes the pod's UnexpectedAdmissionError, which contains its message."""
        response = messages.AllocateResponse()
        try:
            for container in request.container_requests:
                answer = await self._grant(list(container.devices_ids))
                response.container_responses.append(answer)
        except DevicesRefused as refusal:
            log.warning("%s: rejected the kubelet's request: %s", self.resource, refusal)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"gpushare: {refusal}")
        self.poll()
        return response

    async def PreStartContainer(
        self, request: messages.PreStartContainerRequest, context: grpc.aio.ServicerContext
    ) -> messages.PreStartContainerResponse:
        return messages.PreStartContainerResponse()


API_VERSION = "v1beta1"
KUBELET_SOCKET = "kubelet.sock"
POLL_EVERY = 0.5
"""Seconds between checks for a restart of the kubelet: one stat call each."""
ANSWER_WITHIN = 5.0
"""Seconds within which the kubelet must answer a registration."""
LONGEST_PAUSE = 5.0
HEARD_WITHIN = 15.0
"""Seconds after a registration within which the kubelet must connect.

It dials back only once, within 10 s: a plugin that it could not reach, or that has lost its stream, has no healthy
devices until it registers again.
"""


class PluginSocket(Background):
    """Keeps one device plugin served and registered."""

    def __init__(self, plugin: DevicePlugin, folder: Path, name: str, registered: Callable[[], None]) -> None:
        """`folder`: the kubelet's folder for plugins.

        `name`: the socket's name. `registered`: called at each registration.
        """
        self._plugin = plugin
        self._folder = folder
        self._name = name
        self._registered_callback = registered
        self._served = GrpcSockets()
        self._with: Identity | None = None
        self._trouble = ""

    async def close(self) -> None:
        """Stop serving. The kubelet then lists no healthy devices."""
        await super().close()
        await self._served.close()

    async def _run(self) -> None:
        pause = POLL_EVERY
        heard_at = _now()
        while True:
            kubelet = socket_identity(self._folder / KUBELET_SOCKET)
            if kubelet is None:
                self._complain(f"{self._folder / KUBELET_SOCKET} does not exist: waiting for the kubelet")
            if kubelet is None or self._plugin.is_heard:
                heard_at = _now()
            unheard = _now() - heard_at >= HEARD_WITHIN
            if unheard and not self._trouble:
                log.warning("the kubelet does not list the devices of %s; registering again", self._plugin.resource)
            if kubelet is not None and (unheard or kubelet != self._with or not self._served.are_there):
                try:
                    await self._serve()
                    await self._register()
                    # Compare with this kubelet, because another kubelet may have started meanwhile.
                    self._with = kubelet
                    self._complain("")
                    self._registered_callback()
                    pause, heard_at = POLL_EVERY, _now()
                except grpc.aio.AioRpcError as error:
                    pause = self._failed(error.details(), pause)
                except Exception as error:
                    # Catch any error, because without another attempt the node would have no GPUs until the agent
                    # restarts.
                    pause = self._failed(error, pause)
            await asyncio.sleep(pause)

    def _failed(self, reason: object, pause: float) -> float:
        """Log a failure. Return the next pause in seconds."""
        self._complain(f"{self._plugin.resource} cannot be registered with the kubelet: {reason}")
        return min(2 * pause, LONGEST_PAUSE)

    async def _serve(self) -> None:
        if self._served.are_there:
            return
        server = grpc.aio.server()
        services.add_DevicePluginServicer_to_server(self._plugin, server)  # type: ignore[no-untyped-call]
        await self._served.serve({self._folder / self._name: server})

    async def _register(self) -> None:
        request = messages.RegisterRequest(
            version=API_VERSION, endpoint=self._name, resource_name=self._plugin.resource, options=options()
        )
        async with grpc.aio.insecure_channel(f"unix://{self._folder / KUBELET_SOCKET}") as channel:
            stub = services.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            await stub.Register(request, timeout=ANSWER_WITHIN)

    def _complain(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            log.warning("%s", trouble)
        elif self._trouble and not trouble:
            log.info("%s is registered with the kubelet", self._plugin.resource)
        self._trouble = trouble


def _now() -> float:
    return asyncio.get_running_loop().time()


class DevicePlugins:
    """The agent as device plugins. cluster_agent.py runs either these plugins or a DRA driver."""

    def __init__(
        self,
        node: Node,
        allocated: AllocatedDevices,
        allocation: ContainerResponses,
        cdi: CdiNames,
        folder: Path,
        kubelet: PodResources,
        end: Callable[[Session, str], None],
        registered: Callable[[], None],
    ) -> None:
        """`folder`: the kubelet's folder for plugins.

        `end` ends a session. `registered`: called at each registration.
        """
        self._rounds = node.rounds
        self._allocated = allocated
        self._allocation = allocation
        self._cdi = cdi
        self._kubelet = kubelet
        self._end = end
        self._plugins = [self._plugin(gpu) for gpu in node.gpus.values()]
        self._sockets = [
            PluginSocket(plugin, folder, f"gpushare-{plugin.resource.removeprefix(PREFIX)}.sock", registered)
            for plugin in self._plugins
        ]

    async def start(self) -> None:
        """Serve the plugins, and register them."""
        await self._cdi.read()
        self.poll()
        for socket in self._sockets:
            socket.start()

    async def close(self) -> None:
        """Stop serving."""
        for socket in reversed(self._sockets):
            await socket.close()

    def poll(self) -> bool:
        """Send the kubelet the devices that have changed. Return whether any have changed."""
        news = [plugin.poll() for plugin in self._plugins]
        return any(news)

    def joined(self, assignments: KubeletAssignments) -> KubeletAssignments:
        """Return the kubelet's list, which is complete."""
        return assignments

    def _plugin(self, gpu: Gpu) -> DevicePlugin:
        return DevicePlugin(
            resource_name(gpu.index),
            offered=lambda: self._allocated.offered(gpu.uuid),
            healthy=lambda: self._rounds.healthy(gpu.uuid),
            grant=lambda devices: self._grant(gpu, devices),
        )

    async def _grant(self, gpu: Gpu, devices: list[str]) -> messages.ContainerAllocateResponse:
        # another plugin for this GPU may have appeared
        await self._kubelet.once()
        cdi_name = await self._cdi.name(gpu.uuid)
        # There is no await from here on, so the counts stay valid.
        if (trouble := self._rounds.trouble(gpu.uuid)) is not None:
            raise DevicesRefused(trouble)
        self._allocated.check(gpu.uuid, devices)
        for session in self._allocated.holders(gpu.uuid, devices):
            self._end(session, "the kubelet gave its devices to another pod")
        grant = self._allocated.grant(gpu.uuid, devices)
        self._kubelet.soon()
        return self._allocation.answer(gpu, self._allocated.folder_of(grant), cdi_name)
