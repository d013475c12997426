"""A release gives requests back, another pod takes them, and the session gets them again: every part but the culler.

The agent, the service's part, the API server with its hub rights, the scheduler and the kubelet follow each other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.agent.node import NodeSettings
from gpushare_spawner.agent.sessions import host_memory
from gpushare_spawner.agent.sessions.host_memory import HostMemorySettings
from gpushare_spawner.model.frames import Kind, Role
from gpushare_spawner.model.kubernetes import annotations as annotations_names
from gpushare_spawner.model.kubernetes.annotations import SessionAnnotations, tier_patch
from gpushare_spawner.model.kubernetes.container_requests import REQUESTS
from gpushare_spawner.model.kubernetes.objects import resource_limits
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.kubernetes.cluster import Cluster as SeenCluster
from gpushare_spawner.service.kubernetes.released_requests import ReleasedRequests
from tests.agent.conftest import short_folder  # noqa: F401
from tests.agent.peers import FIRST, GIB, Peer

from .agent_account import agent_token
from .node_agent import NodeAgent, session
from .service_namespace import HUB_RULES
from .standin.client import path
from .standin.cluster import Cluster, a_pod
from .standin.programs import Listeners

RIGHTS = [*HUB_RULES, {"apiGroups": [""], "resources": ["pods/resize"], "verbs": ["patch"]}]
TEMPLATE = Template.model_validate(
    {
        "name": "quarter-gpu",
        "display_name": "0.25 GPU",
        "gpu": {"fraction": 0.25},
        "resources": {"cpu": {"guarantee": 1.5, "limit": 2}, "memory": {"guarantee": "2Gi", "limit": "4Gi"}},
        "idle": {"release_after": "45m", "release_resources": {"cpu": "100m", "memory": "256Mi"}},
    }
)
FULL = {"cpu": "1500m", "memory": str(2 * GIB)}


class TwoCores:
    """A node of two cores with ann's session, which requests one and a half of them."""

    def __init__(self, cluster: Cluster, agent: NodeAgent, cgroups: Path) -> None:
        self.cluster, self.agent, self.cgroups = cluster, agent, cgroups

    async def open(self) -> tuple[Peer, Peer]:
        """ann's CUDA process and her notebook server."""
        said = session("ann")
        share = resource_limits(said.share, said.gpu_indices)
        await self.create("ann", FULL, {"cpu": "2", "memory": "4Gi", **share}, said)
        pod = await self.cluster.wait_for_phase("ann", "Running")
        self.uses(pod["metadata"]["uid"])
        await self.agent.session("ann")
        cuda = await self.agent.peer("ann")
        socket = self.agent.node.sessions["ann"].socket
        assert socket is not None
        server = Peer(socket.path)
        await server.connect(Role.NOTEBOOK)
        self.agent.peers.append(server)
        return cuda, server

    async def create(
        self, name: str, requests: dict[str, str], limits: dict[str, str], said: SessionAnnotations | None = None
    ) -> None:
        annotations, labels = (said.annotations(), annotations_names.labels()) if said is not None else ({}, {})
        manifest = a_pod(name, limits=limits, annotations=annotations, labels=labels)
        resources = manifest["spec"]["containers"][0]["resources"]
        resources["requests"] = {**requests, **{name: limit for name, limit in limits.items() if "/" in name}}
        await self.cluster.admin.create(path("pods", self.cluster.namespace), manifest)

    async def release(self) -> None:
        """The culler's patch."""
        await self.agent.annotate("ann", tier_patch(Tier.RELEASED, time.time(), 0))

    async def requests(self, cpu: str, in_force: str = "") -> dict[str, Any]:
        """The pod once it asks for so much CPU and its node has granted as much, or ``in_force``."""

        def so(pod: dict[str, Any]) -> bool:
            (container,), (here,) = pod["spec"]["containers"], pod["status"]["containerStatuses"]
            asked, has = container["resources"]["requests"]["cpu"], here["resources"]["requests"]["cpu"]
            return (asked, has) == (cpu, in_force or cpu)

        return await self.cluster.wait_for_pod("ann", so)

    async def told_that_it_lacks(self, server: Peer, lacks: bool) -> None:
        """The notebook server learns of requests that are not granted, or no longer does."""
        await self.agent.until(lambda: self.agent.node.sessions["ann"].lacks_requests is lacks)
        assert (await server.status()).lacks_requests is lacks

    def uses(self, uid: str) -> None:
        """What the kernel says of the pod: next to nothing."""
        folder = self.cgroups / "kubepods" / "burstable" / f"pod{uid}"
        folder.mkdir(parents=True)
        (folder / "cpu.stat").write_text("usage_usec 1000000\n")
        (folder / "memory.current").write_text(f"{64 * 2**20}\n")
        (folder / "memory.stat").write_text("inactive_file 0\n")


@pytest.fixture
async def two_cores(
    cluster: Cluster,
    short_folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[TwoCores]:
    monkeypatch.setattr(host_memory, "OVER", 0.2)
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    await cluster.require_resize()
    kubelet = await cluster.make_node(programs=Listeners(), cpu="2", memory="8Gi")
    agent = NodeAgent(cluster, kubelet, await agent_token(cluster, kubelet.name), short_folder)
    memory = HostMemorySettings(cgroups=tmp_path)
    agent.settings = NodeSettings(name=kubelet.name, rounds=agent.settings.rounds, host_memory=memory)
    await agent.start()
    await agent.ready()
    token = await cluster.service_account("hub", RIGHTS)
    async with cluster.api_client(token) as client:
        seen = SeenCluster(client, cluster.namespace, lambda: requests.changed())
        requests = ReleasedRequests(seen, lambda: {"quarter-gpu": TEMPLATE})
        await seen.start(10.0)
        requests.start()
        try:
            yield TwoCores(cluster, agent, tmp_path)
        finally:
            await requests.close()
            await seen.close()
            await agent.stop()


async def test_requests_are_lent_to_a_pod_that_waits_and_come_back_when_it_goes(two_cores: TwoCores) -> None:
    cluster = two_cores.cluster
    cuda, server = await two_cores.open()
    await two_cores.create("bob", {"cpu": "1", "memory": "1Gi"}, {})
    await asyncio.sleep(0.3)
    bob = await cluster.pod("bob")
    assert bob is not None
    assert not bob["spec"].get("nodeName"), "there is not enough CPU"

    await two_cores.release()
    released = await two_cores.requests("100m")
    assert released["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "2"
    assert released["status"]["qosClass"] == "Burstable"
    await cluster.wait_for_phase("bob", "Running")

    cuda.send(Kind.REQUEST, GIB // 4, 0, gpu=FIRST.uuid)
    await cuda.until(Kind.GRANT)
    back = await two_cores.requests("1500m", in_force="100m")
    assert back["status"]["phase"] == "Running"
    await cluster.wait_for_pod("ann", lambda pod: "Deferred" in str(pod["status"]["conditions"]))
    await two_cores.told_that_it_lacks(server, True)

    await cluster.admin.delete(path("pods", cluster.namespace, "bob"), grace=0)
    whole = await two_cores.requests("1500m")
    assert whole["status"]["qosClass"] == "Burstable"
    assert whole["status"]["containerStatuses"][0]["restartCount"] == 0
    await two_cores.told_that_it_lacks(server, False)
    await cluster.wait_for_pod("ann", lambda pod: REQUESTS not in pod["metadata"]["annotations"])


async def test_without_the_agent_nothing_is_given_back(two_cores: TwoCores) -> None:
    await two_cores.open()
    await two_cores.agent.stop()
    await two_cores.release()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await two_cores.requests("100m")
    await two_cores.agent.start()
    await two_cores.requests("100m")
