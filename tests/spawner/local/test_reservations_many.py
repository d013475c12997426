"""Many starts at once: never more than there is, and nothing left behind."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any, ClassVar

import pytest
from jupyterhub.spawner import Spawner

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.local.mixin import GPUShareMixin
from gpushare_spawner.spawner.local.reservations import AgentReservations
from tests.spawner.fake_agent import FakeAgent
from tests.spawner.queue.test_reservations import spawn_request
from tests.spawner.running_hub import RunningHub, until


class NoProcess(Spawner):  # type: ignore[misc]
    """Servers that are nothing but an address: a spawner of quite another kind, without 50 processes."""

    address: ClassVar[tuple[str, int]]
    runs = False

    async def start(self) -> tuple[str, int]:
        self.runs = True
        return self.address

    async def stop(self, now: bool = False) -> None:
        self.runs = False

    async def poll(self) -> int | None:
        return None if self.runs else 0


class SharedNoProcess(GPUShareMixin, NoProcess):
    """The same, sharing GPUs."""

    def share_uid(self) -> int:
        return 0

    async def share_pid(self) -> int:
        return 4242


async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


@pytest.mark.slow
async def test_fifty_spawns_at_once_get_no_more_than_two_gpus_have(make_hub: Any, agent: FakeAgent) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    NoProcess.address = server.sockets[0].getsockname()

    def configure(config: Any) -> None:
        config.JupyterHub.spawner_class = SharedNoProcess
        config.JupyterHub.tornado_settings = {"slow_spawn_timeout": 0}

    hub: RunningHub = await make_hub(configure)
    most = 0

    def watch(_: Any) -> None:
        nonlocal most
        most = max(most, *agent.owned().values())

    agent.after = watch
    names = [f"user-{number:02}" for number in range(50)]
    for name in names:
        await hub.add_user(name)
    starts = await asyncio.gather(*(hub.start_server(name, {"profile": "quarter-gpu"}) for name in names))
    assert {response.code for response in starts} <= {201, 202}
    # looking a user up by name is a query each time
    waiting = {name: hub.user(name) for name in names}

    def ready() -> list[str]:
        return [name for name, user in waiting.items() if user.spawners[""].ready]

    while waiting:
        await until(ready, timeout=20)
        assert len(agent.sessions) <= 8
        done = ready()
        for name in done:
            del waiting[name]
        await asyncio.gather(*(hub.stop_server(name) for name in done))
    assert most == 100
    await until(lambda: not agent.sessions and not hub.reservations.closing)
    assert not len(hub.reservations.queue)
    assert not hub.reservations.in_flight
    server.close()


async def test_starts_and_stops_in_any_order_leave_nothing_reserved(agent: FakeAgent) -> None:
    """Starts, cancels, stops and refusals of 40 users in random order and with an agent that fails now and then."""
    chance = random.Random(7)

    async def unreliable(request: Any) -> None:
        await asyncio.sleep(chance.random() * 0.003)
        if chance.random() < 0.05:
            raise ConnectionError("the test drops the connection")

    agent.before = agent.after = unreliable
    reservations = AgentReservations(AgentClient(agent.socket, 1.0), logging.getLogger("test"))
    reservations.place_every = 0.02

    async def one(name: str) -> None:
        for _ in range(3):
            await asyncio.sleep(chance.random() * 0.05)
            start = asyncio.ensure_future(
                reservations.reserve(spawn_request(name, chance.choice((0.1, 0.25, 0.5, 1.0))), 3.0)
            )
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 0.05)
                start.cancel()
            try:
                got = await start
            except (asyncio.CancelledError, SpawnRefused):
                continue
            await reservations.confirm(got.opened_with, 4242)
            await asyncio.sleep(chance.random() * 0.02)
            reservations.release(name)

    await asyncio.gather(*(one(f"user-{number}") for number in range(40)))
    agent.before = agent.after = None
    await until(lambda: not agent.sessions and not reservations.closing, timeout=10)
    assert not len(reservations.queue)
    assert not reservations.in_flight
    assert not agent.violations
