"""A session's bursts in the agent's report, through conversations and arbiter in virtual time."""

from __future__ import annotations

from asyncio import sleep
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.sessions.session import BURSTS_REPORTED_FOR
from gpushare_spawner.model.frames import Kind
from gpushare_spawner.model.kubernetes.objects import written_report
from gpushare_spawner.model.report import MOST_BURSTS, Burst, Report
from tests.agent.virtual_node import GIB, Process, VirtualNode, virtual_node

GPU = Gpu(0, "GPU-12345678-1234-1234-1234-123456789abc", "Simulated GPU 16 GiB", 16 * GIB, simulated=True)


Scenario = Callable[[VirtualNode], Coroutine[None, None, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scenario], None]:
    """Play a scenario with the session `ann`, which has half of the GPU."""

    def play(scenario: Scenario) -> None:
        with virtual_node(tmp_path, GPU, samples=False) as agent:

            async def played() -> None:
                agent.node.wall_clock = agent.loop.time  # type: ignore[assignment]
                agent.session("ann", 50)
                await scenario(agent)

            agent.loop.run_until_complete(played())

    return play


async def work(process: Process, seconds: float) -> None:
    """Work under a lease that the process keeps for a moment, and return it."""
    process.say(Kind.REQUEST, GIB, 0, 1)
    await sleep(seconds)
    busy = int(seconds * 1e9)
    process.say(Kind.IDLE, process.lease, busy, 0)
    await sleep(0.5)
    process.say(Kind.RELEASE, process.lease, busy, 0)


def bursts(agent: VirtualNode) -> tuple[Burst, ...]:
    (session,) = (session for session in agent.node.report().sessions if session.id == "ann")
    return session.bursts


def test_report_has_each_burst_once_it_is_over_and_for_a_while(play: Callable[[Scenario], None]) -> None:
    async def scenario(agent: VirtualNode) -> None:
        process = agent.process("ann")
        await sleep(10.0)
        await work(process, 3.0)
        assert bursts(agent) == (), "it may go on"
        await sleep(1.0)
        (burst,) = bursts(agent)
        assert burst.seconds == pytest.approx(3.0, abs=0.01)
        assert burst.gpu_seconds == pytest.approx(3.0, abs=0.01)
        assert burst.ended_at == pytest.approx(agent.loop.time() - 1.5, abs=0.01)
        assert (burst.contended_seconds, burst.memory_bytes) == (0.0, GIB)
        report = agent.node.report()
        assert Report.model_validate_json(written_report(report)).sessions[0].bursts == (burst,), "also in a cluster"
        # an unchanged burst must not make a cluster's agent publish again
        await sleep(7.3)
        assert bursts(agent) == (burst,)
        await sleep(BURSTS_REPORTED_FOR)
        assert bursts(agent) == ()

    play(scenario)


def test_only_the_last_bursts_are_reported(play: Callable[[Scenario], None]) -> None:
    async def scenario(agent: VirtualNode) -> None:
        process = agent.process("ann")
        for _ in range(MOST_BURSTS + 4):
            await work(process, 0.2)
            await sleep(1.5)
        ends = [burst.ended_at for burst in bursts(agent)]
        assert len(ends) == MOST_BURSTS
        assert ends == sorted(set(ends))

    play(scenario)


def test_work_beside_a_neighbour_has_half_the_gpus_time(play: Callable[[Scenario], None]) -> None:
    async def scenario(agent: VirtualNode) -> None:
        agent.session("bob", 25)
        other, process = agent.process("bob"), agent.process("ann")
        other.say(Kind.REQUEST, GIB, 0, 1)
        await work(process, 0.1)
        await sleep(2.0)
        (burst,) = bursts(agent)
        assert burst.contended_seconds == pytest.approx(burst.seconds, abs=0.01)
        assert burst.gpu_seconds == pytest.approx(burst.seconds / 2, abs=0.02)

    play(scenario)


def test_crash_while_it_waits_ends_a_burst(play: Callable[[Scenario], None]) -> None:
    async def scenario(agent: VirtualNode) -> None:
        agent.session("bob", 25)
        other, process = agent.process("bob"), agent.process("ann")
        other.say(Kind.REQUEST, 12 * GIB, 0, 1)
        process.say(Kind.REQUEST, 12 * GIB, 0, 1)
        await sleep(0.05)
        assert not process.lease
        process.listener.ended(process)
        await sleep(5.0)
        (burst,) = bursts(agent)
        assert burst.seconds == pytest.approx(0.05, abs=0.01)
        assert burst.gpu_seconds == 0.0

    play(scenario)


def test_session_whose_memory_is_not_movable_reports_no_bursts(play: Callable[[Scenario], None]) -> None:
    async def scenario(agent: VirtualNode) -> None:
        agent.session("eve", 25, oversubscribe=False)
        await work(agent.process("eve"), 1.0)
        await sleep(5.0)
        assert [session.bursts for session in agent.node.report().sessions] == [(), ()]

    play(scenario)
