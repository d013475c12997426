"""The agent on a node where it only observes: devices, sessions of pods, GPU work and the report, composed.

A container gets the library and its session's socket by an observer device: one for each pod, all alike. The kubelet
requests a device and does not name the pod; pods.py finds the pod and listens in the folder. If the agent shares the
GPUs of the node: cluster_agent.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from gpushare_spawner.agent.kubernetes.devices import owners
from gpushare_spawner.agent.kubernetes.devices.container import ContainerResponses
from gpushare_spawner.agent.kubernetes.devices.owners import DevicesRefused, grant_name
from gpushare_spawner.agent.kubernetes.devices.plugin import DevicePlugin, PluginSocket
from gpushare_spawner.agent.kubernetes.devices.pod_resources import (
    Given,
    KubeletQuestions,
    KubeletUnavailable,
    PodResources,
    kubelet_trouble,
)
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2 as messages
from gpushare_spawner.agent.kubernetes.observing.pods import DriverUse, ObservedPods
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pods
from gpushare_spawner.agent.kubernetes.report_publisher import PublishedReport
from gpushare_spawner.agent.kubernetes.settings import ClusterSettings
from gpushare_spawner.agent.node import Node
from gpushare_spawner.clients.api import ClusterApi
from gpushare_spawner.model.kubernetes.annotations import LAYER_SELECTOR
from gpushare_spawner.model.kubernetes.objects import OBSERVER
from gpushare_spawner.model.report import Report

log = logging.getLogger(__name__)


IDS = [f"observer-{number:04}" for number in range(512)]
"""More than the pods of a node: the kubelet's default limit is 110, and clouds often have nodes with 250."""
GONE_AFTER = 30.0
"""Seconds. A device is free when the kubelet has not listed it for this long: for about a second after its start it
lists none."""


class ObserverDevices:
    """The devices that are offered to the kubelet, and the folders of granted devices."""

    def __init__(
        self,
        allocation: ContainerResponses,
        folder: Path,
        end_holders: Callable[[frozenset[str]], None],
        changed: Callable[[], None],
    ) -> None:
        """`folder`: the parent folder of the grants' folders. `changed` is called after each grant.

        `end_holders` ends the sessions that had any of these devices: the kubelet gives them to another container.
        """
        self._allocation = allocation
        self._folder = folder
        self._end_holders = end_holders
        self._changed = changed
        self._pending: dict[frozenset[str], float] = {}
        """Grants that the kubelet has not listed yet, and their times (event loop's time)."""
        self._unknown_since: dict[str, float] = {}
        """Folders that no session or grant has, by name, and the time since then."""
        self.plugin = DevicePlugin(OBSERVER, offered=lambda: IDS, healthy=lambda: True, grant=self._grant)

    @property
    def settled(self) -> bool:
        """Whether the kubelet has listed all grants."""
        return not self._pending

    def listed(self, given: Given, current: Collection[str]) -> None:
        """Take the kubelet's list of these devices. `current`: names of the folders that sessions have."""
        now = asyncio.get_running_loop().time()
        self._pending = {
            ids: made_at for ids, made_at in self._pending.items() if ids not in given and now - made_at < GONE_AFTER
        }
        names = {grant_name(ids) for ids in (*given, *self._pending)} | set(current)
        there = {path.name for path in self._folder.iterdir()} if self._folder.is_dir() else set()
        self._unknown_since = {name: self._unknown_since.get(name, now) for name in there - names}
        for name, since in self._unknown_since.items():
            if now - since >= GONE_AFTER:
                log.info("removing %s, which is of a pod that is gone", self._folder / name)
                owners.remove(self._folder / name)

    async def _grant(self, devices: list[str]) -> messages.ContainerAllocateResponse:
        requested = frozenset(devices)
        if not requested or not requested <= set(IDS):
            raise DevicesRefused(f"{', '.join(sorted(requested)) or 'nothing'} was asked for, and that is not offered")
        self._end_holders(requested)
        folder = self._folder / grant_name(requested)
        try:
            owners.make_fresh(folder)
        except OSError as error:
            raise DevicesRefused(f"the folder of the session's socket cannot be made: {error}") from None
        self._pending[requested] = asyncio.get_running_loop().time()
        self._changed()
        return self._allocation.to_observe(folder)


SOCKET = "gpushare-observer.sock"
"""In the kubelet's folder for device plugins."""


class ObservingNode:
    """A started node as part of the cluster."""

    def __init__(self, node: Node, api: ClusterApi, allocation: ContainerResponses, settings: ClusterSettings) -> None:
        self._node = node
        self._resources = PodResources(settings.pod_resources)
        self.pods = Pods(api, settings.pods_namespace, node.settings.name, self._changed, LAYER_SELECTOR)
        self.sessions = ObservedPods(node, self.pods)
        self._questions = KubeletQuestions(self._read_kubelet, lambda: self.devices.settled)
        self.devices = ObserverDevices(
            allocation, node.state_folder.pods, self.sessions.end_holders, self._questions.soon
        )
        self._socket = PluginSocket(
            self.devices.plugin, Path(settings.device_plugins_dir), SOCKET, self._questions.soon
        )
        self.use = DriverUse(node)
        self.published = PublishedReport(api, settings, self.report)
        self._kubelet_trouble = kubelet_trouble(log)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run as part of the cluster while the context is open."""
        async with AsyncExitStack() as stack:
            stack.callback(self.sessions.close)
            self._node.changed = self._changed
            stack.callback(self._forget)
            await self._questions.once()
            self.pods.start()
            stack.push_async_callback(self.pods.close)
            self._socket.start()
            stack.push_async_callback(self._socket.close)
            self._questions.start()
            stack.push_async_callback(self._questions.close)
            self.use.start()
            stack.push_async_callback(self.use.close)
            self.published.start()
            stack.push_async_callback(self.published.close)
            yield

    def report(self) -> Report:
        """Return the node's report now: sessions, and no GPU, since the agent gives none."""
        report = self._node.report()
        sessions = tuple(
            session.model_copy(update={"gpu_use_known": self._is_observed(session.id)}) for session in report.sessions
        )
        return report.model_copy(update={"gpus": (), "host_memory": None, "sessions": sessions})

    def _is_observed(self, session: str) -> bool:
        hold = self._node.sessions[session].record.pod
        return self.use.tells or (hold is not None and bool(hold.given))

    def _changed(self) -> None:
        self.sessions.changed()
        self.published.changed()

    def _forget(self) -> None:
        self._node.changed = lambda: None

    async def _read_kubelet(self) -> None:
        try:
            handed = await self._resources.handed()
        except KubeletUnavailable as error:
            self._kubelet_trouble.about(error)
            return
        self._kubelet_trouble.settled()
        given = {key: held[OBSERVER] for key, held in handed.by_pod.items() if OBSERVER in held}
        every = tuple(ids for grants in given.values() for ids in grants)
        self.sessions.handed(given)
        self.devices.listed(every, self.sessions.folders())
