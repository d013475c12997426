"""The agent as a DRA plugin of the kubelet: the DRAPlugin API (v1), and the health of its devices (v1alpha1).

Answers gRPC only: claim_driver.py prepares claims, plugin.py serves this.

The two sockets of a DRA driver. The kubelet finds the one for registration and connects to both; it is called by
nobody.

It watches its folder plugins_registry, also when it starts anew, so the agent has nothing to do then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import grpc.aio

from gpushare_spawner.agent.kubernetes.claims.allocation import AllocatedDevice, ClaimKey
from gpushare_spawner.agent.kubernetes.claims.probe import socket_paths
from gpushare_spawner.agent.kubernetes.devices.owners import DevicesRefused
from gpushare_spawner.agent.kubernetes.grpc_socket import GrpcSocket
from gpushare_spawner.agent.kubernetes.kubelet import dra_health_pb2 as health_messages
from gpushare_spawner.agent.kubernetes.kubelet import dra_health_pb2_grpc as health_services
from gpushare_spawner.agent.kubernetes.kubelet import dra_pb2 as messages
from gpushare_spawner.agent.kubernetes.kubelet import dra_pb2_grpc as services
from gpushare_spawner.agent.kubernetes.kubelet import pluginregistration_pb2 as registration
from gpushare_spawner.agent.kubernetes.kubelet import pluginregistration_pb2_grpc as registration_services
from gpushare_spawner.model.kubernetes import DRIVER

log = logging.getLogger(__name__)


HEALTH_EVERY = 10.0
"""Seconds between two lists at most: the kubelet takes a device for unknown that it has not heard of for 30 s."""


class ClaimPlugin(services.DRAPluginServicer):
    """Has an answer for each claim that the kubelet asks for; what fails for one is no other one's trouble."""

    def __init__(
        self,
        prepare: Callable[[ClaimKey], Awaitable[tuple[AllocatedDevice, ...]]],
        unprepare: Callable[[ClaimKey], Awaitable[None]],
    ) -> None:
        """Both may be called again for the same claim, and raise Refused where it cannot be done now."""
        self._prepare = prepare
        self._unprepare = unprepare

    async def NodePrepareResources(
        self, request: messages.NodePrepareResourcesRequest, context: grpc.aio.ServicerContext
    ) -> messages.NodePrepareResourcesResponse:
        """A failure here keeps the pod waiting: the kubelet tries again by itself."""
        response = messages.NodePrepareResourcesResponse()
        for claim in request.claims:
            answer = response.claims[claim.uid]
            try:
                devices = await self._prepare(_key(claim))
            except Exception as error:
                answer.error = _said("prepared", claim, error)
                continue
            for device in devices:
                answer.devices.append(
                    messages.Device(
                        request_names=[device.request],
                        pool_name=device.pool,
                        device_name=device.device,
                        share_id=device.share,
                    )
                )
        return response

    async def NodeUnprepareResources(
        self, request: messages.NodeUnprepareResourcesRequest, context: grpc.aio.ServicerContext
    ) -> messages.NodeUnprepareResourcesResponse:
        """The pods of these claims have ended."""
        response = messages.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            answer = response.claims[claim.uid]
            try:
                await self._unprepare(_key(claim))
            except Exception as error:
                answer.error = _said("unprepared", claim, error)
        return response


class DeviceHealth(health_services.DRAResourceHealthServicer):
    """Tells the kubelet which devices are healthy. It shows that in pods' status, and places pods all the same."""

    def __init__(self, pool: str, healthy: Callable[[], Mapping[str, bool]]) -> None:
        """`healthy`: by the device's name."""
        self._pool = pool
        self._healthy = healthy
        self._listeners: set[asyncio.Event] = set()
        self._said: Mapping[str, bool] = {}

    def look(self) -> None:
        """See whether the health of a device is another one, and tell the kubelet then."""
        now = self._healthy()
        if now != self._said:
            self._said = now
            for listener in self._listeners:
                listener.set()

    async def NodeWatchResources(
        self, request: health_messages.NodeWatchResourcesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_messages.NodeWatchResourcesResponse]:
        """The whole list at first, with every change, and now and then."""
        news = asyncio.Event()
        self._listeners.add(news)
        try:
            while True:
                news.clear()
                yield self._list()
                try:
                    async with asyncio.timeout(HEALTH_EVERY):
                        await news.wait()
                except TimeoutError:
                    pass
        finally:
            self._listeners.discard(news)

    def _list(self) -> health_messages.NodeWatchResourcesResponse:
        response = health_messages.NodeWatchResourcesResponse()
        for name, healthy in self._healthy().items():
            health = health_messages.HEALTHY if healthy else health_messages.UNHEALTHY
            device = health_messages.DeviceIdentifier(pool_name=self._pool, device_name=name)
            response.devices.append(
                health_messages.DeviceHealth(device=device, health=health, last_updated_time=int(time.time()))
            )
        return response


def _key(claim: messages.Claim) -> ClaimKey:
    return ClaimKey(namespace=claim.namespace, name=claim.name, uid=claim.uid)


def _said(done: str, claim: messages.Claim, error: Exception) -> str:
    """What the kubelet writes into the pod's event; the log says it too."""
    if isinstance(error, DevicesRefused):
        log.warning("claim %s/%s is not %s: %s", claim.namespace, claim.name, done, error)
    else:
        log.exception("claim %s/%s cannot be %s", claim.namespace, claim.name, done)
    return f"gpushare: {error}"


SUPPORTED = ("v1.DRAPlugin", "v1alpha1.DRAResourceHealth")
"""Names of services, by which a kubelet chooses (kubernetes pkg/kubelet/cm/dra/plugin)."""
LOOK_EVERY = 2.0
"""Seconds between looks whether the sockets are still there: one stat each."""


class DriverSockets(registration_services.RegistrationServicer):
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

    async def GetInfo(
        self, request: registration.InfoRequest, context: grpc.aio.ServicerContext
    ) -> registration.PluginInfo:
        return registration.PluginInfo(
            type="DRAPlugin", name=DRIVER, endpoint=str(self._paths[0]), supported_versions=SUPPORTED
        )

    async def NotifyRegistrationStatus(
        self, request: registration.RegistrationStatus, context: grpc.aio.ServicerContext
    ) -> registration.RegistrationStatusResponse:
        if request.plugin_registered:
            log.info("%s is registered with the kubelet as a DRA driver", DRIVER)
            self._registered()
        else:
            log.error("the kubelet rejects the DRA driver %s: %s", DRIVER, request.error)
        return registration.RegistrationStatusResponse()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            # a try that failed has left one of them, or none
            complete = len(self._sockets) == len(self._paths)
            if complete and all(socket.is_there for socket in self._sockets):
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
        registration_services.add_RegistrationServicer_to_server(self, register)  # type: ignore[no-untyped-call]
        for path, server in zip(self._paths, (service, register), strict=True):
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._sockets.append(await GrpcSocket.serve(path, server))

    async def _stop(self) -> None:
        # the registration's first: then the kubelet does not connect again
        while self._sockets:
            await self._sockets.pop().close()
