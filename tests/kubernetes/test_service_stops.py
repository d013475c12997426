"""The last step of the way down on a cluster: the service asks a real hub, and the hub's own stop removes the pod."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

from traitlets.config import Config

from gpushare_spawner.model.kubernetes.annotations import HUB, SessionAnnotations, pod_session
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.service.kubernetes.cluster import Cluster as ServiceCluster
from tests.service.conftest import Clock
from tests.spawner.running_hub import until

from .service_namespace import HUB_RULES, eventually, has, seen
from .sharing_hub import GpuNodes, gpu
from .standin.cluster import Cluster

HOUR = 3600.0
TOKEN = secrets.token_hex(16)
IDLE = {"stop_after": "1h", "warn_before": "5m"}
TEMPLATE = Template(name="quarter-gpu", display_name="0.25 GPU", gpu={"fraction": 0.25}, idle=IDLE)


def with_the_service(config: Config) -> None:
    """As jupyterhub_config.d/20-gpushare-service.py makes it known to the hub, but not started by the hub."""
    scopes = ["list:users", "read:servers", "delete:servers", "read:users:groups"]
    config.JupyterHub.services.append({"name": "gpushare", "api_token": TOKEN})
    config.JupyterHub.load_roles.append({"name": "gpushare-service", "scopes": scopes, "services": ["gpushare"]})


def reported(said: SessionAnnotations, kernels_busy: int = 0) -> SessionReport:
    """An idle session, as its agent would report it."""
    return SessionReport(
        id=said.session, user=said.session, template=said.template, gpus=said.gpus, share_units=said.share_units,
        tier_since=said.tier_since, effective_units=said.effective_units, guaranteed_units=said.effective_units,
        opened_at=said.tier_since, kernels=1, kernels_busy=kernels_busy, last_kernel_activity=said.tier_since,
    )  # fmt: skip


async def test_an_idle_server_is_told_and_then_stopped_by_its_hub(
    make_hub: Callable[..., Any], nodes: GpuNodes, cluster: Cluster
) -> None:
    node = await nodes.add()
    running = await make_hub(with_the_service)
    assert (await running.start_server("ada", {"profile": "quarter-gpu"})).code == 201
    pod = await cluster.pod("jupyter-ada")
    assert pod is not None
    said = pod_session(pod["metadata"]["annotations"])
    clock = Clock()

    async def report(at: float, kernels_busy: int = 0) -> None:
        clock.now = at
        gpus = tuple(gpu(node, index) for index in range(2))
        sessions = (reported(said, kernels_busy),)
        published = Report(node=node, published_at=at, gpus=gpus, sessions=sessions)
        await nodes.write(node, published.model_dump_json(), at)

    began = time.time()
    token = await cluster.service_account("service", HUB_RULES)
    hub = Hub(f"{running.url}/api", TOKEN)
    async with cluster.api_client(token) as client:
        watched = ServiceCluster(client, cluster.namespace, clock=clock, hub=pod["metadata"]["annotations"][HUB])
        await watched.start(60)
        culler = Culler(
            ActionContext(watched, hub, lambda: {TEMPLATE.name: TEMPLATE}, clock=clock), CullerSettings(cull_every=1e-9)
        )

        async def round_at(at: float, kernels_busy: int = 0) -> None:
            await report(at, kernels_busy)
            up_to_date = has("ada", confirmed=True, kernels_busy=kernels_busy)
            await seen(watched, node, lambda shown: shown.published_at == at and up_to_date(shown))
            await culler.round()
            await asyncio.gather(*culler._under_way.values())

        try:
            await round_at(began + 0.9 * HOUR)
            assert (await told(cluster)) is None
            await round_at(began + 0.95 * HOUR)
            assert (await told(cluster)) is Tier.STOPPED
            await eventually(lambda: any(s.notice for s in sessions(watched)))
            await round_at(began + 1.1 * HOUR, kernels_busy=1)
            assert (await told(cluster)) is None, "a kernel works: taken back"
            await eventually(lambda: not any(s.notice for s in sessions(watched)))
            assert running.spawner("ada").active
            await round_at(began + 1.2 * HOUR)
            assert (await told(cluster)) is Tier.STOPPED
            await eventually(lambda: any(s.notice for s in sessions(watched)))
            await round_at(began + 1.3 * HOUR)
            await until(lambda: not running.spawner("ada").active, 60)
            await until_gone(cluster, "jupyter-ada")
            assert culler.counters.actions == {Tier.STOPPED: 1}
            assert not await nodes.held()
            assert not running.reservations.in_flight()
        finally:
            await watched.close()
            hub.close()


def sessions(watched: ServiceCluster) -> list[SessionAnnotations]:
    return [pod.session for pod in watched.all_pods()]


async def told(cluster: Cluster) -> Tier | None:
    """What ada is told in her pod's annotations."""
    pod = await cluster.pod("jupyter-ada")
    assert pod is not None
    coming = pod_session(pod["metadata"]["annotations"]).notice
    return coming.tier if coming is not None else None


async def until_gone(cluster: Cluster, pod: str) -> None:
    async with asyncio.timeout(60):
        while await cluster.pod(pod) is not None:
            await asyncio.sleep(0.05)
