"""The agent as a DRA plugin of the kubelet: the DRAPlugin API (v1), device health (v1alpha1), and the sockets.

`ClaimPlugin` and `DeviceHealth` only answer gRPC calls; claim_driver.py prepares claims. `DriverSockets` serves both
sockets of a DRA driver. The kubelet watches its folder plugins_registry, including after its own restart. It finds the
registration socket there and connects to both sockets, so the driver makes no calls.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import grpc.aio

from gpushare_spawner.agent.kubernetes.claims.allocation import AllocatedDevice, ClaimKey
from gpushare_spawner.agent.kubernetes.claims.probe import socket_paths
from gpushare_spawner.agent.kubernetes.devices.owners import DevicesRefused
from gpushare_spawner.agent.kubernetes.grpc_socket import GrpcSockets, News
from gpushare_spawner.agent.kubernetes.kubelet import dra_health_pb2 as health_messages
from gpushare_spawner.agent.kubernetes.kubelet import dra_health_pb2_grpc as health_services
from gpushare_spawner.agent.kubernetes.kubelet import dra_pb2 as messages
from gpushare_spawner.agent.kubernetes.kubelet import dra_pb2_grpc as services
from gpushare_spawner.agent.kubernetes.kubelet import pluginregistration_pb2 as registration
from gpushare_spawner.agent.kubernetes.kubelet import pluginregistration_pb2_grpc as registration_services
from gpushare_spawner.background import Repeated
from gpushare_spawner.model.kubernetes.objects import DRIVER

log = logging.getLogger(__name__)


HEALTH_EVERY = 10.0
"""Maximum seconds between two lists: 30 s after the last list, the kubelet treats a device's health as unknown."""


class ClaimPlugin(services.DRAPluginServicer):
    """Answers for each claim of a request separately: one claim's failure does not affect the others."""

    def __init__(
        self,
        prepare: Callable[[ClaimKey], Awaitable[tuple[AllocatedDevice, ...]]],
        unprepare: Callable[[ClaimKey], Awaitable[None]],
    ) -> None:
        """Both functions can be called repeatedly for a claim, and raise DevicesRefused if they cannot succeed now."""
        self._prepare = prepare
        self._unprepare = unprepare

    async def NodePrepareResources(
        self, request: messages.NodePrepareResourcesRequest, context: grpc.aio.ServicerContext
    ) -> messages.NodePrepareResourcesResponse:
        """Prepare claims. After a failure the pod keeps waiting, and the kubelet tries again."""
        response = messages.NodePrepareResourcesResponse()
        for claim in request.claims:
            answer = response.claims[claim.uid]
            try:
                devices = await self._prepare(_key(claim))
            except Exception as error:
                answer.error = _failure_text("prepared", claim, error)
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
        """Unprepare the claims of ended pods."""
        response = messages.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            answer = response.claims[claim.uid]
            try:
                await self._unprepare(_key(claim))
            except Exception as error:
                answer.error = _failure_text("unprepared", claim, error)
        return response


class DeviceHealth(health_services.DRAResourceHealthServicer):
    """Sends devices' health to the kubelet.

    The kubelet shows the health in pods' status and continues to admit pods.
    """

    def __init__(self, pool: str, healthy: Callable[[], Mapping[str, bool]]) -> None:
        """`healthy` returns the devices' health by name."""
        self._pool = pool
        self._healthy = healthy
        self._news = News()
        self._reported: Mapping[str, bool] = {}

    def poll(self) -> None:
        """Send the kubelet a new list if a device's health has changed."""
        now = self._healthy()
        if now != self._reported:
            self._reported = now
            self._news.notify()

    async def NodeWatchResources(
        self, request: health_messages.NodeWatchResourcesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_messages.NodeWatchResourcesResponse]:
        """Send the whole list initially, after each change, and every `HEALTH_EVERY` seconds."""
        async with contextlib.aclosing(self._news.changes(HEALTH_EVERY)) as changes:
            async for _ in changes:
                yield self._list()

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


def _failure_text(done: str, claim: messages.Claim, error: Exception) -> str:
    """Log a failure. Return the text that the kubelet writes to the pod's event."""
    if isinstance(error, DevicesRefused):
        log.warning("claim %s/%s is not %s: %s", claim.namespace, claim.name, done, error)
    else:
        log.exception("claim %s/%s cannot be %s", claim.namespace, claim.name, done)
    return f"gpushare: {error}"


SUPPORTED = ("v1.DRAPlugin", "v1alpha1.DRAResourceHealth")
"""Service names from which the kubelet chooses (kubernetes pkg/kubelet/cm/dra/plugin)."""
CHECK_EVERY = 2.0
"""Seconds between checks that the sockets still exist: one stat call each."""


class DriverSockets(registration_services.RegistrationServicer):
    """Keeps the sockets served."""

    def __init__(
        self, plugin: ClaimPlugin, health: DeviceHealth, kubelet_dir: Path, registered: Callable[[], None]
    ) -> None:
        """Store the arguments; `start` creates the sockets.

        `registered` is called each time a kubelet registers the driver.
        """
        self._plugin = plugin
        self._health = health
        self._registered = registered
        # the kubelet connects to the first socket as soon as it finds the second
        self._paths = socket_paths(kubelet_dir)
        self._served = GrpcSockets()
        self._checking = Repeated(CHECK_EVERY, self._check, log, "cannot create the sockets of the DRA driver")

    async def start(self) -> None:
        """Serve, and keep serving. Raises OSError or RuntimeError if the sockets cannot be created."""
        await self._serve()
        self._checking.start()

    async def close(self) -> None:
        """Stop serving and remove the sockets; 30 s later the kubelet removes the slice."""
        await self._checking.close()
        await self._served.close()

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

    async def _check(self) -> None:
        if self._served.are_there:
            return
        if self._served:
            log.warning("a socket of the DRA driver was removed; creating both again")
            await self._served.close()
        await self._serve()

    async def _serve(self) -> None:
        service = grpc.aio.server()
        services.add_DRAPluginServicer_to_server(self._plugin, service)  # type: ignore[no-untyped-call]
        health_services.add_DRAResourceHealthServicer_to_server(self._health, service)  # type: ignore[no-untyped-call]
        register = grpc.aio.server()
        registration_services.add_RegistrationServicer_to_server(self, register)  # type: ignore[no-untyped-call]
        for path in self._paths:
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        # The registration socket is the last, so it is closed first: the kubelet then does not reconnect.
        await self._served.serve(dict(zip(self._paths, (service, register), strict=True)))
