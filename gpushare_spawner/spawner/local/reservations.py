"""Shares in flight on the agent's machine: from a place to the agent's session, and back when a start fails.

One `AgentReservations` serves all spawners of a hub process that use the same agent. What it knows is only a hint: each
pass over the queue starts with a fresh report, and the agent counts again when a session is opened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.control import AgentUnreachable, ControlRefused, OpenRequest
from gpushare_spawner.model.placement import Placement
from gpushare_spawner.model.report import Report
from gpushare_spawner.placement import Allocation
from gpushare_spawner.sharing.native import open_request
from gpushare_spawner.spawner.queue.queue import Reservation, Ticket
from gpushare_spawner.spawner.queue.reservations import Reservations
from gpushare_spawner.spawner.queue.snapshot import GpuSnapshot
from gpushare_spawner.spawner.refusal import SpawnRefused

CONFIRM_WITHIN = 900.0
"""Seconds that the agent keeps a session whose process nobody confirmed: longer than a start may take."""
LONGEST_PAUSE = 5.0
"""Seconds between two tries to close a session while the agent does not answer, at most."""


@dataclass(frozen=True)
class OpenedShare(Reservation):
    """A share that the agent has put aside, until its process is confirmed or it is released."""

    opened_with: OpenRequest
    environment: dict[str, str]
    """What the notebook server must be started with."""


class AgentReservations(Reservations[OpenedShare]):
    """The shares that this hub process has asked its machine's agent for, and the queue.

    ``agent_patience``: seconds that a start waits for an agent that does not answer. The other settings are those of
    `Reservations`.
    """

    where: ClassVar[str] = "this machine"
    unavailable: ClassVar[str] = "The GPU agent of this machine does not answer"
    unreachable: ClassVar[tuple[type[Exception], ...]] = (AgentUnreachable,)

    def __init__(
        self, client: AgentClient, log: logging.Logger, *, agent_patience: float = 20.0, **settings: Any
    ) -> None:
        super().__init__(log, patience=agent_patience, **settings)
        self.client = client
        self._in_flight: dict[str, Allocation] = {}
        self._running: dict[str, OpenRequest] = {}
        """Sessions whose process was started here, until they are released."""
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._adopting: set[str] = set()
        self._last: tuple[float, Report] | None = None

    # -- one pass over the queue --

    async def snapshot(self, max_age: float = 0.0) -> GpuSnapshot:
        """The agent's report, as a snapshot. Raises AgentUnreachable."""
        report = await self.report(max_age)
        announced = ((session.id, session.announcement) for session in report.sessions)
        return GpuSnapshot((report,), announced=tuple((name, due) for name, due in announced if due is not None))

    def in_flight(self) -> Iterable[Allocation]:
        """Shares of sessions that are not confirmed yet."""
        return self._in_flight.values()

    async def _prepare(self, snapshot: GpuSnapshot) -> GpuSnapshot:
        leftovers = {ticket.request.session for ticket in self.queue if self._is_leftover(ticket, snapshot.reports[0])}
        if not leftovers:
            return snapshot
        # the server does not run, or it could not be starting: what the agent holds for it is from before
        await asyncio.gather(*(self.close(session, timeout=1.0) for session in leftovers))
        return await self.snapshot()

    def _is_leftover(self, ticket: Ticket, report: Report) -> bool:
        return not ticket.result.done() and report.session(ticket.request.session) is not None

    def _held_up(self, ticket: Ticket) -> str:
        # opened now, it might be closed by the close that is under way
        return "The server's earlier session is being closed." if ticket.request.session in self._closing else ""

    async def _give(self, ticket: Ticket, placement: Placement, snapshot: GpuSnapshot) -> Allocation | None:
        """Ask the agent for the place; None where it sees no free capacity there."""
        request = open_request(ticket.request.tenant, ticket.request.template, placement, CONFIRM_WITHIN)
        allocation = self._in_flight[request.id] = _allocation(request)
        try:
            opened = await self.client.open(request)
        except ControlRefused as error:
            self._in_flight.pop(request.id, None)
            if error.code in ("no-room", "unknown-gpu", "unhealthy-gpu", "exists"):
                self.log.info("The agent did not open %s: %s", request.id, error.message)
                if error.code == "exists":
                    self.release(request.id)
                ticket.says(ticket.ahead or 0, error.message)
                return None
            self.log.error("The agent refused to open %s (%s): %s", request.id, error.code, error.message)
            ticket.refuse(_refused(error))
            return allocation
        except BaseException:
            # perhaps it was opened all the same: closing what is not open is no error
            self.release(request.id)
            raise
        if ticket not in self.queue or ticket.result.done():
            self.release(request.id)
            return allocation
        gpus = tuple(snapshot.gpus[gpu] for gpu in request.gpus)
        ticket.result.set_result(OpenedShare(ticket.request, placement, gpus, request, opened.environment))
        return allocation

    def give_back(self, reservation: OpenedShare) -> None:
        """Close its session in the background."""
        self.release(reservation.opened_with.id)

    async def _fresh(self) -> Report:
        report = await self.client.report()
        self._last = (time.monotonic(), report)
        return report

    async def report(self, max_age: float = 0.0) -> Report:
        """What the agent says now, or said at most ``max_age`` seconds ago. Raises AgentUnreachable."""
        if self._last is not None and time.monotonic() - self._last[0] < max_age:
            return self._last[1]
        return await self._fresh()

    # -- the process runs --

    async def confirm(self, request: OpenRequest, pid: int) -> None:
        """Tell the agent the pid of the session's process. An unavailable agent is told when it is back.

        Raises ControlRefused where the agent does not accept it.
        """
        self._running[request.id] = request
        try:
            await self._confirm(request, pid)
        except AgentUnreachable as error:
            self.log.warning("GPU session %s is not confirmed yet: %s", request.id, error)
            self.in_background(self._confirm_later(request, pid))

    async def confirm_started(self, request: OpenRequest, pid: int) -> None:
        """As `confirm`. Raises SpawnRefused, also for a ``pid`` below 1: then the server has ended already."""
        if pid < 1:
            raise SpawnRefused("The server ended while it started; its log says why.", reason="exited", status=500)
        try:
            await self.confirm(request, pid)
        except ControlRefused as error:
            raise SpawnRefused(
                f"The GPU agent does not accept the server's process: {error.message}",
                reason="agent-refused",
                status=502,
            ) from None

    async def _confirm(self, request: OpenRequest, pid: int) -> None:
        try:
            await self.client.confirm(request.id, pid)
        except ControlRefused as error:
            if error.code != "unknown-session" or self._running.get(request.id) is not request:
                raise
            # the agent lost it, in a restart without its state: the place was ours, ask for it again
            await self.client.open(request)
            self.log.warning("The agent had lost GPU session %s; it was opened again", request.id)
            await self.client.confirm(request.id, pid)
        finally:
            if request.id not in self._running and request.id not in self._in_flight:
                # it was stopped meanwhile, and not started again: what was opened above must not stay
                self.release(request.id)
        self._in_flight.pop(request.id, None)

    async def _confirm_later(self, request: OpenRequest, pid: int) -> None:
        delay = 1.0
        while self._running.get(request.id) is request:
            await asyncio.sleep(delay)
            delay = min(delay * 2, 30.0)
            if self._running.get(request.id) is not request:
                return
            try:
                await self._confirm(request, pid)
            except AgentUnreachable:
                continue
            except ControlRefused as error:
                self.log.warning("GPU session %s is not confirmed: %s. Its notebook runs on.", request.id, error)
            return

    # -- the end of a session --

    def release(self, session: str) -> None:
        """Close a session in the background; a new start of the same server waits until that is done."""
        self._running.pop(session, None)
        if session not in self._closing:
            self._closing[session] = self.in_background(self._close(session))

    async def close(self, session: str, timeout: float = 5.0) -> None:
        """Close a session, and wait for it at most ``timeout`` seconds; the rest happens in the background."""
        self.release(session)
        await asyncio.wait({self._closing[session]}, timeout=timeout)

    async def _close(self, session: str) -> None:
        """Try until the agent has heard it, or until it must have found out by itself."""
        until, pause = time.monotonic() + CONFIRM_WITHIN, 0.25
        try:
            while time.monotonic() < until:
                try:
                    await self.client.close(session)
                    return
                except (AgentUnreachable, ControlRefused) as error:
                    self.log.warning("GPU session %s is not closed yet: %s", session, error)
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, LONGEST_PAUSE)
        finally:
            self._in_flight.pop(session, None)
            self._closing.pop(session, None)
            self._wake.set()

    # -- after a restart --

    def adopt_soon(self, request: OpenRequest, pid: Callable[[], Awaitable[int]], runs: Callable[[], bool]) -> None:
        """See to it, in the background, that a running server has its session.

        ``runs`` says whether the server still runs under this session; ``pid`` tells its process.
        """
        if request.id not in self._adopting and request.id not in self._closing:
            self._adopting.add(request.id)
            self.in_background(self._adopt(request, pid, runs))

    async def _adopt(self, request: OpenRequest, pid: Callable[[], Awaitable[int]], runs: Callable[[], bool]) -> None:
        try:
            session = (await self.report(max_age=2.0)).session(request.id) or (await self.report()).session(request.id)
            if session is not None and session.confirmed:
                return
            number = await pid()
            if number < 1 or not runs():
                return
            if session is None:
                await self.client.open(request)
                self.log.warning("The agent had lost GPU session %s; it was opened again", request.id)
            if runs():
                await self.client.confirm(request.id, number)
            else:
                self.release(request.id)
        except AgentUnreachable as error:
            self.log.warning("GPU session %s cannot be checked: %s", request.id, error)
        except ControlRefused as error:
            self.log.warning("Server %s runs without a GPU share: %s", request.id, error.message)
        except Exception:
            self.log.exception("GPU session %s could not be checked", request.id)
        finally:
            self._adopting.discard(request.id)

    def sweep_soon(self, runs: Callable[[str, str], bool]) -> None:
        """`sweep` in the background, as soon as the agent answers."""
        self.in_background(self._sweep(runs))

    async def _sweep(self, runs: Callable[[str, str], bool]) -> None:
        # what an earlier hub left unconfirmed is dropped by the agent itself after CONFIRM_WITHIN
        until = time.monotonic() + CONFIRM_WITHIN
        delay = 1.0
        while time.monotonic() < until:
            try:
                await self.sweep(runs)
                return
            except AgentUnreachable:
                await asyncio.sleep(delay)
                delay = min(delay * 2, 60.0)
            except Exception:
                self.log.exception("Sessions of an earlier hub could not be looked for")
                return

    async def sweep(self, runs: Callable[[str, str], bool]) -> list[str]:
        """Close what an earlier hub process reserved and never confirmed; the ids of the sessions.

        ``runs`` says whether the hub knows a user's server to run or to start. A confirmed session is left alone: its
        process lives, perhaps under another hub, and the agent ends it with the process.
        """
        report = await self.report()
        swept = []
        for session in report.sessions:
            ours = session.id in self._in_flight or session.opened_at >= self.started_at
            if ours or runs(session.user, session.server):
                continue
            if session.confirmed:
                self.log.warning("GPU session %s (pid %s) belongs to no server of this hub", session.id, session.pid)
            else:
                self.log.info("Closing GPU session %s, which an earlier hub reserved and did not use", session.id)
                self.release(session.id)
                swept.append(session.id)
        return swept


def _allocation(request: OpenRequest) -> Allocation:
    return Allocation(
        session=request.id,
        gpus=request.gpus,
        share_units=request.share_units,
        borrowed_units=request.borrowed_units,
        effective_units=request.share_units,
        opened_at=time.time(),
    )


def _refused(error: ControlRefused) -> SpawnRefused:
    return SpawnRefused(
        f"The GPU agent refused the session: {error.message}. Tell the admin.", reason="agent-refused", status=502
    )
