"""Cells that are submitted bring the pages of their kernel's processes in: agent, library and simulated GPU."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.model.frames import CellEvent, Feature, Kind, Role
from gpushare_spawner.sharing.native import merged
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import Agent, request_for
from tests.agent.peers import FIRST, GIB, Peer
from tests.native.preload_clients import Client

SUBMITTED, STARTED, ENDED = CellEvent
KERNEL = """
d = Driver()
at, size = d.alloc(160 * MIB), 160 * MIB
say("ready")
for _ in iter(hear, None):
    began = time.monotonic()
    d.fill(at, size // 4, 7)
    d.synchronize()
    say(time.monotonic() - began)
"""


@pytest.fixture
async def real(short_folder: Path) -> AsyncIterator[AgentProcess]:
    """An agent with a GPU of 256 MiB on a slow bus."""
    agent = AgentProcess(short_folder, gpus=1)
    agent.environment |= {"SIMGPU_MEMORY": "256MiB", "SIMGPU_H2D": "60MiB"}
    await agent.start()
    yield agent
    if agent.process is not None and agent.process.poll() is None:
        agent.end(signal.SIGKILL)


@pytest.fixture
def kernels() -> Iterator[list[Client]]:
    started: list[Client] = []
    yield started
    for kernel in started:
        kernel.process.kill()
        kernel.process.communicate()


def run(kernel: Client) -> Any:
    """Run GPU work; return the seconds that it took."""
    kernel.say("run")
    return kernel.hear()


async def test_first_kernel_of_a_submitted_cell_starts_sooner_because_its_pages_are_in(
    real: AgentProcess, kernels: list[Client]
) -> None:
    gpu = (await real.client.report()).gpus[0].uuid
    sockets = []
    for name in ("ada", "bob"):
        opened = await real.client.open(request_for(name, gpus=(gpu,), share_units=50))
        environment = merged(os.environ, opened.environment) | {
            key: value
            for key, value in real.environment.items()
            if key.startswith("SIMGPU") or key == "LD_LIBRARY_PATH"
        }
        kernels.append(Client(KERNEL, environment))
        sockets.append(opened.environment["GPUSHARE_SOCKET"])
        assert kernels[-1].hear() == "ready"
    ada, bob = kernels
    server = Peer(sockets[0])
    await server.connect(Role.NOTEBOOK)
    pid = ada.process.pid

    async def displaced() -> None:
        """Let Bob's work take Ada's memory, and return his lease."""
        run(bob)
        await asyncio.sleep(1.5)

    for event in (SUBMITTED, STARTED):
        server.send(Kind.CELL, event, 1, 1, 7, pid)
    await server.status()
    run(ada)
    server.send(Kind.CELL, ENDED, 1, 1, 7, pid)
    await asyncio.sleep(1.5)
    await displaced()
    unexpected = run(ada)
    await asyncio.sleep(1.5)
    await displaced()
    for event in (SUBMITTED, STARTED):
        server.send(Kind.CELL, event, 2, 1, 7, pid)
    await asyncio.sleep(1.5)  # the cell's Python, longer than the page-in of 64 MiB
    expected = run(ada)
    server.send(Kind.CELL, ENDED, 2, 1, 7, pid)
    assert unexpected > 1.0
    assert expected < unexpected / 2
    (session,) = [session for session in (await real.client.report()).sessions if session.id == "ada"]
    assert (session.early_page_ins_used, session.early_page_ins_unused) == (1, 0)
    server.close()


async def _ada_paged_out(agent: Agent, features: Feature) -> tuple[Peer, Peer, Peer]:
    """Return Ada's notebook server and process, whose cell used the GPU and whose pages are out, and Bob's process."""
    path = agent.open()
    server = await agent.peer(path, Role.NOTEBOOK)
    ada, bob = Peer(path), await agent.peer(agent.open(id="bob"))
    await ada.connect(Role.CUDA, features)
    for event in (SUBMITTED, STARTED):
        server.send(Kind.CELL, event, 1, 1, 7, os.getpid())
    await server.status()
    for peer in (ada, bob):
        peer.send(Kind.MEMORY, 10 * GIB, gpu=FIRST.uuid)
        peer.send(Kind.REQUEST, 10 * GIB, 0, 1, gpu=FIRST.uuid)
        grant = await peer.expect(Kind.GRANT)
        peer.send(Kind.RELEASE, grant.fields[0], 1000, gpu=FIRST.uuid)
        if peer is ada:
            server.send(Kind.CELL, ENDED, 1, 1, 7, os.getpid())
            await server.status()
    out = await ada.expect(Kind.PAGE_OUT)
    ada.send(Kind.PAGED_OUT, out.fields[0], 1000, gpu=FIRST.uuid)
    return server, ada, bob


async def test_submitted_cell_orders_a_page_in_and_its_end_without_work_counts_as_a_wrong_guess(agent: Agent) -> None:
    server, ada, bob = await _ada_paged_out(agent, Feature.PAGE_IN)
    server.send(Kind.CELL, SUBMITTED, 2, 1, 7, os.getpid())
    out, into = await bob.expect(Kind.PAGE_OUT), await ada.expect(Kind.PAGE_IN)
    assert out.fields[0] == into.fields[0] == 4 * GIB
    ada.send(Kind.PAGED_IN, into.fields[0], 1000, gpu=FIRST.uuid)
    server.send(Kind.CELL, STARTED, 2, 1, 7, os.getpid())
    server.send(Kind.CELL, ENDED, 2, 1, 7, os.getpid())
    await server.status()
    report = agent.node.session_report(agent.node.registry.sessions["ada"])
    assert (report.early_page_ins_used, report.early_page_ins_unused) == (0, 1)


async def test_library_without_the_feature_gets_no_page_in(agent: Agent) -> None:
    server, _, bob = await _ada_paged_out(agent, Feature.PACE)
    server.send(Kind.CELL, SUBMITTED, 2, 1, 7, os.getpid())
    await server.status()
    bob.send(Kind.REQUEST, 10 * GIB, 0, 2, gpu=FIRST.uuid)
    assert (await bob.expect(Kind.GRANT)).fields[2] == 0, "its pages have not left"
