"""An agent of a node, in this process: on GPUs that exist only as numbers, with a real kubelet's side of everything."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.kubernetes.cluster_agent import OnKubernetes
from gpushare_spawner.agent.kubernetes.devices.cdi import CdiNames
from gpushare_spawner.agent.kubernetes.devices.container import ContainerResponses
from gpushare_spawner.agent.kubernetes.host_library import HostLibraries
from gpushare_spawner.agent.kubernetes.pods.sessions import PodEndpoints
from gpushare_spawner.agent.kubernetes.settings import ClusterSettings, PublishSettings
from gpushare_spawner.agent.node import Node, NodeSettings
from gpushare_spawner.agent.periodic import RoundSettings
from gpushare_spawner.agent.sessions.environment import Libraries
from gpushare_spawner.agent.state_folder import StateFolder
from gpushare_spawner.clients.api import ClusterApi, KubeconfigConnection
from gpushare_spawner.model.kubernetes.annotations import SessionAnnotations, labels, pod_session
from gpushare_spawner.model.kubernetes.objects import (
    HOSTNAME_LABEL,
    REPORT_KEY,
    REPORT_SELECTOR,
    report_name,
    resource_limits,
    resource_name,
)
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.share import Tier
from tests.agent.peers import FIRST, SECOND, GpusOnPaper, Peer

from .standin.client import path
from .standin.cluster import Cluster, a_pod
from .standin.kubelet import StandInKubelet

GPU_0, GPU_1 = resource_name(0), resource_name(1)
LIBRARY = Path("/opt/gpushare/libgpushare.so")


class NodeAgent:
    """Can be stopped and started again on the same folder, as after an update."""

    def __init__(self, cluster: Cluster, kubelet: StandInKubelet, token: str, folder: Path) -> None:
        self.cluster, self.kubelet, self.folder = cluster, kubelet, folder
        self.token = token
        self.source = GpusOnPaper()
        self.gpus: tuple[Gpu, ...] = (FIRST, SECOND)
        self.settings = NodeSettings(
            name=kubelet.name, rounds=RoundSettings(check_every=0.1, poll_every=0.1, well_after=0.2)
        )
        self.cluster_settings = ClusterSettings(
            namespace=cluster.namespace,
            kubelet_dir=kubelet.folder,
            device_plugins_dir=kubelet.folder / "device-plugins",
            publish=PublishSettings(at_most_every=0.5, capacity_delay=0.02, capacity_every=0.05, poll_every=0.1),
        )
        self.cdi_folders: tuple[Path, ...] = ()
        self.preload_file = False
        self.node: Node
        self.on_kubernetes: OnKubernetes
        self._stack = contextlib.AsyncExitStack()
        self.peers: list[Peer] = []

    async def start(self) -> NodeAgent:
        stack = self._stack = contextlib.AsyncExitStack()
        state = StateFolder(self.folder)
        stack.callback(state.close)
        libraries = HostLibraries(LIBRARY, preload_list=LIBRARY.parent / "ld.so.preload")
        self.node = Node(self.settings, self.gpus, self.source, state, Libraries(preload=LIBRARY), PodEndpoints(state))
        await self.node.start()
        stack.push_async_callback(self.node.close)
        api = ClusterApi(KubeconfigConnection(self.cluster.api_client(self.token)))
        stack.push_async_callback(api.close)
        allocation = ContainerResponses(libraries, self.preload_file)
        self.on_kubernetes = OnKubernetes(
            self.node, api, allocation, CdiNames(self.gpus, folders=self.cdi_folders), self.cluster_settings
        )
        await stack.enter_async_context(self.on_kubernetes.running())
        return self

    async def stop(self) -> None:
        for peer in self.peers:
            peer.close()
        await self._stack.aclose()

    def by_claims(self, taints: bool = True) -> None:
        """Be a DRA driver from the next start on."""
        self.cluster_settings = replace(self.cluster_settings, claims=True, taints=taints)

    def with_units_of(self, size: int) -> None:
        self.cluster_settings = replace(self.cluster_settings, unit_size=size)

    # what the cluster sees

    async def offered(self, amount: int, resource: str = GPU_0) -> None:
        """Wait until the node's status offers so many units."""
        await self.cluster.wait_for_allocatable(self.kubelet.name, resource, amount)

    async def ready(self) -> None:
        for gpu in self.gpus:
            await self.offered(100, resource_name(gpu.index))

    async def report(self) -> Report | None:
        """What is published."""
        maps = await self.cluster.config_maps(REPORT_SELECTOR)
        named = {one["metadata"]["name"]: one for one in maps}
        found = named.get(report_name(self.kubelet.name))
        return None if found is None else Report.model_validate_json(found["data"][REPORT_KEY])

    async def annotations(self, pod: str) -> SessionAnnotations:
        found = await self.cluster.pod(pod)
        assert found is not None
        return pod_session(found["metadata"]["annotations"])

    async def annotate(self, pod: str, annotations: dict[str, str | None]) -> None:
        where = path("pods", self.cluster.namespace, pod)
        await self.cluster.admin.patch(where, {"metadata": {"annotations": annotations}})

    # sessions

    async def pod(
        self,
        name: str,
        said: SessionAnnotations | None = None,
        unit_size: int = 1,
        limits: Mapping[str, str] = MappingProxyType({}),
        **changes: Any,
    ) -> None:
        """Create the pod of a session, as the spawner does. ``limits``: beside those of its share."""
        said = said or session(name, **changes)
        manifest = a_pod(
            name,
            limits={**limits, **resource_limits(said.share, said.gpu_indices, unit_size)},
            annotations=said.annotations(),
            labels=labels(),
            nodeSelector={HOSTNAME_LABEL: self.kubelet.name},
        )
        await self.cluster.admin.create(path("pods", self.cluster.namespace), manifest)

    async def running(self, name: str, **changes: Any) -> SessionReport:
        """A pod that runs, and its session."""
        await self.pod(name, **changes)
        await self.cluster.wait_for_phase(name, "Running")
        return await self.session(name)

    async def session(self, name: str, timeout: float = 10.0) -> SessionReport:
        """The session of that id, once it is there."""
        session: SessionReport = await self.until(lambda: self.node.report().session(name), timeout)
        return session

    async def until(self, look: Callable[[], Any], timeout: float = 10.0) -> Any:
        """What `look` gives, once it is something."""
        end = asyncio.get_running_loop().time() + timeout
        while not (found := look()):
            assert asyncio.get_running_loop().time() < end, f"it did not come about within {timeout} s"
            await asyncio.sleep(0.02)
        return found

    async def peer(self, name: str) -> Peer:
        """A CUDA process of a session."""
        socket = self.node.sessions[name].socket
        assert socket is not None
        peer = Peer(socket.path)
        self.peers.append(peer)
        await peer.connect()
        return peer

    def held(self, name: str) -> dict[str, tuple[str, ...]]:
        """A session's devices, by GPU."""
        pod = self.node.sessions[name].record.pod
        assert pod is not None
        return pod.devices

    def environment(self, name: str) -> dict[str, str]:
        """What the device plugins gave to a pod's container."""
        worker = self.kubelet.worker(self.cluster.namespace, name)
        given = self.kubelet.plugins.given(worker.pod["metadata"]["uid"], "notebook")
        return dict(given.envs)

    async def delete(self, name: str) -> None:
        await self.cluster.admin.delete(path("pods", self.cluster.namespace, name), grace=0)


def session(name: str, gpus: tuple[Gpu, ...] = (FIRST,), share: int = 25, **changes: Any) -> SessionAnnotations:
    """A quarter of the first GPU, unless told otherwise."""
    values: dict[str, Any] = {
        "session": name, "template": "quarter-gpu", "share_units": share, "effective_units": share,
        "gpus": tuple(gpu.uuid for gpu in gpus), "gpu_indices": tuple(gpu.index for gpu in gpus),
        "tier_since": 1_700_000_000.0, "tier": Tier.ACTIVE,
    }  # fmt: skip
    return SessionAnnotations(**values | changes)


def inode(path: Path) -> int:
    return os.stat(path).st_ino
