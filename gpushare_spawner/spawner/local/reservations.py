"""Reservations on one machine: each is a session that its agent has opened.

The session's life after that is in `sessions`. One `AgentReservations` serves all spawners of a hub process that use
the same agent. What it knows is only a hint: each pass over the queue starts with a fresh report, and the agent counts
again when a session is opened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.layers import LayersFile
from gpushare_spawner.model.placement import Placement
from gpushare_spawner.model.protocol.control import AgentUnreachable, ControlRefused, OpenRequest
from gpushare_spawner.model.report import Report
from gpushare_spawner.placement import Allocation, Requested
from gpushare_spawner.sharing.native_process import open_request
from gpushare_spawner.spawner.local.machine import Machine
from gpushare_spawner.spawner.local.recovery import SessionRecovery
from gpushare_spawner.spawner.local.sessions import CONFIRM_WITHIN, AgentSessions
from gpushare_spawner.spawner.queue.inventory import GpuInventory
from gpushare_spawner.spawner.queue.queue import Reservation, Ticket
from gpushare_spawner.spawner.queue.reservations import Reservations
from gpushare_spawner.spawner.queue.snapshot import NO_RULES, GpuSnapshot, guaranteed_resources
from gpushare_spawner.spawner.spawn_refused import SpawnRefused
from gpushare_spawner.wording.spawn import failures as words
from gpushare_spawner.wording.spawn import refusals


@dataclass(frozen=True)
class OpenedShare(Reservation):
    """A share that the agent has put aside, until its process is confirmed or it is released."""

    opened_with: OpenRequest
    environment: dict[str, str]
    """What the notebook server must be started with."""


class AgentReservations(Reservations[OpenedShare]):
    """The shares that this hub process has asked its machine's agent for, and the queue.

    ``agent_patience``: seconds that a start waits for an agent that does not answer. ``machine``: whose CPU and memory
    count; None: neither counts. ``layers`` returns what `layers.yaml` says. The other settings are those of
    `Reservations`.
    """

    where: ClassVar[str] = "this machine"
    unavailable: ClassVar[str] = refusals.AGENT_SILENT
    unreachable: ClassVar[tuple[type[Exception], ...]] = (AgentUnreachable,)

    def __init__(
        self,
        client: AgentClient,
        log: logging.Logger,
        *,
        agent_patience: float = 20.0,
        machine: Machine | None = None,
        layers: Callable[[], LayersFile | None] = lambda: None,
        **settings: Any,
    ) -> None:
        super().__init__(log, patience=agent_patience, **settings)
        self._layers = layers
        self.client = client
        self._machine = machine
        self.sessions = AgentSessions(client, log, self.in_background, self._wake.set)
        self.recovery = SessionRecovery(client, self.sessions, self.report, log, self.in_background)
        self._last: tuple[float, Report] | None = None

    # -- one pass over the queue --

    async def snapshot(self, max_age: float = 0.0) -> GpuSnapshot:
        """What the agent's report says. Raises AgentUnreachable."""
        return self._snapshot(await self.report(max_age))

    def _snapshot(self, report: Report) -> GpuSnapshot:
        self.feed.follow((report,), reserved=self.in_flight())
        if self._machine is not None:
            self.feed.resources(report.node, self._machine.left(report, self._expected.offered()))
        inventory = GpuInventory()
        inventory.put(report.node, report.gpus)
        announced = ((session.id, session.notice) for session in report.sessions)
        due = tuple((name, notice) for name, notice in announced if notice is not None)
        return GpuSnapshot(inventory, announced=due, rules=self._layers() or NO_RULES)

    def in_flight(self) -> Iterable[Allocation]:
        """Shares of sessions that are not confirmed yet."""
        return self.sessions.in_flight.values()

    async def _prepare(self, snapshot: GpuSnapshot) -> GpuSnapshot:
        leftovers = {ticket.request.session for ticket in self.queue if self._is_leftover(ticket)}
        if not leftovers:
            return snapshot
        # the server does not run, or it could not be starting: what the agent holds for it is from before
        await asyncio.gather(*(self.sessions.close(session, timeout=1.0) for session in leftovers))
        return await self.snapshot()

    def _is_leftover(self, ticket: Ticket) -> bool:
        if self._last is None or ticket.result.done():
            return False
        return self._last[1].session(ticket.request.session) is not None

    def _held_up(self, ticket: Ticket) -> str:
        # opened now, it might be closed by the close that is under way
        closing = self.sessions.is_closing(ticket.request.session)
        return words.SESSION_CLOSES if closing else ""

    async def _give(self, ticket: Ticket, placement: Placement, snapshot: GpuSnapshot) -> Allocation | None:
        """Ask the agent for the place; None where it sees no free capacity there."""
        request = open_request(ticket.request.tenant, ticket.request.template, placement, CONFIRM_WITHIN)
        gpus = tuple(snapshot.gpus[gpu] for gpu in request.gpus)
        try:
            # until the agent reports the session
            uncounted = Requested() if self._machine is None else guaranteed_resources(ticket.request.template)
            allocation, environment = await self.sessions.open(request, uncounted)
        except ControlRefused as error:
            if error.code in ("no-capacity", "unknown-gpu", "unhealthy-gpu", "exists"):
                self.log.info("The agent did not open %s: %s", request.id, error.message)
                if error.code == "exists":
                    self.sessions.release(request.id)
                ticket.says(ticket.ahead or 0, error.message)
            else:
                self.log.error("The agent refused to open %s (%s): %s", request.id, error.code, error.message)
                ticket.refuse(_refused(error))
            return None
        if ticket not in self.queue or ticket.result.done():
            self.sessions.release(request.id)
            return allocation
        ticket.result.set_result(OpenedShare(ticket.request, placement, gpus, request, environment))
        return allocation

    def give_back(self, reservation: OpenedShare) -> None:
        """Close its session in the background."""
        self.sessions.release(reservation.opened_with.id)

    async def report(self, max_age: float = 0.0) -> Report:
        """What the agent says now, or said at most ``max_age`` seconds ago. Raises AgentUnreachable."""
        if self._last is not None and time.monotonic() - self._last[0] < max_age:
            return self._last[1]
        report = await self.client.report()
        self._last = (time.monotonic(), report)
        return report


def _refused(error: ControlRefused) -> SpawnRefused:
    return SpawnRefused(words.agent_refused_session(error.message), reason="agent-refused", status=502)
