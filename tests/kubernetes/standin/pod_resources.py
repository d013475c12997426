"""The kubelet's PodResources API: which container holds which devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from gpushare_spawner.agent.kubernetes.kubelet import podresources_pb2 as messages
from gpushare_spawner.agent.kubernetes.kubelet import podresources_pb2_grpc as services

from .devices import Devices

SOCKET = "kubelet.sock"
BLIND_SECONDS = 1.0
"""After a kubelet's start List is empty for about this long, whatever pods hold."""

Pods = Callable[[], list[dict[str, Any]]]


class PodResourcesSocket(services.PodResourcesListerServicer):
    """`pods` gives the pods on the node that have not ended."""

    def __init__(self, folder: Path, devices: Devices, pods: Pods) -> None:
        self._folder = folder
        self._devices = devices
        self._pods = pods
        self._server: grpc.aio.Server | None = None
        self._sees_from = 0.0

    async def start(self, blind: float) -> None:
        """`blind`: seconds for which List is empty."""
        self._sees_from = asyncio.get_running_loop().time() + blind
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / SOCKET).unlink(missing_ok=True)
        self._server = grpc.aio.server()
        services.add_PodResourcesListerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{self._folder / SOCKET}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    async def List(self, request: Any, context: Any) -> messages.ListPodResourcesResponse:
        if asyncio.get_running_loop().time() < self._sees_from:
            return messages.ListPodResourcesResponse()
        return messages.ListPodResourcesResponse(pod_resources=[self._said(pod) for pod in self._pods()])

    async def Get(self, request: Any, context: Any) -> messages.GetPodResourcesResponse:
        for pod in self._pods():
            metadata = pod["metadata"]
            if (metadata["namespace"], metadata["name"]) == (request.pod_namespace, request.pod_name):
                return messages.GetPodResourcesResponse(pod_resources=self._said(pod))
        text = f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
        await context.abort(grpc.StatusCode.UNKNOWN, text)
        raise AssertionError("abort raises")

    async def GetAllocatableResources(self, request: Any, context: Any) -> messages.AllocatableResourcesResponse:
        return messages.AllocatableResourcesResponse(
            devices=[
                messages.ContainerDevices(resource_name=resource, device_ids=sorted(offer.healthy))
                for resource, offer in self._devices.offers.items()
                if offer.healthy
            ]
        )

    def _said(self, pod: dict[str, Any]) -> messages.PodResources:
        metadata = pod["metadata"]
        held = self._devices.held.get(metadata["uid"], {})
        containers = [
            messages.ContainerResources(
                name=container["name"],
                devices=[
                    messages.ContainerDevices(resource_name=resource, device_ids=sorted(ids))
                    for resource, ids in held.get(container["name"], {}).items()
                ],
            )
            for container in pod["spec"]["containers"]
        ]
        return messages.PodResources(name=metadata["name"], namespace=metadata["namespace"], containers=containers)
