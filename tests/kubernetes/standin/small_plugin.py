"""The least that a kubelet takes for a device plugin; what it offers and answers can be changed while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2 as messages
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2_grpc as services


class SmallPlugin(services.DevicePluginServicer):
    """Start with ``async with``: it serves its socket in the kubelet's folder and registers."""

    def __init__(
        self, folder: Path, resource: str, ids: list[str], prefers_low: bool = True, endpoint: str = ""
    ) -> None:
        self.resource = resource
        self.endpoint = endpoint or resource.replace("/", "_") + ".sock"
        self.prefers_low = prefers_low
        self.allocated: list[list[str]] = []
        """The ids of each Allocate."""
        self.answer: Callable[[list[str]], dict[str, str]] = lambda ids: {"DEVICES": ",".join(sorted(ids))}
        """The environment for ids; an exception makes Allocate fail."""
        self._folder = folder
        self._ids, self._unhealthy = ids, set[str]()
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> SmallPlugin:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        # served before it registers: the kubelet dials back at once
        (self._folder / self.endpoint).unlink(missing_ok=True)
        self._server = grpc.aio.server()
        services.add_DevicePluginServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{self._folder / self.endpoint}")
        await self._server.start()
        async with grpc.aio.insecure_channel(f"unix:{self._folder}/kubelet.sock") as channel:
            request = messages.RegisterRequest(
                version="v1beta1", endpoint=self.endpoint, resource_name=self.resource, options=self._options()
            )
            await services.RegistrationStub(channel).Register(request, timeout=10)  # type: ignore[no-untyped-call]

    async def stop(self) -> None:
        """As when it is killed."""
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    async def offer(self, ids: list[str], unhealthy: set[str] | None = None) -> None:
        """From now on it has these."""
        async with self._changed:
            self._ids, self._unhealthy = ids, unhealthy or set()
            self._changed.notify_all()

    def _options(self) -> messages.DevicePluginOptions:
        return messages.DevicePluginOptions(get_preferred_allocation_available=self.prefers_low)

    async def GetDevicePluginOptions(self, request: Any, context: Any) -> messages.DevicePluginOptions:
        return self._options()

    async def ListAndWatch(self, request: Any, context: Any) -> AsyncIterator[messages.ListAndWatchResponse]:
        while True:
            yield messages.ListAndWatchResponse(
                devices=[
                    messages.Device(ID=one, health="Unhealthy" if one in self._unhealthy else "Healthy")
                    for one in self._ids
                ]
            )
            async with self._changed:
                await self._changed.wait()

    async def GetPreferredAllocation(self, request: Any, context: Any) -> messages.PreferredAllocationResponse:
        (asked,) = request.container_requests
        chosen = sorted(asked.available_deviceIDs)[: asked.allocation_size]
        response = messages.ContainerPreferredAllocationResponse(deviceIDs=chosen)
        return messages.PreferredAllocationResponse(container_responses=[response])

    async def Allocate(self, request: Any, context: Any) -> messages.AllocateResponse:
        (asked,) = request.container_requests
        ids = list(asked.devices_ids)
        environment = self.answer(ids)
        self.allocated.append(ids)
        response = messages.ContainerAllocateResponse(envs=environment)
        return messages.AllocateResponse(container_responses=[response])
