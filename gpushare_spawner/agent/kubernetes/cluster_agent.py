"""Assembles the agent for a cluster: device plugins or a DRA driver, sessions of pods, the published report.

For nodes whose GPUs another sharing layer allocates, see observing/node.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from gpushare_spawner.agent.kubernetes.claims.allocation import PreparedClaims
from gpushare_spawner.agent.kubernetes.claims.claim_driver import ClaimDriver
from gpushare_spawner.agent.kubernetes.devices import container
from gpushare_spawner.agent.kubernetes.devices.cdi import CdiNames
from gpushare_spawner.agent.kubernetes.devices.container import ContainerResponses
from gpushare_spawner.agent.kubernetes.devices.owners import HeldDevices, grant_name
from gpushare_spawner.agent.kubernetes.devices.plugin import DevicePlugins
from gpushare_spawner.agent.kubernetes.devices.pod_resources import (
    Handed,
    KubeletQuestions,
    KubeletUnavailable,
    PodResources,
    kubelet_trouble,
)
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pods
from gpushare_spawner.agent.kubernetes.pods.sessions import PodSessions
from gpushare_spawner.agent.kubernetes.report_publisher import PublishedReport
from gpushare_spawner.agent.kubernetes.settings import ClusterSettings
from gpushare_spawner.agent.node import Node
from gpushare_spawner.background import Repeated
from gpushare_spawner.clients.api import ClusterApi
from gpushare_spawner.model.control import (
    CloseRequest,
    ConfirmRequest,
    ControlRefused,
    CordonRequest,
    OpenRequest,
    Request,
    ResizeRequest,
)
from gpushare_spawner.model.report import Report

log = logging.getLogger(__name__)

POLL_EVERY = 1.0
"""Seconds between checks of health and of the devices to offer, besides those after changes."""


class KubeletSide(Protocol):
    """The way in which pods get their GPUs: by device plugins or by claims."""

    async def start(self) -> None:
        """Serve the kubelet. Raises OSError."""

    async def close(self) -> None:
        """Stop serving; pods run on."""

    def poll(self) -> bool:
        """Offer the devices that have changed. Return whether any have."""

    def joined(self, handed: Handed) -> Handed:
        """Return the kubelet's list of devices by pod, with the pods of prepared claims added."""


class OnKubernetes:
    """A started node as part of the cluster."""

    def __init__(
        self, node: Node, api: ClusterApi, allocation: ContainerResponses, cdi: CdiNames, settings: ClusterSettings
    ) -> None:
        self._node = node
        self._settings = settings
        self._resources = PodResources(settings.pod_resources)
        prepared = PreparedClaims(node.state_folder.claims) if settings.claims else None
        self.held = HeldDevices(
            node.gpus.values(),
            node.settings.capacity_units,
            settings.unit_size,
            node.sessions,
            node.state_folder.pods,
            grant_name if prepared is None else prepared.folder_name,
        )
        self.pods = Pods(api, settings.pods_namespace, node.settings.name, self._changed)
        self._questions = KubeletQuestions(
            self._read_kubelet, lambda: not self.held.pending and self._kubelet_is_trusted
        )
        self.sessions = PodSessions(node, self.pods, api, self.held, self._questions.soon)
        self._allocation = allocation
        self.published = PublishedReport(api, settings, self.report, node.cordons)
        self._kubelet_side = self._side(api, allocation, cdi, prepared)
        self._handed = Handed({}, {})
        self._polling = Repeated(POLL_EVERY, self._poll, log, "cannot compute the devices to offer")
        self._poll_due: asyncio.Handle | None = None
        self._kubelet_read = False
        self._kubelet_is_trusted = True
        self._kubelet_trouble = kubelet_trouble(log)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run as part of the cluster while the context is open."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._stop)
            self._node.changed = self._changed
            # Read the list of pods and devices first, so that the first offer is right.
            await self._questions.once()
            self.pods.start()
            stack.push_async_callback(self.pods.close)
            stack.push_async_callback(self._kubelet_side.close)
            await self._kubelet_side.start()
            self.published.start()
            stack.push_async_callback(self.published.close)
            self._questions.start()
            stack.push_async_callback(self._questions.close)
            self._polling.start()
            yield

    def report(self) -> Report:
        """Return the node's report now."""
        report = self._node.report()
        if not self._settings.claims:
            return report
        return report.model_copy(
            update={"claims": self._allocation.of_claims(self._node.gpus.values(), self.held.folder)}
        )

    def _side(
        self, api: ClusterApi, allocation: ContainerResponses, cdi: CdiNames, prepared: PreparedClaims | None
    ) -> KubeletSide:
        node, settings = self._node, self._settings
        if prepared is not None:
            return ClaimDriver(
                node, api, self.held, prepared, settings.kubelet_dir, taints=settings.taints,
                ask_kubelet=self._questions.once, changed=self._questions.soon, end=self.sessions.end,
                registered=self._registered,
            )  # fmt: skip
        return DevicePlugins(
            node.gpus.values(), node.health, self.held, allocation, cdi, settings.device_plugins_dir,
            ask_kubelet=self._questions.once, changed=self._questions.soon, end=self.sessions.end,
            registered=self._registered,
        )  # fmt: skip

    def _registered(self) -> None:
        self.sessions.kubelet_started()
        self._questions.soon()

    def _changed(self) -> None:
        """Handle a change of a session or a pod: schedule one check of everything that depends on it."""
        self.sessions.changed()
        self.published.changed()
        if self._poll_due is None:
            self._poll_due = asyncio.get_running_loop().call_soon(self._poll)

    def _poll(self) -> None:
        self._poll_due = None
        if self._kubelet_side.poll():
            self.published.changed()

    async def _read_kubelet(self) -> None:
        try:
            handed = await self._resources.handed()
        except KubeletUnavailable as error:
            self._kubelet_trouble.about(error)
            if self._settings.claims:
                # The agent keeps its own record of prepared claims, so sessions can still be updated.
                self.sessions.handed(self._kubelet_side.joined(self._handed))
            return
        self._handed = handed
        self._kubelet_trouble.settled()
        self._kubelet_is_trusted = container.tells_of(handed, self._settings.own_pod)
        if self._kubelet_is_trusted or not self._kubelet_read:
            withheld = container.withheld(self._node.gpus.values(), handed, self._settings.own_pod)
            for uuid, reason in withheld.items():
                if uuid not in self._node.health.withheld:
                    log.error("%s", reason)
            for uuid in self._node.health.withheld.keys() - withheld.keys():
                log.info("GPU %d can be shared again", self._node.gpus[uuid].index)
            self._node.health.withheld = withheld
            self._kubelet_read = True
        self.sessions.handed(self._kubelet_side.joined(handed))
        self._changed()

    async def _stop(self) -> None:
        self._node.changed = lambda: None
        await self._polling.close()
        if self._poll_due is not None:
            self._poll_due.cancel()
        await self.sessions.close()


async def answer_in_cluster(node: Node, request: Request) -> dict[str, Any]:
    """Answer the control socket of an agent with sessions of pods. Raises ControlRefused.

    Sessions cannot be opened, confirmed, closed or resized here, and GPUs cannot be cordoned.
    """
    if isinstance(request, OpenRequest | ConfirmRequest | CloseRequest | ResizeRequest):
        message = f"{request.op}: this agent is one of a Kubernetes cluster, its sessions come and go with pods"
        raise ControlRefused("bad-request", message)
    if isinstance(request, CordonRequest):
        message = "cordon: this agent is one of a Kubernetes cluster, cordons stand in its report's ConfigMap"
        raise ControlRefused("bad-request", message)
    return await node.requests.answer(request)
