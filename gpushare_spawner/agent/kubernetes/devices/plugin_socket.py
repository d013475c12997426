"""A device plugin's socket: served before the kubelet is told of it, and again whenever the kubelet starts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio

from gpushare_spawner.agent.kubernetes.devices.device_plugin import DevicePlugin, options
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

Identity = tuple[int, int, int]


class PluginSocket:
    """Keeps one device plugin served and registered."""

    def __init__(self, plugin: DevicePlugin, folder: Path, name: str, registered: Callable[[], None]) -> None:
        """`folder`: the kubelet's for plugins; `name`: of the socket in it. `registered` is called each time."""
        self._plugin = plugin
        self._folder = folder
        self._name = name
        self._told = registered
        self._server: grpc.aio.Server | None = None
        self._with: Identity | None = None
        self._own: Identity | None = None
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
            if kubelet is not None and (unheard or kubelet != self._with or socket_identity(self._path) != self._own):
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
    def _path(self) -> Path:
        return self._folder / self._name

    async def _serve(self) -> None:
        if self._server is not None and socket_identity(self._path) == self._own:
            return
        await self._stop()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        server = grpc.aio.server()
        services.add_DevicePluginServicer_to_server(self._plugin, server)  # type: ignore[no-untyped-call]
        server.add_insecure_port(f"unix://{self._path}")
        await server.start()
        self._server, self._own = server, socket_identity(self._path)

    async def _register(self) -> None:
        request = messages.RegisterRequest(
            version=API_VERSION, endpoint=self._name, resource_name=self._plugin.resource, options=options()
        )
        async with grpc.aio.insecure_channel(f"unix://{self._folder / KUBELET_SOCKET}") as channel:
            stub = services.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            await stub.Register(request, timeout=ANSWER_WITHIN)

    async def _stop(self) -> None:
        if self._server is not None:
            # its socket may by now be another's: only what is our own is taken away
            own = socket_identity(self._path) == self._own
            await self._server.stop(grace=None)
            self._server = None
            if own:
                with contextlib.suppress(OSError):
                    os.unlink(self._path)

    def _complain(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            log.warning("%s", trouble)
        elif self._trouble and not trouble:
            log.info("%s is registered with the kubelet", self._plugin.resource)
        self._trouble = trouble


def _now() -> float:
    return asyncio.get_running_loop().time()


def socket_identity(path: Path) -> Identity | None:
    """Which file lies there now: a socket that was made again is another one. None: there is none."""
    with contextlib.suppress(OSError):
        seen = path.stat()
        return seen.st_dev, seen.st_ino, seen.st_ctime_ns
    return None
