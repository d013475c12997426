"""Shares in flight: from the wish through the line to the agent, and back when a start fails.

One `Reservations` serves all spawners of a hub process that use the same agent. What it knows is only a hint: every
look at the GPUs starts with a fresh report, and the agent counts again when a session is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from gpushare_spawner.model.control import AgentUnreachable, ControlRefused, OpenRequest
from gpushare_spawner.model.quantity import format_seconds
from gpushare_spawner.model.report import Report
from gpushare_spawner.placement import BestFit, Holding, Ledger, Strategy
from gpushare_spawner.sharing.control_client import AgentClient
from gpushare_spawner.sharing.native import open_request
from gpushare_spawner.spawner.queue import Reservation, Ticket, WaitingLine, Wish
from gpushare_spawner.spawner.refusal import StartRefused

CONFIRM_WITHIN = 900.0
"""Seconds that the agent keeps a session whose process nobody confirmed: longer than a start may take."""
LONGEST_PAUSE = 5.0
"""Seconds between two tries to close a session while the agent does not answer, at most."""


class Reservations:
    """The shares that this hub process has asked for, and the line of starts that wait for one.

    ``look_every``: seconds between two looks at the GPUs while somebody waits; nobody waiting, nothing is asked.
    ``agent_patience``: seconds that a start waits for an agent that does not answer.
    """

    def __init__(
        self,
        client: AgentClient,
        log: logging.Logger,
        *,
        strategy: Strategy | None = None,
        queue_length: int = 50,
        overtakes: int = 20,
        look_every: float = 1.5,
        agent_patience: float = 20.0,
    ) -> None:
        self.client = client
        self.log = log
        self.strategy = strategy or BestFit()
        self.line = WaitingLine(queue_length, overtakes)
        self.look_every = look_every
        self.agent_patience = agent_patience
        self.started_at = time.time()
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._in_flight: dict[str, Holding] = {}
        self._running: dict[str, OpenRequest] = {}
        """Sessions whose process was started here, until they are released."""
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._adopting: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._away_since: float | None = None
        self._last: tuple[float, Report] | None = None

    # -- from a wish to a reservation --

    async def reserve(self, wish: Wish, patience: float, joined: Callable[[Ticket], None] | None = None) -> Reservation:
        """A place for the wish, at once or after a wait of at most ``patience`` seconds.

        ``joined`` gets the ticket, to show the place in the line. Raises StartRefused where it cannot or does not get
        one; then, and when the wait is cancelled, nothing stays reserved.
        """
        ticket = self.line.join(wish, time.monotonic())
        try:
            if joined is not None:
                joined(ticket)
            self._look_soon()
            done, _ = await asyncio.wait({ticket.result}, timeout=patience)
            if not done:
                raise self._too_long(ticket)
            return ticket.result.result()
        except BaseException:
            if ticket.result.done() and not ticket.result.cancelled() and ticket.result.exception() is None:
                self.release(wish.session)
            raise
        finally:
            self.line.leave(ticket)
            ticket.changed.set()
            self._look_soon()

    def _no_place_in_line(self, wish: Wish) -> StartRefused:
        waiting = f", and {self.line.length} servers are waiting already" if self.line.length else ""
        return StartRefused(
            f"No GPU is free for {wish.share} now{waiting}. "
            "Try again in a few minutes, or choose a template without a GPU.",
            reason="queue-full",
            status=503,
            retry_after=120,
        )

    def _too_long(self, ticket: Ticket) -> StartRefused:
        waited = format_seconds(time.monotonic() - ticket.joined)
        why = f" {ticket.hint}" if ticket.hint else ""
        return StartRefused(
            f"No room for {ticket.wish.share} after a wait of {waited}.{why} "
            "Nothing is reserved for you. Try again later, or choose a smaller template.",
            reason="no-room",
            status=503,
            retry_after=60,
        )

    # -- one look at the GPUs --

    def _look_soon(self) -> None:
        """Have the line looked at now."""
        self._wake.set()
        if len(self.line) and (self._looking is None or self._looking.done()):
            self._looking = self._background(self._look_while_somebody_waits())

    async def _look_while_somebody_waits(self) -> None:
        while len(self.line):
            self._wake.clear()
            try:
                async with self._lock:
                    await self._look()
                self._away_since = None
            except AgentUnreachable as error:
                self._agent_away(error)
            except Exception:
                # a bug must not leave the hub without starts: the next look may go well, and every wait is bounded
                self.log.exception("Looking for room on the GPUs failed")
            if len(self.line):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self.look_every)

    async def _look(self) -> None:
        """Give everybody in the line who fits a place, on a fresh report."""
        report = await self._fresh()
        leftovers = {ticket.wish.session for ticket in self.line if self._is_leftover(ticket, report)}
        if leftovers:
            # the server does not run, or it could not be starting: what the agent holds for it is from before
            await asyncio.gather(*(self.close(session, timeout=1.0) for session in leftovers))
            report = await self._fresh()
        ledger = Ledger.of([report], self._in_flight.values())
        passed: list[tuple[Ticket, frozenset[str]]] = []
        for ticket in self.line:
            if ticket not in self.line or ticket.result.done():
                continue
            if ticket.wish.session in self._closing:
                # opened now, it might be closed by the close that is under way
                ticket.says(ticket.ahead or 0, "The server's earlier session is being closed.")
                continue
            models = ticket.wish.models(report)
            free = models - self.line.held_back(report, before=ticket)
            placement = ledger.place(ticket.wish.share, free.__contains__, self.strategy)
            if placement is None:
                refusal = ledger.refusal(ticket.wish.share, models.__contains__)
                if not refusal.may_pass and ledger.place(ticket.wish.share, models.__contains__, self.strategy) is None:
                    self._refuse(ticket, _impossible(ticket.wish, refusal.message))
                    continue
                if ticket.ahead is None and self.line.full:
                    self._refuse(ticket, self._no_place_in_line(ticket.wish))
                    continue
                hint = "Those before you come first." if models and not free else refusal.message
                ticket.says(self.line.ahead_of(models, report, ticket), hint)
                passed.append((ticket, models))
                continue
            request = open_request(ticket.wish.tenant, ticket.wish.template, placement, CONFIRM_WITHIN)
            if not await self._open(ticket, request, report):
                # the agent counted otherwise: look again with what it knows now
                break
            ledger.add(_holding(request))
            for earlier, wanted in passed:
                earlier.overtaken += not wanted.isdisjoint(models)

    def _is_leftover(self, ticket: Ticket, report: Report) -> bool:
        return not ticket.result.done() and report.session(ticket.wish.session) is not None

    async def _open(self, ticket: Ticket, request: OpenRequest, report: Report) -> bool:
        """Ask the agent for the place; False where it sees no room there."""
        self._in_flight[request.id] = _holding(request)
        try:
            opened = await self.client.open(request)
        except ControlRefused as error:
            self._in_flight.pop(request.id, None)
            if error.code in ("no-room", "unknown-gpu", "unhealthy-gpu", "exists"):
                self.log.info("The agent did not open %s: %s", request.id, error.message)
                if error.code == "exists":
                    self.release(request.id)
                ticket.says(ticket.ahead or 0, error.message)
                return False
            self.log.error("The agent refused to open %s (%s): %s", request.id, error.code, error.message)
            self._refuse(ticket, _refused(error))
            return True
        except BaseException:
            # perhaps it was opened all the same: closing what is not open is no error
            self.release(request.id)
            raise
        if ticket not in self.line or ticket.result.done():
            self.release(request.id)
            return True
        gpus = tuple(gpu for gpu in report.gpus if gpu.uuid in request.gpus)
        ticket.result.set_result(Reservation(request, opened.environment, gpus))
        return True

    def _refuse(self, ticket: Ticket, error: StartRefused) -> None:
        if not ticket.result.done():
            ticket.result.set_exception(error)
            # the waiter may have left; an exception that nobody fetches must not end up in the log as a bug
            ticket.result.exception()

    def _agent_away(self, error: AgentUnreachable) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            self.log.warning("GPU agent: %s", error)
        for ticket in self.line:
            ticket.says(ticket.ahead or 0, "The GPU agent of this machine does not answer; trying again.")
            if now - max(ticket.joined, self._away_since) >= self.agent_patience:
                self._refuse(
                    ticket,
                    StartRefused(
                        "The GPU agent of this machine does not answer, so nothing can be started on a GPU. "
                        "Try again in a minute, or choose a template without a GPU; tell the admin if it stays so.",
                        reason="agent-away",
                        status=503,
                        retry_after=60,
                        log_message=f"GPU agent: {error}",
                    ),
                )

    async def _fresh(self) -> Report:
        report = await self.client.report()
        self._last = (time.monotonic(), report)
        return report

    async def report(self, max_age: float = 0.0) -> Report:
        """What the agent says now, or said at most ``max_age`` seconds ago. Raises AgentUnreachable."""
        if self._last is not None and time.monotonic() - self._last[0] < max_age:
            return self._last[1]
        return await self._fresh()

    def ledger(self, report: Report) -> Ledger:
        """All shares: those in the report, and those in flight."""
        return Ledger.of([report], self._in_flight.values())

    # -- the process runs --

    async def confirm(self, request: OpenRequest, pid: int) -> None:
        """Tell the agent the pid of the session's process. An agent that is away is told when it is back.

        Raises ControlRefused where the agent does not accept it.
        """
        self._running[request.id] = request
        try:
            await self._confirm(request, pid)
        except AgentUnreachable as error:
            self.log.warning("GPU session %s is not confirmed yet: %s", request.id, error)
            self._background(self._confirm_later(request, pid))

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
            self._closing[session] = self._background(self._close(session))

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
            self._background(self._adopt(request, pid, runs))

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
        self._background(self._sweep(runs))

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

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        # the event loop keeps only weak references to tasks
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _holding(request: OpenRequest) -> Holding:
    return Holding(
        session=request.id,
        gpus=request.gpus,
        share_units=request.share_units,
        borrowed_units=request.borrowed_units,
        effective_units=request.share_units,
        opened_at=time.time(),
    )


def _impossible(wish: Wish, why: str) -> StartRefused:
    return StartRefused(
        f"{wish.template.name} cannot be started on this machine: {why}", reason="no-such-gpu", status=409
    )


def _refused(error: ControlRefused) -> StartRefused:
    return StartRefused(
        f"The GPU agent refused the session: {error.message}. Tell the admin.", reason="agent-refused", status=502
    )
