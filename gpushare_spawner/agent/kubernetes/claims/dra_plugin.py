"""The agent as a DRA plugin of the kubelet: the DRAPlugin API (v1), and the health of its devices (v1alpha1).

Answers gRPC only: claim_driver.py prepares claims, driver_sockets.py serves this.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import grpc.aio

from gpushare_spawner.agent.kubernetes.claims.claim_allocation import AllocatedDevice, ClaimKey
from gpushare_spawner.agent.kubernetes.devices.device_owners import Refused
from gpushare_spawner.agent.kubernetes.kubelet import dra_health_pb2 as health_messages
from gpushare_spawner.agent.kubernetes.kubelet import dra_health_pb2_grpc as health_services
from gpushare_spawner.agent.kubernetes.kubelet import dra_pb2 as messages
from gpushare_spawner.agent.kubernetes.kubelet import dra_pb2_grpc as services

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
    if isinstance(error, Refused):
        log.warning("claim %s/%s is not %s: %s", claim.namespace, claim.name, done, error)
    else:
        log.exception("claim %s/%s cannot be %s", claim.namespace, claim.name, done)
    return f"gpushare: {error}"
