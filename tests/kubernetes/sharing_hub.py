"""A real hub with GPUShareSpawner on a cluster of the tests, and nodes whose agents are the test itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kubernetes_asyncio.config.kube_config
import pytest
from kubespawner import KubeSpawner, clients

from gpushare_spawner.model.controls import Cordon
from gpushare_spawner.model.kubernetes.annotations import pod_session
from gpushare_spawner.model.kubernetes.objects import (
    PUBLISHED_AT,
    REPORT_COMPONENT,
    REPORT_COMPONENT_LABEL,
    REPORT_KEY,
    cordon_annotations,
    cordon_name,
    report_name,
    resource_name,
)
from gpushare_spawner.model.report import GpuReport, Report
from gpushare_spawner.spawner.kubernetes.cluster.pods import holds_share
from gpushare_spawner.spawner.kubernetes.spawner import GPUShareSpawner
from tests.ports import free_port
from tests.spawner.running_hub import RunningHub

from .standin.client import ApiStatus, path
from .standin.cluster import HUB_RULES, RBAC, Cluster
from .standin.own_nodes import LABEL
from .standin.programs import Listeners, Programs

SHARING_RULES = [*HUB_RULES, {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch"]}]
"""What z2jh's hub may do, and what the chart of this project adds for the spawner."""

MODEL = "Simulated GPU 16 GiB"


def gpu(node: str, index: int, model: str = MODEL, capacity: int = 100, healthy: bool = True) -> GpuReport:
    """A GPU of a node, as its agent would report it."""
    return GpuReport(
        index=index,
        uuid=f"GPU-{node}-{index}",
        model=model,
        memory_bytes=16 * 2**30,
        capacity_units=capacity,
        healthy=healthy,
        simulated=True,
    )


@dataclass
class GpuNodes:
    """Nodes with GPUs whose units stand in the nodes' status, and the reports that their agents would publish."""

    cluster: Cluster
    names: list[str] = field(default_factory=list)

    async def add(self, gpus: int = 2, capacity: int = 100, programs: Programs | None = None, **options: Any) -> str:
        """A node with a fresh report; its name."""
        units = {resource_name(index): capacity for index in range(gpus)}
        node = await self.cluster.make_node(programs=programs or Listeners(), static_resources=units, **options)
        self.names.append(node.name)
        await self.report(node.name, [gpu(node.name, index, capacity=capacity) for index in range(gpus)])
        return str(node.name)

    async def report(self, node: str, gpus: list[GpuReport], age: float = 0.0) -> None:
        """Publish a report that is so many seconds old."""
        report = Report(node=node, published_at=time.time() - age, gpus=tuple(gpus))
        await self.write(node, report.model_dump_json(), report.published_at)

    async def write(self, node: str, text: str, published_at: float = 0.0) -> None:
        config_map = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": report_name(node),
                "labels": {REPORT_COMPONENT_LABEL: REPORT_COMPONENT},
                "annotations": {PUBLISHED_AT: f"{published_at:.3f}"},
            },
            "data": {REPORT_KEY: text},
        }
        namespace = self.cluster.namespace
        try:
            await self.cluster.admin.create(path("configmaps", namespace), config_map)
        except ApiStatus as error:
            if error.code != 409:
                raise
            await self.cluster.admin.patch(path("configmaps", namespace, report_name(node)), config_map)

    async def cordon(self, node: str, gpu: str) -> None:
        """Cordon a GPU (UUID), or the whole node (empty), as the service does it."""
        cordon = Cordon(gpu=gpu, by="boss", reason="The fan is replaced.", since=time.time())
        await self._annotate(node, dict(cordon_annotations([cordon])))

    async def uncordon(self, node: str, gpu: str) -> None:
        """End a cordon, as the service does it."""
        await self._annotate(node, {cordon_name(gpu): None})

    async def _annotate(self, node: str, annotations: dict[str, Any]) -> None:
        where = path("configmaps", self.cluster.namespace, report_name(node))
        await self.cluster.admin.patch(where, {"metadata": {"annotations": annotations}})

    async def held(self) -> dict[str, int]:
        """Units that pods hold, by GPU, as their annotations say."""
        units: dict[str, int] = {}
        for pod in await self.cluster.pods():
            if holds_share(pod):
                session = pod_session(pod["metadata"]["annotations"])
                for uuid in session.gpus:
                    units[uuid] = units.get(uuid, 0) + session.share_units
        return units


@contextlib.asynccontextmanager
async def kube_access(
    cluster: Cluster, rules: list[dict[str, Any]] | None = None, cluster_rules: list[dict[str, Any]] | None = None
) -> AsyncIterator[None]:
    """KubeSpawner's clients in this process are a service account of the cluster; its reflectors end with the test.

    ``rules`` hold in the cluster's namespace, ``cluster_rules`` in all namespaces.
    """
    token = await cluster.service_account("hub", rules or SHARING_RULES, cluster_rules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kubernetes_asyncio.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(cluster.kubeconfig(token))
        )
        clients.load_config.cache_clear()
        try:
            yield
        finally:
            with contextlib.suppress(Exception):
                await KubeSpawner._stop_all_reflectors()
            KubeSpawner.reflectors.clear()
            clients.load_config.cache_clear()
            for key, client in list(clients._client_cache.items()):
                if key[0] is asyncio.get_running_loop():
                    del clients._client_cache[key]
                    await client.api_client.close()


@contextlib.asynccontextmanager
async def everywhere(cluster: Cluster, *namespaces: str) -> AsyncIterator[None]:
    """The service account of `kube_access` may do everything in the whole cluster; these namespaces go afterwards."""
    account = {"kind": "ServiceAccount", "name": "hub", "namespace": cluster.namespace}
    rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
    name = f"{cluster.namespace}-all"
    await cluster._bind("ClusterRole", {"name": name}, rules, account, "")
    try:
        yield
    finally:
        for kind in ("clusterrolebindings", "clusterroles"):
            await cluster.admin.delete(path(kind, name=name, group=RBAC))
        for namespace in namespaces:
            await cluster.admin.delete(path("namespaces", name=namespace))


def tolerates_own_nodes(config: Any) -> None:
    """On a real cluster a test's nodes have a taint, and pods get the toleration on their way to the API server."""
    config.KubeSpawner.tolerations = [{"key": LABEL, "operator": "Exists"}]


class SharingHub(RunningHub):
    """The hub of the one-machine tests, with pods instead of processes."""

    def __init__(
        self,
        folder: Path,
        templates: Path,
        cluster: Cluster,
        configure: Callable[[Any], None] = lambda config: None,
        spawner_class: type = GPUShareSpawner,
    ) -> None:
        def on_cluster(config: Any) -> None:
            config.JupyterHub.spawner_class = spawner_class
            config.JupyterHub.concurrent_spawn_limit = 0
            config.GPUShareSpawner.templates_dir = str(templates)
            config.KubeSpawner.namespace = cluster.namespace
            config.KubeSpawner.port = free_port()
            config.KubeSpawner.cmd = ["jupyterhub-singleuser"]
            config.KubeSpawner.image = "standin/notebook:1"
            config.KubeSpawner.environment = {}
            config.KubeSpawner.delete_grace_period = 0
            config.Spawner.start_timeout = 20
            config.Spawner.http_timeout = 20
            configure(config)

        super().__init__(folder, templates, folder / "no-agent.sock", on_cluster)

    async def __aexit__(self, *_: object) -> None:
        # servers of pods are left to the cluster: that is quicker than to stop one by one
        await self.end(cleanup_servers=False)


@pytest.fixture
async def nodes(cluster: Cluster) -> GpuNodes:
    return GpuNodes(cluster)


@pytest.fixture
async def make_hub(cluster: Cluster, templates: Path, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts hubs; a second call is a hub on the same database."""
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(kube_access(cluster))

        async def make(configure: Callable[[Any], None] = lambda config: None) -> SharingHub:
            hub = SharingHub(tmp_path, templates, cluster, configure)
            await stack.enter_async_context(hub)
            return hub

        yield make
