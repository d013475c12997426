"""Assembly of the agent for a cluster: device plugins or a DRA driver, sessions of pods, the published report.

For nodes with GPUs that another sharing layer allocates, see observing.py.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from gpushare_spawner.agent.kubernetes.claims.allocation import PreparedClaims
from gpushare_spawner.agent.kubernetes.claims.claim_driver import ClaimDriver
from gpushare_spawner.agent.kubernetes.devices import container
from gpushare_spawner.agent.kubernetes.devices.cdi import CdiNames
from gpushare_spawner.agent.kubernetes.devices.container import ContainerResponses
from gpushare_spawner.agent.kubernetes.devices.owners import AllocatedDevices, grant_name
from gpushare_spawner.agent.kubernetes.devices.plugin import DevicePlugins
from gpushare_spawner.agent.kubernetes.devices.pod_resources import KubeletAssignments, PodResources
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pods
from gpushare_spawner.agent.kubernetes.pods.sessions import PodReconciler
from gpushare_spawner.agent.kubernetes.report_publisher import PublishedReport
from gpushare_spawner.agent.kubernetes.settings import ClusterSettings
from gpushare_spawner.agent.node import Node
from gpushare_spawner.background import Repeated, Soon
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
"""Seconds between checks of health and of the devices to offer, in addition to checks after changes."""


class KubeletSide(Protocol):
    """The mechanism by which pods get their GPUs: device plugins or claims."""

    async def start(self) -> None:
        """Serve the kubelet. Raises OSError."""

    async def close(self) -> None:
        """Stop serving; pods keep running."""

    def poll(self) -> bool:
        """Offer the devices that have changed. Return whether any have changed."""

    def joined(self, assignments: KubeletAssignments) -> KubeletAssignments:
        """Return the kubelet's list of devices by pod, with the pods of prepared claims added."""


class OnKubernetes:
    """A started node as part of the cluster."""

    def __init__(
        self, node: Node, api: ClusterApi, allocation: ContainerResponses, cdi: CdiNames, settings: ClusterSettings
    ) -> None:
        self._node = node
        self._settings = settings
        prepared = PreparedClaims(node.state_folder.claims) if settings.claims else None
        self.allocated = AllocatedDevices(
            node.gpus.values(),
            node.settings.capacity_units,
            settings.unit_size,
            node.sessions,
            node.state_folder.pods,
            grant_name if prepared is None else prepared.folder_name,
        )
        self.pods = Pods(api, settings.pods_namespace, node.settings.name, self._changed)
        self._kubelet = PodResources(
            settings.pod_resources, self._take, lambda: not self.allocated.pending and self._kubelet_is_trusted
        )
        self.sessions = PodReconciler(node, self.pods, api, self.allocated, self._kubelet.soon)
        self._allocation = allocation
        self.published = PublishedReport(api, settings, self.report, node.cordons)
        end, registered, folder = self.sessions.end, self._registered, settings.device_plugins_dir
        self._kubelet_side: KubeletSide = (
            DevicePlugins(node, self.allocated, allocation, cdi, folder, self._kubelet, end, registered)
            if prepared is None
            else ClaimDriver(node, api, self.allocated, prepared, settings, self._kubelet, end, registered)
        )
        self._assignments = KubeletAssignments({}, {})
        self._polling = Repeated(POLL_EVERY, self._poll, log, "cannot compute the devices to offer")
        self._polling_soon = Soon(self._poll)
        self._kubelet_read = False
        self._kubelet_is_trusted = True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run as part of the cluster while the context is open."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._stop)
            self._node.changed = self._changed
            # Read the list of pods and devices first, so that the first offer is correct.
            await self._kubelet.once()
            await stack.enter_async_context(self.pods.running())
            stack.push_async_callback(self._kubelet_side.close)
            await self._kubelet_side.start()
            for part in (self.published, self._kubelet, self._polling):
                await stack.enter_async_context(part.running())
            yield

    def report(self) -> Report:
        """Return the node's current report."""
        report = self._node.report()
        if not self._settings.claims:
            return report
        return report.model_copy(
            update={"claims": self._allocation.of_claims(self._node.gpus.values(), self.allocated.folder)}
        )

    def _registered(self) -> None:
        self.sessions.kubelet_started()
        self._kubelet.soon()

    def _changed(self) -> None:
        """Handle a change of a session or a pod: schedule one check of everything that depends on it."""
        self.sessions.changed()
        self.published.changed()
        self._polling_soon.request()

    def _poll(self) -> None:
        if self._kubelet_side.poll():
            self.published.changed()

    def _take(self, assignments: KubeletAssignments | None) -> None:
        """Process the kubelet's list of devices by pod; None: the kubelet does not answer."""
        if assignments is None:
            if self._settings.claims:
                # The agent keeps its own record of prepared claims, so sessions can still be updated.
                self.sessions.take_assignments(self._kubelet_side.joined(self._assignments))
            return
        self._assignments = assignments
        self._kubelet_is_trusted = container.lists_own_pod(assignments, self._settings.own_pod)
        if self._kubelet_is_trusted or not self._kubelet_read:
            withheld = container.withheld(self._node.gpus.values(), assignments, self._settings.own_pod)
            for uuid, reason in withheld.items():
                if uuid not in self._node.rounds.withheld:
                    log.error("%s", reason)
            for uuid in self._node.rounds.withheld.keys() - withheld.keys():
                log.info("GPU %d can be shared again", self._node.gpus[uuid].index)
            self._node.rounds.withheld = withheld
            self._kubelet_read = True
        self.sessions.take_assignments(self._kubelet_side.joined(assignments))
        self._changed()

    async def _stop(self) -> None:
        self._node.changed = lambda: None
        self._polling_soon.close()
        await self.sessions.close()


async def answer_in_cluster(node: Node, request: Request) -> dict[str, Any]:
    """Answer a request on the control socket of an agent with pods as sessions. Raises ControlRefused.

    Sessions cannot be opened, confirmed, closed or resized here, and GPUs cannot be cordoned.
    """
    if isinstance(request, OpenRequest | ConfirmRequest | CloseRequest | ResizeRequest):
        message = f"{request.op}: this agent runs in a Kubernetes cluster, where sessions start and end with pods"
        raise ControlRefused("bad-request", message)
    if isinstance(request, CordonRequest):
        message = "cordon: this agent runs in a Kubernetes cluster, where cordons are in its report's ConfigMap"
        raise ControlRefused("bad-request", message)
    return await node.requests.answer(request)
