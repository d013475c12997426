"""Assembles the agent for a cluster: device plugins or a DRA driver, sessions of pods, the published report.

For nodes whose GPUs another sharing layer allocates, see observing/node.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
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
    PodKey,
    PodResources,
    kubelet_trouble,
)
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pods
from gpushare_spawner.agent.kubernetes.pods.sessions import PodSessions
from gpushare_spawner.agent.kubernetes.report_publisher import OwnerPod, PublishedReport, PublishSettings
from gpushare_spawner.agent.node import Node
from gpushare_spawner.background import Repeated
from gpushare_spawner.clients.api import ClusterApi
from gpushare_spawner.model.control import (
    CloseRequest,
    ConfirmRequest,
    ControlRefused,
    CordonRequest,
    Failure,
    OpenRequest,
    Request,
    ResizeRequest,
)
from gpushare_spawner.model.report import Report

log = logging.getLogger(__name__)

POLL_EVERY = 1.0
"""Seconds between checks of health and of the devices to offer, besides those after changes."""


@dataclass(frozen=True)
class ClaimSettings:
    """The cluster's features of dynamic resource allocation."""

    taints: bool = True
    """The API server keeps taints of devices."""


@dataclass(frozen=True)
class ClusterSettings:
    """The agent's place in its cluster."""

    namespace: str
    """Namespace of the report and of the notebooks' pods."""
    all_namespaces: bool = False
    """The notebooks' pods can be in any namespace."""
    kubelet_dir: Path = Path("/var/lib/kubelet")
    """The kubelet's root folder."""
    device_plugins_dir: Path = Path("/var/lib/kubelet/device-plugins")
    """The folder for sockets of device plugins: a constant of the kubelet, wherever its root folder is."""
    unit_size: int = 1
    """Share units of 1 % that one device stands for."""
    claims: ClaimSettings | None = None
    """None: pods get GPUs by device plugins, not by claims."""
    own_pod: PodKey | None = None
    """(namespace, name) of the agent's own pod."""
    own_pod_uid: str | None = None
    publish: PublishSettings = field(default_factory=PublishSettings)

    @property
    def pod_resources(self) -> Path:
        """The kubelet's socket that lists devices by pod."""
        return self.kubelet_dir / "pod-resources" / "kubelet.sock"


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
        prepared = PreparedClaims(node.state_folder.claims) if settings.claims is not None else None
        self.held = HeldDevices(
            node.gpus.values(),
            node.settings.capacity_units,
            settings.unit_size,
            node.sessions,
            node.state_folder.pods,
            grant_name if prepared is None else prepared.folder_name,
        )
        where = "" if settings.all_namespaces else settings.namespace
        self.pods = Pods(api, where, node.settings.name, self._changed)
        self._questions = KubeletQuestions(
            self._read_kubelet, lambda: not self.held.pending and self._kubelet_is_trusted
        )
        self.sessions = PodSessions(node, self.pods, api, self.held, self._questions.soon)
        self._allocation = allocation
        self.published = PublishedReport(
            api, settings.namespace, self.report, settings.publish, owner_of(settings), node.cordons
        )
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

    async def answer(self, request: Request) -> dict[str, Any]:
        """Answer the control socket. Raises ControlRefused."""
        return await answer_in_cluster(self._node, request)

    def report(self) -> Report:
        """Return the node's report now."""
        report = self._node.report()
        if self._settings.claims is None:
            return report
        return report.model_copy(
            update={"claims": self._allocation.of_claims(self._node.gpus.values(), self.held.folder)}
        )

    def _side(
        self, api: ClusterApi, allocation: ContainerResponses, cdi: CdiNames, prepared: PreparedClaims | None
    ) -> KubeletSide:
        node, settings = self._node, self._settings
        if prepared is not None and settings.claims is not None:
            return ClaimDriver(
                node, api, self.held, prepared, settings.kubelet_dir, taints=settings.claims.taints,
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
            if self._settings.claims is not None:
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


def owner_of(settings: ClusterSettings) -> OwnerPod | None:
    """Return the agent's pod as the owner of the report; None if it is in another namespace, or unknown."""
    if settings.own_pod is None or not settings.own_pod_uid or settings.own_pod[0] != settings.namespace:
        return None
    return OwnerPod(settings.own_pod[1], settings.own_pod_uid)


async def answer_in_cluster(node: Node, request: Request) -> dict[str, Any]:
    """Answer the control socket of an agent with sessions of pods. Raises ControlRefused.

    Sessions cannot be opened, confirmed, closed or resized here, and GPUs cannot be cordoned.
    """
    if isinstance(request, OpenRequest | ConfirmRequest | CloseRequest | ResizeRequest):
        message = f"{request.op}: this agent is one of a Kubernetes cluster, its sessions come and go with pods"
        raise ControlRefused(Failure(code="bad-request", message=message))
    if isinstance(request, CordonRequest):
        message = "cordon: this agent is one of a Kubernetes cluster, cordons stand in its report's ConfigMap"
        raise ControlRefused(Failure(code="bad-request", message=message))
    return await node.requests.answer(request)
