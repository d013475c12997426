"""Reservations on one machine; each is a session that the machine's agent has opened.

One `AgentReservations` serves all spawners of a hub process that use the same agent. Its data are only a hint: each
pass over the queue starts with a fresh report, and the agent checks its capacity again when it opens a session.
`AgentReservations` opens, confirms and closes the sessions of this hub process. After a restart of the hub or the agent
it keeps the sessions of running servers and closes abandoned ones. `left` counts CPU and memory for placement but does
not limit servers; see `GPUShareMixin.enforces_resources`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gpushare_spawner.background import pauses
from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.control import AgentUnreachable, ControlRefused, OpenRequest
from gpushare_spawner.model.layers import Placement
from gpushare_spawner.model.quantity import MILLICORES
from gpushare_spawner.model.report import Report, shared_fields
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.node import Allocation, NodeResources, Requested
from gpushare_spawner.sharing.native import open_request
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.queue.queue import Reservation, Ticket
from gpushare_spawner.spawner.queue.reservations import Reservations
from gpushare_spawner.spawner.queue.snapshot import (
    NO_RULES,
    GpuInventory,
    GpuSnapshot,
    guaranteed_resources,
    idle_sessions,
)
from gpushare_spawner.wording import spawn_failures

CONFIRM_WITHIN = 900.0
"""Seconds that the agent keeps an unconfirmed session; longer than a start may take."""
LONGEST_PAUSE = 5.0
"""Longest pause in seconds between two attempts to close a session while the agent does not answer."""


def this_machine() -> NodeResources:
    """Return the CPU and memory of this process's machine; any number of servers can run on it."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return NodeResources.of_empty_node((os.cpu_count() or 1) * MILLICORES, memory)


def left(machine: NodeResources, report: Report, templates: Iterable[Template]) -> NodeResources:
    """Return a machine's capacity without the current guarantees of the templates of a report's sessions.

    Sessions of a removed template and servers without a GPU, which are not in the report, are not counted.
    """
    guaranteed = {template.name: guaranteed_resources(template) for template in templates}
    taken = (guaranteed[session.template] for session in report.sessions if session.template in guaranteed)
    return machine.less(Requested.total(taken))


@dataclass(frozen=True)
class OpenedShare(Reservation):
    """A share that the agent keeps for a spawn, until its process is confirmed or it is released."""

    opened_with: OpenRequest
    environment: dict[str, str]
    """The environment for the notebook server."""


class AgentReservations(Reservations[OpenedShare]):
    """The shares that this hub process has requested from its machine's agent, and the queue.

    ``machine``: the machine with its CPU and memory; None: CPU and memory are not counted. The other settings are those
    of `Reservations`.
    """

    where: ClassVar[str] = "this machine"
    unavailable: ClassVar[str] = spawn_failures.AGENT_SILENT
    unreachable: ClassVar[tuple[type[Exception], ...]] = (AgentUnreachable,)

    def __init__(
        self, client: AgentClient, log: logging.Logger, *, machine: NodeResources | None = None, **settings: Any
    ) -> None:
        super().__init__(log, **settings)
        self.client = client
        self._machine = machine
        self.in_flight: dict[str, Allocation] = {}
        """Shares of sessions that are not confirmed yet, by the session's id."""
        self._running: dict[str, OpenRequest] = {}
        """Sessions with a process that was started or adopted here, until they are released."""
        self.closing: dict[str, asyncio.Task[None]] = {}
        """Sessions that are being closed; a pending close could also close a session that is opened now."""
        self._adopting: set[str] = set()
        self._last: tuple[float, Report] | None = None

    # -- one pass over the queue --

    async def snapshot(self, max_age: float = 0.0) -> GpuSnapshot:
        """Return a snapshot from the agent's report. Raises AgentUnreachable."""
        report = await self.report(max_age)
        self.feed.follow((report,), reserved=self.in_flight.values())
        if self._machine is not None:
            self.feed.resources(report.node, left(self._machine, report, self._expected.offered()))
        inventory = GpuInventory()
        inventory.put(report.node, report.gpus)
        notices = ((session.id, session.notice) for session in report.sessions)
        due = tuple((name, notice) for name, notice in notices if notice is not None)
        idle_since = idle_sessions(report, time.time()).get
        return GpuSnapshot(inventory, notices=due, idle_since=idle_since, rules=self.policy().layers or NO_RULES)

    async def _remove_obstacles(self, snapshot: GpuSnapshot) -> GpuSnapshot:
        reported = {session.id for session in self._last[1].sessions} if self._last is not None else set()
        waiting = {ticket.request.session for ticket in self.queue if not ticket.result.done()}
        leftovers = reported & waiting
        if not leftovers:
            return snapshot
        # The old server is not running, because the server is being started. The agent's session is an earlier one.
        await asyncio.gather(*(self.close(session, timeout=1.0) for session in leftovers))
        return await self.snapshot()

    def _delay(self, ticket: Ticket) -> str:
        # the pending close could close a session that is opened now
        return spawn_failures.SESSION_CLOSES if ticket.request.session in self.closing else ""

    async def _reserve_on(self, ticket: Ticket, placement: Placement, snapshot: GpuSnapshot) -> Allocation | None:
        """Request the place from the agent. Return None if the agent has no free capacity there."""
        request = open_request(ticket.request.tenant, ticket.request.template, placement, CONFIRM_WITHIN)
        gpus = tuple(snapshot.gpus[gpu] for gpu in request.gpus)
        try:
            # until the agent reports the session
            uncounted = Requested() if self._machine is None else guaranteed_resources(ticket.request.template)
            allocation, environment = await self._open(request, uncounted)
        except ControlRefused as error:
            if error.code in ("no-capacity", "unknown-gpu", "unhealthy-gpu", "exists"):
                self.log.info("The agent did not open %s: %s", request.id, error.message)
                if error.code == "exists":
                    self.release(request.id)
                ticket.says(ticket.ahead or 0, error.message)
            else:
                self.log.error("The agent refused to open %s (%s): %s", request.id, error.code, error.message)
                message = spawn_failures.agent_refused_session(error.message)
                ticket.refuse(SpawnRefused(message, reason="agent-refused", status=502))
            return None
        if ticket not in self.queue or ticket.result.done():
            self.release(request.id)
            return allocation
        # the user knows which machine it is
        shown = replace(placement, node="")
        ticket.result.set_result(OpenedShare(ticket.request, shown, gpus, request, environment))
        return allocation

    def give_back(self, reservation: OpenedShare) -> None:
        """Close the reservation's session in the background."""
        self.release(reservation.opened_with.id)

    async def report(self, max_age: float = 0.0) -> Report:
        """Return the agent's report, at most ``max_age`` seconds old. Raises AgentUnreachable."""
        if self._last is not None and time.monotonic() - self._last[0] < max_age:
            return self._last[1]
        report = await self.client.report()
        self._last = (time.monotonic(), report)
        return report

    # -- sessions of this hub process --

    async def _open(self, request: OpenRequest, uncounted: Requested) -> tuple[Allocation, dict[str, str]]:
        """Open a session. Return its allocation and the environment for its notebook server.

        ``uncounted``: its CPU and memory, until the agent reports it. Its share counts as in flight from now on. Raises
        ControlRefused; then nothing is open. After any other error the session is closed in the background: it may have
        been opened.
        """
        allocation = self.in_flight[request.id] = Allocation(
            session=request.id,
            effective_units=request.share_units,
            opened_at=time.time(),
            uncounted=uncounted,
            **shared_fields(request, Allocation),
        )
        try:
            opened = await self.client.open(request)
        except ControlRefused:
            self.in_flight.pop(request.id, None)
            raise
        except BaseException:
            # closing a session that is not open is not an error
            self.release(request.id)
            raise
        return allocation, opened.environment

    # -- the process runs --

    async def confirm(self, request: OpenRequest, pid: int) -> None:
        """Send the pid of a session's process to the agent; retry in the background if the agent is unavailable.

        Raises SpawnRefused if the agent refuses the pid, or if ``pid`` is below 1, because then the server has already
        ended.
        """
        if pid < 1:
            raise SpawnRefused(spawn_failures.SERVER_ENDED, reason="exited", status=500)
        self._running[request.id] = request
        try:
            await self._confirm(request, pid)
        except AgentUnreachable as error:
            self.log.warning("GPU session %s is not confirmed yet: %s", request.id, error)
            self.in_background(self._confirm_later(request, pid))
        except ControlRefused as error:
            raise SpawnRefused(
                spawn_failures.agent_refused_process(error.message), reason="agent-refused", status=502
            ) from None

    async def _confirm(self, request: OpenRequest, pid: int) -> None:
        try:
            await self.client.confirm(request.id, pid)
        except ControlRefused as error:
            if error.code != "unknown-session" or self._running.get(request.id) is not request:
                raise
            # The agent restarted without its state and lost the session. Request the same place again.
            await self.client.open(request)
            self.log.warning("The agent had lost GPU session %s; it was opened again", request.id)
            await self.client.confirm(request.id, pid)
        finally:
            if request.id not in self._running and request.id not in self.in_flight:
                # The server was stopped in the meantime and not started again. The session opened above must not stay
                # open.
                self.release(request.id)
        self.in_flight.pop(request.id, None)

    async def _confirm_later(self, request: OpenRequest, pid: int) -> None:
        for pause in pauses(1.0, 30.0):
            await asyncio.sleep(pause)
            if self._running.get(request.id) is not request:
                return
            try:
                await self._confirm(request, pid)
            except AgentUnreachable:
                continue
            except ControlRefused as error:
                self.log.warning("GPU session %s is not confirmed: %s. Its notebook keeps running.", request.id, error)
            return

    # -- the end of a session --

    def release(self, session: str) -> None:
        """Close a session in the background; a new spawn of the same server waits for the close."""
        self._running.pop(session, None)
        if session not in self.closing:
            self.closing[session] = self.in_background(self._close(session))

    async def close(self, session: str, timeout: float = 5.0) -> None:
        """Close a session. Wait for at most ``timeout`` seconds, then continue in the background."""
        self.release(session)
        await asyncio.wait({self.closing[session]}, timeout=timeout)

    async def _close(self, session: str) -> None:
        """Retry until the agent has closed the session or must have ended it on its own."""
        try:
            for pause in pauses(0.25, LONGEST_PAUSE, CONFIRM_WITHIN):
                try:
                    await self.client.close(session)
                    return
                except (AgentUnreachable, ControlRefused) as error:
                    self.log.warning("GPU session %s is not closed yet: %s", session, error)
                    await asyncio.sleep(pause)
        finally:
            self.in_flight.pop(session, None)
            self.closing.pop(session, None)
            self._wake.set()

    # -- after a restart of the hub or the agent --

    def adopt_soon(self, request: OpenRequest, pid: Callable[[], Awaitable[int]], runs: Callable[[], bool]) -> None:
        """Make sure, in the background, that a running server has its session.

        ``runs`` returns whether the server still runs under this session; ``pid`` returns its process ID.
        """
        if request.id not in self._adopting and request.id not in self.closing:
            self._adopting.add(request.id)
            self.in_background(self._adopt(request, pid, runs))

    async def _adopt(self, request: OpenRequest, pid: Callable[[], Awaitable[int]], runs: Callable[[], bool]) -> None:
        try:
            session = (await self.report(2.0)).session(request.id) or (await self.report(0.0)).session(request.id)
            if session is not None and session.confirmed:
                return
            number = await pid()
            if number >= 1 and runs():
                self._running[request.id] = request
                await self._confirm(request, number)
        except AgentUnreachable as error:
            self.log.warning("GPU session %s cannot be checked: %s", request.id, error)
        except ControlRefused as error:
            self.log.warning("Server %s runs without a GPU share: %s", request.id, error.message)
        except Exception:
            self.log.exception("GPU session %s could not be checked", request.id)
        finally:
            self._adopting.discard(request.id)

    def sweep_soon(self, runs: Callable[[str, str], bool]) -> None:
        """Run `sweep` in the background, as soon as the agent answers."""
        self.in_background(self._sweep(runs))

    async def _sweep(self, runs: Callable[[str, str], bool]) -> None:
        # the agent itself drops unconfirmed sessions of an earlier hub after CONFIRM_WITHIN
        for pause in pauses(1.0, 60.0, CONFIRM_WITHIN):
            try:
                await self.sweep(runs)
                return
            except AgentUnreachable:
                await asyncio.sleep(pause)
            except Exception:
                self.log.exception("Cannot search for sessions of an earlier hub")
                return

    async def sweep(self, runs: Callable[[str, str], bool]) -> None:
        """Close sessions that an earlier hub process reserved and never confirmed.

        ``runs`` returns whether a user's server runs or starts according to the hub. A confirmed session is not closed:
        its process is running, perhaps under another hub, and the agent ends the session with the process.
        """
        report = await self.report(0.0)
        for session in report.sessions:
            ours = session.id in self.in_flight or session.opened_at >= self.started_at
            if ours or runs(session.user, session.server):
                continue
            if session.confirmed:
                self.log.warning("GPU session %s (pid %s) belongs to no server of this hub", session.id, session.pid)
            else:
                self.log.info("Closing GPU session %s, which an earlier hub reserved and did not use", session.id)
                self.release(session.id)
