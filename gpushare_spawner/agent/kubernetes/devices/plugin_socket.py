"""A device plugin's socket: served before the kubelet is told of it, and again whenever the kubelet starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio

from gpushare_spawner.agent.kubernetes.devices.device_plugin import DevicePlugin, options
from gpushare_spawner.agent.kubernetes.grpc_socket import GrpcSocket, Identity, socket_identity
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2 as messages
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2_grpc as services

log = logging.getLogger(__name__)

API_VERSION = "v1beta1"
KUBELET_SOCKET = "kubelet.sock"
LOOK_EVERY = 0.5
"""Seconds between looks whether the kubelet has started anew: one stat each."""
ANSWER_WITHIN = 5.0
"""Seconds for a registration."""
LONGEST_PAUSE = 5.0
HEARD_WITHIN = 15.0
"""Seconds after a registration in which the kubelet has to listen. It dials back once, within 10 s, and never again: a
plugin that it could not reach, or whose stream has ended, is without healthy devices until it registers anew."""


class PluginSocket:
    """Keeps one device plugin served and registered."""

    def __init__(self, plugin: DevicePlugin, folder: Path, name: str, registered: Callable[[], None]) -> None:
        """`folder`: the kubelet's for plugins; `name`: of the socket in it. `registered` is called each time."""
        self._plugin = plugin
        self._folder = folder
        self._name = name
        self._told = registered
        self._own: GrpcSocket | None = None
        self._with: Identity | None = None
        self._task: asyncio.Task[None] | None = None
        self._trouble = ""

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Stop serving; the kubelet then finds no healthy device."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._stop()

    async def _keep(self) -> None:
        pause = LOOK_EVERY
        heard_at = _now()
        while True:
            kubelet = socket_identity(self._folder / KUBELET_SOCKET)
            if kubelet is None:
                self._complain(f"{self._folder / KUBELET_SOCKET} is not there: waiting for the kubelet")
            if kubelet is None or self._plugin.is_heard:
                heard_at = _now()
            unheard = _now() - heard_at >= HEARD_WITHIN
            if unheard and not self._trouble:
                log.warning("the kubelet does not list the devices of %s; registering again", self._plugin.resource)
            if kubelet is not None and (unheard or kubelet != self._with or not self._served):
                try:
                    await self._serve()
                    await self._register()
                    # a kubelet that started in between is another one
                    self._with = kubelet
                    self._complain("")
                    self._told()
                    pause, heard_at = LOOK_EVERY, _now()
                except grpc.aio.AioRpcError as error:
                    pause = self._failed(error.details(), pause)
                except Exception as error:
                    # of whatever kind: without a next try the node would have no GPUs until the agent starts anew
                    pause = self._failed(error, pause)
            await asyncio.sleep(pause)

    def _failed(self, reason: object, pause: float) -> float:
        """The next pause, in seconds."""
        self._complain(f"{self._plugin.resource} cannot be registered with the kubelet: {reason}")
        return min(2 * pause, LONGEST_PAUSE)

    @property
    def _served(self) -> bool:
        return self._own is not None and self._own.is_there

    async def _serve(self) -> None:
        if self._served:
            return
        await self._stop()
        server = grpc.aio.server()
        services.add_DevicePluginServicer_to_server(self._plugin, server)  # type: ignore[no-untyped-call]
        self._own = await GrpcSocket.serve(self._folder / self._name, server)

    async def _register(self) -> None:
        request = messages.RegisterRequest(
            version=API_VERSION, endpoint=self._name, resource_name=self._plugin.resource, options=options()
        )
        async with grpc.aio.insecure_channel(f"unix://{self._folder / KUBELET_SOCKET}") as channel:
            stub = services.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            await stub.Register(request, timeout=ANSWER_WITHIN)

    async def _stop(self) -> None:
        if self._own is not None:
            own, self._own = self._own, None
            await own.close()

    def _complain(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            log.warning("%s", trouble)
        elif self._trouble and not trouble:
            log.info("%s is registered with the kubelet", self._plugin.resource)
        self._trouble = trouble


def _now() -> float:
    return asyncio.get_running_loop().time()
