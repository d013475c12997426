"""A GPU as the kubelet sees it: the device plugin API (v1beta1) for one resource."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio

from gpushare_spawner.agent.kubernetes.devices.device_ids import preferred
from gpushare_spawner.agent.kubernetes.devices.device_owners import Refused
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2 as messages
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2_grpc as services

log = logging.getLogger(__name__)

HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"


def options() -> messages.DevicePluginOptions:
    """What the kubelet is to ask for: the lowest ids are to be given first."""
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
        """`offered`: the ids now. `grant` gives devices to a container; it may raise Refused."""
        self.resource = resource
        self._offered = offered
        self._healthy = healthy
        self._grant = grant
        self._listeners: set[asyncio.Event] = set()
        self._said: tuple[list[str], bool] = ([], True)
        self.look()

    @property
    def is_heard(self) -> bool:
        """Whether the kubelet listens to what is offered."""
        return bool(self._listeners)

    def look(self) -> bool:
        """See whether something else is to be offered, and tell the kubelet then; whether it is."""
        now = (self._offered(), self._healthy())
        if now == self._said:
            return False
        log.debug("%s: %d devices, %s", self.resource, len(now[0]), HEALTHY if now[1] else UNHEALTHY)
        self._said = now
        for listener in self._listeners:
            listener.set()
        return True

    async def GetDevicePluginOptions(
        self, request: messages.Empty, context: grpc.aio.ServicerContext
    ) -> messages.DevicePluginOptions:
        return options()

    async def ListAndWatch(
        self, request: messages.Empty, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[messages.ListAndWatchResponse]:
        """The whole list at first, and with every change."""
        news = asyncio.Event()
        self._listeners.add(news)
        try:
            while True:
                news.clear()
                ids, healthy = self._said
                health = HEALTHY if healthy else UNHEALTHY
                yield messages.ListAndWatchResponse(devices=[messages.Device(ID=id, health=health) for id in ids])
                await news.wait()
        finally:
            self._listeners.discard(news)

    async def GetPreferredAllocation(
        self, request: messages.PreferredAllocationRequest, context: grpc.aio.ServicerContext
    ) -> messages.PreferredAllocationResponse:
        return messages.PreferredAllocationResponse(
            container_responses=[
                messages.ContainerPreferredAllocationResponse(
                    deviceIDs=preferred(one.available_deviceIDs, one.must_include_deviceIDs, one.allocation_size)
                )
                for one in request.container_requests
            ]
        )

    async def Allocate(
        self, request: messages.AllocateRequest, context: grpc.aio.ServicerContext
    ) -> messages.AllocateResponse:
        """A failure here is the pod's UnexpectedAdmissionError, with this message in it."""
        response = messages.AllocateResponse()
        try:
            for container in request.container_requests:
                answer = await self._grant(list(container.devices_ids))
                response.container_responses.append(answer)
        except Refused as refusal:
            log.warning("%s: rejected the kubelet's request: %s", self.resource, refusal)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"gpushare: {refusal}")
        self.look()
        return response

    async def PreStartContainer(
        self, request: messages.PreStartContainerRequest, context: grpc.aio.ServicerContext
    ) -> messages.PreStartContainerResponse:
        return messages.PreStartContainerResponse()
