"""What the agent records of each session's rights: waits, entitled and delivered GPU time, over its restarts."""

from __future__ import annotations

import asyncio

from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.frames import Kind, Role
from gpushare_spawner.model.report import DeliveredReport, GpuTimeReport
from tests.agent.conftest import Agent
from tests.agent.peers import FIRST, SECOND, Peer
from tests.present import present


async def wait_for_a_neighbour(
    agent: Agent, seconds: float, gpus: tuple[str, ...] = (FIRST.uuid,)
) -> tuple[Peer, Peer]:
    """Let bob wait so long for a lease that ada holds, who has these GPUs. Returns both processes."""
    await agent.stop()
    await agent.start(arbiter=ArbiterSettings(exclusive=True))
    ada, bob = await agent.peer(agent.open("ada", gpus=gpus)), await agent.peer(agent.open("bob"))
    ada.send(Kind.REQUEST, 0, 0, 1, gpu=FIRST.uuid)
    lease = (await ada.until(Kind.GRANT)).fields[0]
    bob.send(Kind.REQUEST, 0, 0, 1, gpu=FIRST.uuid)
    await asyncio.sleep(seconds)
    ada.send(Kind.RELEASE, lease, 0, 0, gpu=FIRST.uuid)
    await bob.until(Kind.GRANT)
    return ada, bob


def delivered(agent: Agent, session: str) -> DeliveredReport:
    report = agent.node.report().session(session)
    assert report is not None
    return report.delivered


async def test_a_session_that_waited_for_its_neighbour_has_its_wait_in_the_report(agent: Agent) -> None:
    await wait_for_a_neighbour(agent, 0.1)
    assert delivered(agent, "ada").waits == 0
    bob = delivered(agent, "bob")
    assert bob.waits == 1
    assert 0.1 <= bob.wait_p50_seconds == bob.wait_p95_seconds < 5


async def test_a_notebook_server_is_told_what_was_delivered(agent: Agent) -> None:
    await wait_for_a_neighbour(agent, 0.1)
    socket = next(one.socket for name, one in agent.node.sessions.items() if name == "bob")
    assert socket is not None
    server = await agent.peer(str(socket.path), Role.NOTEBOOK)
    told = present((await server.status()).delivered)
    assert told.waits == 1
    assert 0.1 <= told.wait_p50_seconds == told.wait_p95_seconds < 5


async def test_the_record_survives_a_restart_of_the_agent_and_goes_on(agent: Agent) -> None:
    await wait_for_a_neighbour(agent, 0.05)
    before = delivered(agent, "bob")
    for _ in range(2):
        await agent.stop()
        await agent.start()
        assert delivered(agent, "bob") == before


async def test_a_session_that_is_opened_again_begins_with_an_empty_record(agent: Agent) -> None:
    await wait_for_a_neighbour(agent, 0.05)
    agent.open("bob")
    assert delivered(agent, "bob") == DeliveredReport()
    await agent.stop()
    await agent.start()
    assert delivered(agent, "bob") == DeliveredReport()


async def test_time_of_a_session_on_two_gpus_is_reported_for_each(agent: Agent) -> None:
    """Ada has both GPUs, and competes with bob on the first only."""
    await wait_for_a_neighbour(agent, 0.2, (FIRST.uuid, SECOND.uuid))
    before = delivered(agent, "ada")
    first, second = before.gpus
    assert (first.entitled_seconds, first.delivered_seconds) == (before.entitled_seconds, before.delivered_seconds)
    assert first.delivered_seconds >= 0.1
    assert second == GpuTimeReport()
    assert delivered(agent, "bob").gpus == (), "it has one GPU"
    server = await agent.peer(str(present(agent.node.sessions["ada"].socket).path), Role.NOTEBOOK)
    told = present((await server.status()).delivered).gpus
    assert [gpu.delivered_seconds for gpu in told] == [first.delivered_seconds, 0.0]
    await agent.stop()
    await agent.start()
    assert delivered(agent, "ada") == before
    agent.open("ada", gpus=(FIRST.uuid, SECOND.uuid))
    assert delivered(agent, "ada").gpus == (GpuTimeReport(), GpuTimeReport())
