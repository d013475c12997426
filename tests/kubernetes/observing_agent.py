"""An agent that only observes, in this process, on a node whose GPUs another layer gives out."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState, Utilisation
from gpushare_spawner.agent.kubernetes.devices.container import ContainerResponses
from gpushare_spawner.agent.kubernetes.host_library import HostLibraries
from gpushare_spawner.agent.kubernetes.observing import ObservingNode
from gpushare_spawner.agent.kubernetes.pods.sessions import PodEndpoints
from gpushare_spawner.agent.node import Node
from gpushare_spawner.agent.sessions.environment import Libraries
from gpushare_spawner.agent.state_folder import StateFolder
from gpushare_spawner.clients.api import ClusterApi, KubeconfigConnection
from gpushare_spawner.model.frames import Feature, Role
from gpushare_spawner.model.kubernetes.annotations import SessionAnnotations, gpu_names
from gpushare_spawner.model.kubernetes.objects import HOSTNAME_LABEL, OBSERVER
from gpushare_spawner.model.layers import LayerName
from tests.agent.peers import GpusOnPaper, Peer

from .node_agent import LIBRARY, NodeAgent
from .standin.client import path
from .standin.cluster import Cluster, a_pod
from .standin.kubelet import StandInKubelet

OBSERVER_RULES = [
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create", "patch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
]
"""All that the Role of an agent that observes allows."""


class WorkingGpus(GpusOnPaper):
    """NVML of GPUs on which processes work."""

    def __init__(self) -> None:
        super().__init__()
        self.working: dict[str, dict[int, float]] = {}
        """By UUID: pids of processes with a context, and their share of the GPU's time."""
        self.tells = True
        """Whether the driver counts by process."""

    def state(self, gpu: Gpu) -> GpuState:
        here = self.working.get(gpu.uuid, {})
        processes = dict.fromkeys(here, 2**30)
        return GpuState(healthy=True, utilisation=min(1.0, sum(here.values())), processes=processes)

    def utilisation(self, gpu: Gpu, since: float) -> tuple[Utilisation, ...] | None:
        now = time.time()
        here = self.working.get(gpu.uuid, {})
        return tuple(Utilisation(pid, now, busy) for pid, busy in here.items() if busy) if self.tells else None


class ObservingAgent(NodeAgent):
    """Can be stopped and started again on the same folder."""

    observing: ObservingNode

    def __init__(self, cluster: Cluster, kubelet: StandInKubelet, token: str, folder: Path) -> None:
        super().__init__(cluster, kubelet, token, folder)
        self.source: WorkingGpus = WorkingGpus()

    async def start(self) -> ObservingAgent:
        stack = self._stack = contextlib.AsyncExitStack()
        state = StateFolder(self.folder)
        stack.callback(state.close)
        libraries = Libraries(preload=LIBRARY)
        self.node = Node(self.settings, self.gpus, self.source, state, libraries, PodEndpoints(state))
        await self.node.start()
        stack.push_async_callback(self.node.close)
        api = ClusterApi(KubeconfigConnection(self.cluster.api_client(self.token)))
        stack.push_async_callback(api.close)
        allocation = ContainerResponses(
            HostLibraries(LIBRARY, preload_list=LIBRARY.parent / "ld.so.preload"), self.preload_file
        )
        self.observing = ObservingNode(self.node, api, allocation, self.cluster_settings)
        await stack.enter_async_context(self.observing.running())
        return self

    async def server(
        self, name: str, layer: LayerName = LayerName.TIME_SLICING, library: bool = True, template: str = "quarter",
        **forged: Any,
    ) -> str:  # fmt: skip
        """A running pod whose GPU a layer gives, as the agent knows it; its uid. ``forged``: see below."""
        uid = await self.server_without_agent(name, layer, library, template, **forged)
        await self.session(name)
        return uid

    async def server_without_agent(
        self, name: str, layer: LayerName = LayerName.TIME_SLICING, library: bool = False, template: str = "quarter",
        **forged: Any,
    ) -> str:  # fmt: skip
        """A running pod whose GPU a layer gives; its uid. ``forged``: more that its annotations say."""
        session = SessionAnnotations(
            session=name, template=template, share_units=25, gpus=gpu_names(layer, name, 1), gpu_indices=(0,),
            tier_since=1_700_000_000.0, effective_units=25, layer=layer, **forged,
        )  # fmt: skip
        manifest = a_pod(
            name, limits={OBSERVER: 1} if library else {}, annotations=session.annotations(), labels=session.labels(),
            nodeSelector={HOSTNAME_LABEL: self.kubelet.name},
        )  # fmt: skip
        await self.cluster.admin.create(path("pods", self.cluster.namespace), manifest)
        await self.cluster.wait_for_phase(name, "Running")
        pod = await self.cluster.pod(name)
        assert pod is not None
        return str(pod["metadata"]["uid"])

    async def program(self, name: str, role: Role = Role.CUDA, features: Feature = Feature.OBSERVE) -> Peer:
        """A process of a server (its pod's name), with the library."""
        socket = Path(self.environment(name)["GPUSHARE_SOCKET"])
        await self.until(socket.exists)
        peer = Peer(socket)
        self.peers.append(peer)
        welcome, *_ = await peer.connect(role, features)
        assert welcome.fields[6] & Feature.OBSERVE
        return peer


async def observing_agent(cluster: Cluster, folder: Path, kubelet: StandInKubelet | None = None) -> ObservingAgent:
    """A started one, on a node of its own unless one is given."""
    node = kubelet or await cluster.make_node()
    await cluster.service_account("observer", OBSERVER_RULES)
    agent = ObservingAgent(cluster, node, await cluster.token("observer"), folder)
    await agent.start()
    await agent.offered(512, OBSERVER)
    return agent
