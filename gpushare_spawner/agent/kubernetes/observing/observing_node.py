"""The agent's part in a cluster where it only observes, composed: devices, sessions of pods, GPU work, the report."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from gpushare_spawner.agent.kubernetes.cluster_agent import ClusterSettings, answer_in_cluster, owner_of
from gpushare_spawner.agent.kubernetes.cluster_api import ClusterApi
from gpushare_spawner.agent.kubernetes.devices.container_response import Allocation
from gpushare_spawner.agent.kubernetes.devices.kubelet_questions import KubeletQuestions
from gpushare_spawner.agent.kubernetes.devices.plugin_socket import PluginSocket
from gpushare_spawner.agent.kubernetes.devices.pod_resources import KubeletUnavailable, PodResources, kubelet_trouble
from gpushare_spawner.agent.kubernetes.observing.driver_use import DriverUse
from gpushare_spawner.agent.kubernetes.observing.observed_pods import ObservedPods
from gpushare_spawner.agent.kubernetes.observing.observer_devices import ObserverDevices
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pods
from gpushare_spawner.agent.kubernetes.report_publisher import PublishedReport
from gpushare_spawner.agent.node import Node
from gpushare_spawner.agent.periodic import GpuSource
from gpushare_spawner.model.kubernetes import LAYER_SELECTOR, OBSERVER
from gpushare_spawner.model.protocol.control import Request
from gpushare_spawner.model.report import Report

log = logging.getLogger(__name__)

SOCKET = "gpushare-observer.sock"
"""In the kubelet's folder for device plugins."""


class ObservingNode:
    """A started node's part in the cluster."""

    def __init__(
        self, node: Node, api: ClusterApi, allocation: Allocation, source: GpuSource, settings: ClusterSettings
    ) -> None:
        """`source`: the driver, which tells what each process got of a GPU."""
        self._node = node
        self._resources = PodResources(settings.pod_resources)
        where = "" if settings.all_namespaces else settings.namespace
        self.pods = Pods(api, where, node.settings.name, self._changed, LAYER_SELECTOR)
        self.sessions = ObservedPods(node, self.pods)
        self._questions = KubeletQuestions(self._hear_kubelet, lambda: self.devices.settled)
        self.devices = ObserverDevices(
            allocation, node.state_folder.pods, self.sessions.end_holders, self._questions.soon
        )
        self._socket = PluginSocket(
            self.devices.plugin, Path(settings.device_plugins_dir), SOCKET, self._questions.soon
        )
        self.use = DriverUse(node, source)
        self.published = PublishedReport(api, settings.namespace, self.report, settings.publish, owner_of(settings))
        self._kubelet_trouble = kubelet_trouble(log)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While this is open the node is one of the cluster."""
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

    async def answer(self, request: Request) -> dict[str, Any]:
        """Answer the control socket. Raises ControlRefused."""
        return await answer_in_cluster(self._node, request)

    def report(self) -> Report:
        """Return the node's report as it is now: sessions, and no GPU, since the agent gives none."""
        report = self._node.report()
        sessions = tuple(one.model_copy(update={"gpu_use_known": self._is_observed(one.id)}) for one in report.sessions)
        return report.model_copy(update={"gpus": (), "host_memory": None, "sessions": sessions})

    def _is_observed(self, session: str) -> bool:
        hold = self._node.sessions[session].record.pod
        return self.use.tells or (hold is not None and bool(hold.given))

    def _changed(self) -> None:
        self.sessions.changed()
        self.published.changed()

    def _forget(self) -> None:
        self._node.changed = lambda: None

    async def _hear_kubelet(self) -> None:
        try:
            handed = await self._resources.handed()
        except KubeletUnavailable as error:
            self._kubelet_trouble.about(error)
            return
        self._kubelet_trouble.settled()
        given = {key: held[OBSERVER] for key, held in handed.by_pod.items() if OBSERVER in held}
        every = tuple(ids for one in given.values() for ids in one)
        self.sessions.handed(given)
        self.devices.listed(every, self.sessions.folders())
