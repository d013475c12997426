"""The queue of a hub on one machine, on a fake agent."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Self

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.spawner.local.reservations import AgentReservations
from gpushare_spawner.spawner.queue.queue import Reservation, Ticket
from gpushare_spawner.spawner.queue.snapshot import SpawnRequest
from tests.spawner.fake_agent import FakeAgent
from tests.spawner.running_hub import until


class RunningQueue:
    """Reservations on a fake agent, and the starts that a test began."""

    def __init__(self, agent: FakeAgent, **settings: Any) -> None:
        self.agent = agent
        self.reservations = AgentReservations(AgentClient(agent.socket, 1.0), logging.getLogger("test"), **settings)
        self.reservations.place_every = 0.05
        self.tickets: dict[str, Ticket] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        """The event loop keeps only weak references to tasks."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self.reservations._tasks):
            task.cancel()

    def start(self, wanted: SpawnRequest, patience: float = 10.0) -> asyncio.Task[Reservation]:
        task = asyncio.ensure_future(
            self.reservations.reserve(wanted, patience, lambda ticket: self.tickets.update({wanted.session: ticket}))
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def waits(self, name: str, ahead: int) -> None:
        await until(lambda: name in self.tickets and self.tickets[name].ahead == ahead)

    def nothing_left(self) -> bool:
        return not len(self.reservations.queue) and not self.reservations.closing
