"""GPUs for pods by device plugins: one plugin, with one socket, for each GPU of the node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from gpushare_spawner.agent.gpu_health import GpuHealth
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.kubernetes.devices.cdi import CdiNames
from gpushare_spawner.agent.kubernetes.devices.container_response import Allocation
from gpushare_spawner.agent.kubernetes.devices.device_owners import HeldDevices, Refused
from gpushare_spawner.agent.kubernetes.devices.device_plugin import DevicePlugin
from gpushare_spawner.agent.kubernetes.devices.plugin_socket import PluginSocket
from gpushare_spawner.agent.kubernetes.devices.pod_resources import Handed
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2 as messages
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.model import kubernetes


class DevicePlugins:
    """The agent as device plugins. cluster_agent.py runs it in the place of a DRA driver."""

    def __init__(
        self,
        gpus: Iterable[Gpu],
        health: GpuHealth,
        held: HeldDevices,
        allocation: Allocation,
        cdi: CdiNames,
        folder: Path,
        *,
        ask_kubelet: Callable[[], Awaitable[None]],
        changed: Callable[[], None],
        end: Callable[[Session, str], None],
        registered: Callable[[], None],
    ) -> None:
        """`folder`: the kubelet's for plugins. `ask_kubelet` reads its assignments now, `changed` has it asked soon.
        `end` ends a session."""
        self._health = health
        self._held = held
        self._allocation = allocation
        self._cdi = cdi
        self._folder = folder
        self._ask_kubelet = ask_kubelet
        self._changed = changed
        self._end = end
        self._registered = registered
        self._plugins = [self._plugin(gpu) for gpu in gpus]
        self._sockets: list[PluginSocket] = []

    async def start(self) -> None:
        """Serve the plugins, and register them."""
        await self._cdi.read()
        for plugin in self._plugins:
            plugin.look()
            name = f"gpushare-{plugin.resource.removeprefix(kubernetes.PREFIX)}.sock"
            socket = PluginSocket(plugin, self._folder, name, self._registered)
            socket.start()
            self._sockets.append(socket)

    async def close(self) -> None:
        """Stop serving."""
        for socket in reversed(self._sockets):
            await socket.close()

    def look(self) -> bool:
        """See whether something else is to be offered, and tell the kubelet then; whether it is."""
        news = [plugin.look() for plugin in self._plugins]
        return any(news)

    def joined(self, handed: Handed) -> Handed:
        """The kubelet's list, which is complete."""
        return handed

    def _plugin(self, gpu: Gpu) -> DevicePlugin:
        return DevicePlugin(
            kubernetes.resource_name(gpu.index),
            offered=lambda: self._held.offered(gpu.uuid),
            healthy=lambda: self._health.healthy(gpu.uuid),
            grant=lambda devices: self._grant(gpu, devices),
        )

    async def _grant(self, gpu: Gpu, devices: list[str]) -> messages.ContainerAllocateResponse:
        # another plugin for this GPU may have come a moment ago
        await self._ask_kubelet()
        cdi_name = await self._cdi.name(gpu.uuid)
        # from here on at one stroke: what is counted now is what is given
        if (trouble := self._health.trouble(gpu.uuid)) is not None:
            raise Refused(trouble)
        self._held.check(gpu.uuid, devices)
        for session in self._held.holders(gpu.uuid, devices):
            self._end(session, "the kubelet gave its devices to another pod")
        grant = self._held.grant(gpu.uuid, devices)
        self._changed()
        return self._allocation.answer(gpu, self._held.folder_of(grant), cdi_name)
