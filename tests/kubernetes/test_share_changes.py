"""The share of a running pod changes: the service asks in its annotations, the agent decides, the devices follow."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpushare_spawner.model.control import AgentUnreachable, ControlRefused, ResizeRequest
from gpushare_spawner.model.frames import Kind
from gpushare_spawner.model.kubernetes.annotations import pod_session, tier_patch
from gpushare_spawner.model.share import Share, Tier
from gpushare_spawner.service.kubernetes import cluster as service_node
from gpushare_spawner.service.kubernetes.cluster import Cluster as ServiceCluster
from tests.agent.conftest import short_folder  # noqa: F401
from tests.agent.peers import FIRST, GIB, SECOND

from .agent_account import agent_token
from .node_agent import NodeAgent
from .standin.cluster import Cluster


@pytest.fixture
async def agent(cluster: Cluster, short_folder: Path) -> AsyncIterator[NodeAgent]:  # noqa: F811
    kubelet = await cluster.make_node()
    agent = NodeAgent(cluster, kubelet, await agent_token(cluster, kubelet.name), short_folder)
    await agent.start()
    await agent.ready()
    yield agent
    await agent.stop()


@pytest.fixture
async def service(cluster: Cluster) -> AsyncIterator[ServiceCluster]:
    async with cluster.api_client() as client:
        running = ServiceCluster(client, cluster.namespace)
        await running.start(10)
        yield running
        await running.close()


async def resize(service: ServiceCluster, name: str, units: int, limit: str | None = None, last: int = 0) -> None:
    """As the service's action does: on what the watches have brought."""
    for _ in range(200):
        for node in service:
            try:
                found = (await node.report()).session(name)
            except AgentUnreachable:
                continue
            if found is not None and found.confirmed:
                request = ResizeRequest(
                    id=name, share_units=units, last_units=last, memory_limit=limit, reason="a test"
                )
                await node.send(request)
                return
        await asyncio.sleep(0.05)
    raise AssertionError(f"the service does not see session {name}")


def in_use(agent: NodeAgent) -> int:
    """Units of GPU 0 that are owned or kept, as the device plugin counts them."""
    held = agent.on_kubernetes.allocated
    return sum(held._in_use(one, FIRST.uuid, ids) for one, ids in held._holders(FIRST.uuid))


async def test_devices_and_annotations_follow_the_new_share_and_the_pod_runs_on(
    agent: NodeAgent, service: ServiceCluster
) -> None:
    await agent.running("ada")
    peer = await agent.peer("ada")
    await resize(service, "ada", 50, "6Gi")
    said = await agent.annotations("ada")
    assert (said.share_units, said.effective_units, said.placed_units) == (50, 50, 25)
    assert (said.memory_limit, said.resize) == ("6Gi", None)
    assert (await peer.until(Kind.TIER)).fields[:5] == (Tier.ACTIVE.depth, 50, 0, 50, 50)
    assert (await peer.until(Kind.DEVICE)).fields[0] == 6 * GIB
    # the pod's own 25, and 50 for others: its 25 more are not to be had
    await agent.offered(75)
    await agent.running("ben", share=50)
    with pytest.raises(ControlRefused) as refused:
        await resize(service, "ada", 51)
    assert refused.value.code == "no-capacity"
    assert (await agent.annotations("ada")).share_units == 50
    await resize(service, "ada", 10)
    await agent.offered(75 + 40)
    found = await agent.session("ada")
    assert (found.share_units, found.guaranteed_units) == (10, 10)
    await agent.running("cleo", share=40)
    assert in_use(agent) == 100


async def test_borrower_owns_nothing_of_a_pod_that_is_found_after_it(agent: NodeAgent, service: ServiceCluster) -> None:
    await agent.running("ada", share=30)
    await agent.running("ben", share=70)
    await agent.annotate("ben", tier_patch(Tier.RELEASED, time.time(), 0))
    await agent.offered(170)
    await resize(service, "ada", 100)
    await agent.until(lambda: agent.node.sessions["ada"].record.borrowed_units == 70)
    for records_are_lost in (False, True):
        assert (await agent.annotations("ada")).borrowed_units == 70
        await agent.stop()
        if records_are_lost:
            shutil.rmtree(agent.folder / "records")
        await agent.start()
        assert (await agent.session("ben")).borrowed_units == 0
        assert (await agent.session("ada")).borrowed_units == 70


async def test_whole_gpu_and_half_of_another_lend_and_change_their_units_on_both(
    agent: NodeAgent, service: ServiceCluster
) -> None:
    held = agent.on_kubernetes.allocated

    def offered() -> tuple[int, int]:
        return len(held.offered(FIRST.uuid)), len(held.offered(SECOND.uuid))

    found = await agent.running("ada", gpus=(FIRST, SECOND), share=100, last_units=50)
    assert found.share == Share(100, 2, 50)
    assert [len(agent.held("ada")[gpu.uuid]) for gpu in (FIRST, SECOND)] == [100, 50]
    assert (await agent.annotations("ada")).share == Share(100, 2, 50)
    assert offered() == (100, 100)
    await agent.annotate("ada", tier_patch(Tier.DOWNGRADED, time.time(), 60))
    await agent.until(lambda: offered() == (140, 100))
    await agent.annotate("ada", tier_patch(Tier.DOWNGRADED, time.time(), 10))
    await agent.until(lambda: offered() == (190, 140))
    peer = await agent.peer("ada")
    peer.send(Kind.REQUEST, 0, 0, 1, gpu=SECOND.uuid)
    await agent.until(lambda: offered() == (100, 100))
    await agent.running("ben", gpus=(SECOND,), share=40)
    with pytest.raises(ControlRefused, match="can have 60 units on GPU 1 now, and not 100"):
        await resize(service, "ada", 100)
    await resize(service, "ada", 40)
    assert (await agent.annotations("ada")).share == Share(40, 2)
    assert offered() == (160, 110)
    await resize(service, "ada", 90, last=60)
    for records_are_lost in (False, True):
        await agent.stop()
        if records_are_lost:
            shutil.rmtree(agent.folder / "records")
        await agent.start()
        assert (await agent.session("ada")).share == Share(90, 2, 60)
        held = agent.on_kubernetes.allocated
        await agent.until(lambda: offered() == (110, 90))


async def test_share_survives_restarts_of_the_agent_with_and_without_its_state(
    agent: NodeAgent, service: ServiceCluster
) -> None:
    await agent.running("ada")
    await resize(service, "ada", 40)
    await agent.stop()
    await agent.start()
    assert (await agent.session("ada")).share_units == 40
    await agent.offered(25 + 60)
    await agent.stop()
    records = agent.folder / "records"
    assert list(records.iterdir())
    shutil.rmtree(records)
    await agent.start()
    assert (await agent.session("ada")).share_units == 40
    await agent.offered(25 + 60)
    await resize(service, "ada", 25)
    await agent.offered(25 + 75)


async def test_changes_and_a_spawn_at_the_same_time_never_give_away_more_than_there_is(
    agent: NodeAgent, service: ServiceCluster
) -> None:
    await asyncio.gather(agent.running("ada"), agent.running("ben"))
    done = await asyncio.gather(
        resize(service, "ada", 60), resize(service, "ben", 60), agent.pod("cleo", share=40), return_exceptions=True
    )
    assert all(one is None or isinstance(one, ControlRefused) for one in done), done
    for _ in range(20):
        assert in_use(agent) <= 100
        await asyncio.sleep(0.05)
    shares = [one.share_units for one in agent.node.report().sessions if one.user in ("ada", "ben")]
    assert sorted(shares) in ([25, 25], [25, 60]), shares


async def test_downgraded_session_keeps_its_tier_until_it_works(agent: NodeAgent, service: ServiceCluster) -> None:
    await agent.running("ada", tier=Tier.DOWNGRADED, effective_units=10)
    await resize(service, "ada", 50)
    said = await agent.annotations("ada")
    assert (said.tier, said.share_units, said.effective_units) == (Tier.DOWNGRADED, 50, 10)
    await agent.offered(25 + 90)
    peer = await agent.peer("ada")
    peer.send(Kind.REQUEST, 0, 0, gpu=FIRST.uuid)
    await peer.until(Kind.GRANT)
    await agent.offered(25 + 50)


async def test_without_an_agent_the_ask_is_withdrawn(
    agent: NodeAgent, service: ServiceCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_node, "DECIDED_WITHIN", 0.5)
    await agent.running("ada")
    for _ in range(100):
        if any(node.node == agent.kubelet.name for node in service):
            break
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.6)  # until the report is published
    await agent.stop()
    with pytest.raises(AgentUnreachable, match="did not decide"):
        await resize(service, "ada", 50)
    said = pod_session(((await agent.cluster.pod("ada")) or {})["metadata"]["annotations"])
    assert (said.share_units, said.resize) == (25, None)
    await agent.start()
    assert (await agent.session("ada")).share_units == 25
