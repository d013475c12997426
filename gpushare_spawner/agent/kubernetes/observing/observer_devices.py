"""The devices by which a container gets the library and the socket of its session: one for each pod, all alike.

The kubelet asks for a device without saying for whom. observed_pods.py finds the pod, and listens in the folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from pathlib import Path

from gpushare_spawner.agent.kubernetes.devices import grant_folders
from gpushare_spawner.agent.kubernetes.devices.container_response import Allocation
from gpushare_spawner.agent.kubernetes.devices.device_owners import Refused
from gpushare_spawner.agent.kubernetes.devices.device_plugin import DevicePlugin
from gpushare_spawner.agent.kubernetes.devices.grant_folders import grant_name
from gpushare_spawner.agent.kubernetes.devices.pod_resources import Given
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2 as messages
from gpushare_spawner.model.kubernetes import OBSERVER

log = logging.getLogger(__name__)

IDS = [f"observer-{number:04}" for number in range(512)]
"""More than a node can have pods: the kubelet's default is 110, and nodes with 250 are usual in clouds."""
GONE_AFTER = 30.0
"""Seconds for which the kubelet must not have listed a device until nobody has it: for about a second after its start
it lists none."""


class ObserverDevices:
    """What is offered to the kubelet, and the folders of the devices that it gave to containers."""

    def __init__(
        self,
        allocation: Allocation,
        folder: Path,
        end_holders: Callable[[frozenset[str]], None],
        changed: Callable[[], None],
    ) -> None:
        """`folder`: of the grants' folders. `end_holders` ends the sessions that had any of these devices: the kubelet
        gives them to another container. `changed` is called after each grant."""
        self._allocation = allocation
        self._folder = folder
        self._end_holders = end_holders
        self._changed = changed
        self._pending: dict[frozenset[str], float] = {}
        """Grants that the kubelet has not listed yet, and when they were made (event loop's time)."""
        self._unknown_since: dict[str, float] = {}
        """Folders that nobody is known to have, by their names."""
        self.plugin = DevicePlugin(OBSERVER, offered=lambda: IDS, healthy=lambda: True, grant=self._grant)

    @property
    def settled(self) -> bool:
        """Whether the kubelet has listed all that it was given."""
        return not self._pending

    def listed(self, given: Given, known: Collection[str]) -> None:
        """Take what the kubelet's list has of these devices. `known`: names of the folders that sessions have."""
        now = asyncio.get_running_loop().time()
        self._pending = {
            ids: made_at for ids, made_at in self._pending.items() if ids not in given and now - made_at < GONE_AFTER
        }
        names = {grant_name(ids) for ids in (*given, *self._pending)} | set(known)
        there = {path.name for path in self._folder.iterdir()} if self._folder.is_dir() else set()
        self._unknown_since = {name: self._unknown_since.get(name, now) for name in there - names}
        for name, since in self._unknown_since.items():
            if now - since >= GONE_AFTER:
                log.info("removing %s, which is of a pod that is gone", self._folder / name)
                grant_folders.remove(self._folder / name)

    async def _grant(self, devices: list[str]) -> messages.ContainerAllocateResponse:
        wanted = frozenset(devices)
        if not wanted or not wanted <= set(IDS):
            raise Refused(f"{', '.join(sorted(wanted)) or 'nothing'} was asked for, and that is not offered")
        self._end_holders(wanted)
        folder = self._folder / grant_name(wanted)
        try:
            grant_folders.make_fresh(folder)
        except OSError as error:
            raise Refused(f"the folder of the session's socket cannot be made: {error}") from None
        self._pending[wanted] = asyncio.get_running_loop().time()
        self._changed()
        return self._allocation.to_observe(folder)
