"""After a restart all sessions are under arbitration again within a second, whatever was before."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpushare_spawner.model.frames import Kind
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import Agent, request_for
from tests.agent.peers import FIRST, GIB, Peer

SESSIONS = 50
TRY_EVERY = 0.1
"""Seconds between a process's tries to connect."""


class Returning:
    """A CUDA process that connects again whenever it has lost the agent, and asks for a lease then."""

    def __init__(self, path: str, gpu: str) -> None:
        self.path, self.gpu = path, gpu
        self.connected_at: float | None = None
        """When it could connect, and ..."""
        self.greeted_at: float | None = None
        """... when it was greeted."""

    async def run(self) -> None:
        while True:
            peer = Peer(self.path)
            try:
                begun = time.monotonic()
                await peer.connect()
                self.connected_at, self.greeted_at = begun, time.monotonic()
                peer.send(Kind.REQUEST, GIB, 0, 1, gpu=self.gpu)
                while await peer.receive(timeout=100) is not None:
                    pass
            except (OSError, AssertionError):
                await asyncio.sleep(TRY_EVERY)
            finally:
                peer.close()

    def lost(self) -> None:
        self.connected_at = self.greeted_at = None


@pytest.fixture
async def process(short_folder: Path) -> AsyncIterator[AgentProcess]:
    agent = AgentProcess(short_folder)
    await agent.start()
    yield agent
    if agent.process is not None and agent.process.poll() is None:
        agent.end(signal.SIGKILL)


async def all_greeted(clients: list[Returning], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while any(client.greeted_at is None for client in clients):
            await asyncio.sleep(0.01)


async def test_fifty_sessions_are_back_within_a_second_of_the_agent(process: AgentProcess) -> None:
    """Killed and started again, three times; the second begins when the first of them could connect."""
    gpu = (await process.client.report()).gpus[0].uuid
    clients = []
    for number in range(SESSIONS):
        request = request_for(f"user-{number}", gpus=(gpu,), share_units=2, confirm_within=600)
        opened = await process.client.open(request)
        clients.append(Returning(opened.environment["GPUSHARE_SOCKET"], gpu))
    tasks = [asyncio.create_task(client.run()) for client in clients]
    try:
        await all_greeted(clients, 10)
        longest = []
        for _ in range(3):
            process.end(signal.SIGKILL)
            for client in clients:
                client.lost()
            await asyncio.sleep(2 * TRY_EVERY)
            await process.start()
            await all_greeted(clients, 20)
            back = min(client.connected_at or 0.0 for client in clients)
            longest.append(max((client.greeted_at or 0.0) - back for client in clients))
        print("last of fifty greeted after", [f"{one:.3f}" for one in longest])
        # once of three the machine may have been busy with something else
        assert sorted(longest)[1] < 1.0
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_processes_of_one_session_may_all_come_back_at_once(agent: Agent) -> None:
    """As many as it may have; the rate of connections is for what comes after."""
    path = agent.open("ada")
    peers = [Peer(path) for _ in range(100)]
    agent.peers.extend(peers)
    begun = time.monotonic()
    await asyncio.gather(*(peer.connect() for peer in peers))
    assert time.monotonic() - begun < 1.0


async def test_gpu_that_hangs_does_not_delay_the_greeting(agent: Agent) -> None:
    """Sockets listen before NVML is asked for the first time."""
    path = agent.open("ada")
    await agent.stop()
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    state = agent.source.state

    def slow(gpu: object) -> object:
        loop.call_soon_threadsafe(asked.set)
        time.sleep(0.5)
        return state(gpu)  # type: ignore[arg-type]

    agent.source.state = slow  # type: ignore[assignment,method-assign]
    starting = asyncio.create_task(agent.start())
    await asked.wait()
    peer = Peer(path)
    agent.peers.append(peer)
    begun = time.monotonic()
    await peer.connect()
    assert time.monotonic() - begun < 0.3
    peer.send(Kind.REQUEST, GIB, 0, 1, gpu=FIRST.uuid)
    await peer.until(Kind.GRANT)
    assert not starting.done()
    await starting
