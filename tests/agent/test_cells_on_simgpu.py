"""The GPU time of cells with a real agent, the preload library and kernels of the simulated GPU."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpushare_spawner.model.frames import CellEvent, Kind, QueryTopic, Role
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share_status import CellsStatus
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import request_for
from tests.agent.peers import Peer
from tests.present import present

ROOT = Path(__file__).parents[2]


class Kernel:
    """A process of `cell_program`, whose cells are reported like those of a notebook."""

    def __init__(self, server: Peer, process: asyncio.subprocess.Process) -> None:
        self.server = server
        self.process = process
        self.cells = 0

    async def answer(self) -> None:
        async with asyncio.timeout(120):
            assert await present(self.process.stdout).readline()

    async def run(self, bursts: int, milliseconds: int, pause: int = 10, reported: bool = True) -> None:
        self.cells += reported
        for event in (CellEvent.SUBMITTED, CellEvent.STARTED) if reported else ():
            self.server.send(Kind.CELL, event, self.cells, 1, 7, self.process.pid, self.cells)
        present(self.process.stdin).write(f"{bursts} {milliseconds} {pause}\n".encode())
        await self.answer()
        if reported:
            self.server.send(Kind.CELL, CellEvent.ENDED, self.cells, 1, 7, self.process.pid, self.cells)

    async def status(self) -> CellsStatus:
        self.server.send(Kind.QUERY, QueryTopic.CELLS)
        while (cells := (await self.server.record()).cells) is None:
            pass
        return cells


@pytest.fixture
async def agent(short_folder: Path) -> AsyncIterator[AgentProcess]:
    agent = AgentProcess(short_folder, gpus=1)
    await agent.start()
    yield agent
    if agent.process is not None and agent.process.poll() is None:
        agent.end(signal.SIGKILL)


@pytest.fixture
async def kernels(agent: AgentProcess) -> AsyncIterator[list[Kernel]]:
    """A kernel in each of two sessions."""
    found: list[Kernel] = []
    gpu = (await agent.client.report()).gpus[0].uuid
    for name in ("ada", "bob"):
        opened = await agent.client.open(request_for(name, gpus=(gpu,), share_units=50))
        await agent.client.confirm(name, os.getpid())
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.agent.cell_program", cwd=ROOT,
            env=agent.environment | opened.environment,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        server = Peer(opened.environment["GPUSHARE_SOCKET"])
        await server.connect(Role.NOTEBOOK)
        found.append(Kernel(server, process))
        await found[-1].answer()
    yield found
    for kernel in found:
        kernel.server.close()
        kernel.process.kill()
        await kernel.process.wait()


async def session(agent: AgentProcess, name: str) -> SessionReport:
    return present((await agent.client.report()).session(name))


def listed(status: CellsStatus) -> float:
    return sum(row.gpu_seconds for row in status.cells)


async def test_cells_of_a_session_that_is_alone_have_the_time_of_their_kernels(
    agent: AgentProcess, kernels: list[Kernel]
) -> None:
    ada = kernels[0]
    await ada.run(5, 10, reported=False)  # the library measures a process's first bursts as too short
    await asyncio.sleep(0.5)
    before, outside = (await session(agent, "ada")).gpu_seconds, (await ada.status()).outside_seconds
    work = [(20, 10), (5, 100), (1, 2500), (100, 2), (1, 1)]
    for bursts, milliseconds in work:
        await ada.run(bursts, milliseconds)
    await ada.run(10, 50, reported=False)
    await asyncio.sleep(2.5)
    status, after = await ada.status(), (await session(agent, "ada")).gpu_seconds
    real = [bursts * milliseconds / 1000 for bursts, milliseconds in work]
    for row, seconds, (bursts, _) in zip(status.cells, real, work, strict=True):
        assert row.gpu_seconds == pytest.approx(seconds, rel=0.1, abs=0.03 + 0.003 * bursts)
        assert (row.divided_seconds, row.running) == (0.0, False)
    assert listed(status) + status.outside_seconds == pytest.approx(status.gpu_seconds, rel=1e-6)
    assert status.gpu_seconds - outside == pytest.approx(after - before, rel=0.01)
    assert status.outside_seconds - outside == pytest.approx(0.5, rel=0.2)


async def test_cells_of_a_session_add_up_to_the_time_that_was_delivered_beside_a_neighbour_that_always_works(
    agent: AgentProcess, kernels: list[Kernel]
) -> None:
    ada, bob = kernels
    neighbour = asyncio.create_task(bob.run(400, 50, pause=0))
    await asyncio.sleep(1)
    for bursts, milliseconds in ((40, 40), (1, 1500), (15, 100), (40, 20)):
        await ada.run(bursts, milliseconds)
    await asyncio.sleep(3)
    assert not neighbour.done()
    status, report = await ada.status(), await session(agent, "ada")
    assert listed(status) == pytest.approx(1.6 + 1.5 + 1.5 + 0.8, rel=0.1)
    # what was delivered counts while both work; on a busy machine the neighbour begins its next burst late
    assert 0.99 * report.delivered.delivered_seconds <= listed(status) <= 1.01 * report.gpu_seconds
    neighbour.cancel()
