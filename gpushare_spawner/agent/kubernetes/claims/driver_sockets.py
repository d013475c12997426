"""The two sockets of a DRA driver. The kubelet finds the one for registration and connects to both; it is called by
nobody.

It watches its folder plugins_registry, also when it starts anew, so the agent has nothing to do then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import grpc.aio

from gpushare_spawner.agent.kubernetes.claims.dra_plugin import ClaimPlugin, DeviceHealth
from gpushare_spawner.agent.kubernetes.claims.probe import socket_paths
from gpushare_spawner.agent.kubernetes.grpc_socket import GrpcSocket
from gpushare_spawner.agent.kubernetes.kubelet import dra_health_pb2_grpc as health_services
from gpushare_spawner.agent.kubernetes.kubelet import dra_pb2_grpc as services
from gpushare_spawner.agent.kubernetes.kubelet import pluginregistration_pb2 as messages
from gpushare_spawner.agent.kubernetes.kubelet import pluginregistration_pb2_grpc as registration
from gpushare_spawner.model.kubernetes import DRIVER

log = logging.getLogger(__name__)

SUPPORTED = ("v1.DRAPlugin", "v1alpha1.DRAResourceHealth")
"""Names of services, by which a kubelet chooses (kubernetes pkg/kubelet/cm/dra/plugin)."""
LOOK_EVERY = 2.0
"""Seconds between looks whether the sockets are still there: one stat each."""


class DriverSockets(registration.RegistrationServicer):
    """Keeps them served."""

    def __init__(
        self, plugin: ClaimPlugin, health: DeviceHealth, kubelet_dir: Path, registered: Callable[[], None]
    ) -> None:
        """`registered` is called each time that a kubelet has taken the driver up."""
        self._plugin = plugin
        self._health = health
        self._registered = registered
        # the kubelet connects to the first as soon as it sees the second
        self._paths = socket_paths(kubelet_dir)
        self._sockets: list[GrpcSocket] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve, and keep serving. Raises OSError or RuntimeError where the sockets cannot be made."""
        await self._serve()
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Stop serving. The sockets go; 30 s later the kubelet removes the slice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._stop()

    async def GetInfo(self, request: messages.InfoRequest, context: grpc.aio.ServicerContext) -> messages.PluginInfo:
        return messages.PluginInfo(
            type="DRAPlugin", name=DRIVER, endpoint=str(self._paths[0]), supported_versions=SUPPORTED
        )

    async def NotifyRegistrationStatus(
        self, request: messages.RegistrationStatus, context: grpc.aio.ServicerContext
    ) -> messages.RegistrationStatusResponse:
        if request.plugin_registered:
            log.info("%s is registered with the kubelet as a DRA driver", DRIVER)
            self._registered()
        else:
            log.error("the kubelet rejects the DRA driver %s: %s", DRIVER, request.error)
        return messages.RegistrationStatusResponse()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            # a try that failed has left one of them, or none
            complete = len(self._sockets) == len(self._paths)
            if complete and all(one.is_there for one in self._sockets):
                continue
            if complete:
                log.warning("a socket of the DRA driver was removed; both are made again")
            try:
                await self._stop()
                await self._serve()
            except Exception:
                # without a next try the node would prepare no claim until the agent starts anew
                log.exception("the sockets of the DRA driver cannot be made; retrying")

    async def _serve(self) -> None:
        service = grpc.aio.server()
        services.add_DRAPluginServicer_to_server(self._plugin, service)  # type: ignore[no-untyped-call]
        health_services.add_DRAResourceHealthServicer_to_server(self._health, service)  # type: ignore[no-untyped-call]
        register = grpc.aio.server()
        registration.add_RegistrationServicer_to_server(self, register)  # type: ignore[no-untyped-call]
        for path, server in zip(self._paths, (service, register), strict=True):
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._sockets.append(await GrpcSocket.serve(path, server))

    async def _stop(self) -> None:
        # the registration's first: then the kubelet does not connect again
        while self._sockets:
            await self._sockets.pop().close()
