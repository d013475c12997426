"""Idle servers of other layers on nodes with an agent that observes: from the spawn to the stop, by GPU work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus import arbitration
from gpushare_spawner.agent.kubernetes import observing
from gpushare_spawner.model.frames import Kind
from gpushare_spawner.model.kubernetes.annotations import pod_session
from gpushare_spawner.model.kubernetes.objects import OBSERVER
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.service.kubernetes.cluster import Cluster
from tests.agent.conftest import short_folder  # noqa: F401
from tests.agent.peers import FIRST, Peer
from tests.service.conftest import hub, hub_server  # noqa: F401
from tests.service.fake_hub import FakeHub

from ..observing_agent import observing_agent
from ..service_namespace import HUB_RULES
from ..standin.cluster import Cluster as StandInCluster
from ..standin.layers.hami import hami
from ..standin.layers.nvidia import shared_node
from .walk import limits

STOP_AFTER, WARN_BEFORE = 1.0, 0.4
"""Seconds."""
COMPUTING = 4_000_001
"""A pid that no process has."""
HALF = Template.model_validate(
    {
        "name": "half-gpu", "display_name": "0.50 GPU", "gpu": {"fraction": 0.5},
        "idle": {"stop_after": f"{STOP_AFTER}s", "warn_before": f"{WARN_BEFORE}s"},
    }
)  # fmt: skip


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "READ_EVERY", 0.1)
    monkeypatch.setattr(arbitration, "SAMPLED_LATELY", 0.4)


class Watched:
    """The server of user1, idle by its kernels and by the hub, as the service sees it; and what the culler does."""

    def __init__(self, nodes: Cluster, hub: Hub, hub_server: FakeHub, cluster: StandInCluster) -> None:  # noqa: F811
        hub_server.add("user1", last_activity=time.time() - 3600)
        self.cluster = cluster
        self.pod = "jupyter-user1"
        self.hub_server = hub_server
        self.nodes = nodes
        templates = {HALF.name: HALF}
        self.culler = Culler(ActionContext(nodes, hub, lambda: templates), CullerSettings(cull_every=1e-9))
        self.notices: list[Tier] = []

    async def round(self) -> None:
        await self.culler.round()
        await asyncio.gather(*self.culler._under_way.values())
        pod = await self.cluster.pod(self.pod)
        assert pod is not None
        said = pod_session(pod["metadata"]["annotations"], pod["metadata"]["labels"])
        assert said.tier is Tier.ACTIVE
        if said.notice is not None:
            self.notices.append(said.notice.tier)
        await asyncio.sleep(0.05)

    async def knows(self, holds: Callable[[Any], bool]) -> None:
        """Wait until the service's view of the session is this."""
        async with asyncio.timeout(10):
            while True:
                for node in self.nodes:
                    session = (await node.report()).session("user1")
                    if session is not None and holds(session):
                        return
                await asyncio.sleep(0.05)

    async def is_kept_while_it_works_and_stopped_afterwards(self, stops_working: Callable[[], None]) -> None:
        """It works now, and has for as long as an idle server would have lived."""
        await self.knows(lambda session: session.gpu_busy)
        end = time.time() + STOP_AFTER + WARN_BEFORE
        while time.time() < end:
            await self.round()
        assert (self.hub_server.deleted, self.notices) == ([], [])
        stops_working()
        since = time.time()
        async with asyncio.timeout(20):
            while not self.hub_server.deleted:
                await self.round()
        assert self.hub_server.deleted == ["/users/user1/server"]
        assert set(self.notices) == {Tier.STOPPED}
        assert time.time() - since >= STOP_AFTER - 0.1


def works(program: Peer) -> Callable[[], None]:
    """A program with the library works from now on, until what is returned is called."""
    program.send(Kind.BUSY, 0, gpu=FIRST.uuid)
    return lambda: program.send(Kind.IDLE, 0, 1_000_000_000, 1_000_000, gpu=FIRST.uuid)


@pytest.fixture
async def watched(
    cluster: StandInCluster,
    hub: Hub,  # noqa: F811
    hub_server: FakeHub,  # noqa: F811
) -> AsyncIterator[Watched]:
    token = await cluster.service_account("service", HUB_RULES)
    async with cluster.api_client(token) as client:
        nodes = Cluster(client, cluster.namespace)
        await nodes.start(30)
        yield Watched(nodes, hub, hub_server, cluster)
        await nodes.close()


async def spawned(make_hub: Callable[..., Any], cluster: StandInCluster) -> dict[str, Any]:
    """The pod of user1's server."""
    jupyterhub = await make_hub()
    response = await jupyterhub.start_server("user1", {"profile": HALF.name})
    assert response.code in (201, 202), response.body
    await jupyterhub.started("user1")
    pod = await cluster.pod("jupyter-user1")
    assert pod is not None
    return pod


@pytest.mark.slow
async def test_gpu_work_alone_keeps_a_server_of_another_layer(
    cluster: StandInCluster,
    short_folder: Path,  # noqa: F811
    watched: Watched,
) -> None:
    agent = await observing_agent(cluster, short_folder)
    try:
        await agent.server("user1", template=HALF.name)
        watched.pod = "user1"
        await watched.is_kept_while_it_works_and_stopped_afterwards(works(await agent.program("user1")))
    finally:
        await agent.stop()


@pytest.mark.slow
async def test_a_server_by_time_slicing_is_stopped_when_its_programs_say_that_they_are_idle(
    make_hub: Callable[..., Any],
    cluster: StandInCluster,
    templates: Path,
    short_folder: Path,  # noqa: F811
    watched: Watched,
) -> None:
    (templates / "layers.yaml").write_text("rules: [{models: ['*L4*'], layer: time-slicing}]")
    async with shared_node(cluster, replicas=2) as node:
        agent = await observing_agent(cluster, short_folder, node)
        try:
            pod = await spawned(make_hub, cluster)
            assert limits(pod) == {"nvidia.com/gpu.shared": "1", OBSERVER: "1"}
            await watched.is_kept_while_it_works_and_stopped_afterwards(works(await agent.program("jupyter-user1")))
        finally:
            await agent.stop()


@pytest.mark.slow
async def test_a_server_by_hami_is_stopped_when_the_driver_counts_no_work_of_it(
    make_hub: Callable[..., Any],
    cluster: StandInCluster,
    templates: Path,
    short_folder: Path,  # noqa: F811
    watched: Watched,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (templates / "layers.yaml").write_text("rules: [{layer: hami}]")
    async with hami(cluster) as node:
        agent = await observing_agent(cluster, short_folder, node)
        try:
            pod = await spawned(make_hub, cluster)
            assert OBSERVER not in limits(pod), "HAMi preloads a library of its own"
            uid = pod["metadata"]["uid"]
            monkeypatch.setattr(processes, "cgroup", lambda pid: f"/kubepods/pod{uid}/c" if pid == COMPUTING else "/")
            agent.source.working[FIRST.uuid] = {COMPUTING: 0.3}
            await watched.is_kept_while_it_works_and_stopped_afterwards(agent.source.working.clear)
        finally:
            await agent.stop()
