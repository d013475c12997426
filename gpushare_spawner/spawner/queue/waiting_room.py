"""Shares in flight and the line of starts that wait for one: what a machine and a cluster have in common."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ClassVar, Generic, TypeVar

from gpushare_spawner.model.placement import Placement
from gpushare_spawner.model.quantity import format_seconds
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement import BestFit, Holding, Ledger, Strategy
from gpushare_spawner.spawner.queue.availability import Outlook
from gpushare_spawner.spawner.queue.queue import Reservation, Ticket, WaitingLine, Wish
from gpushare_spawner.spawner.queue.snapshot import GpuView
from gpushare_spawner.spawner.refusal import StartRefused

Reserved = TypeVar("Reserved", bound=Reservation)


class WaitingRoom(ABC, Generic[Reserved]):
    """The shares that this hub process has asked for, and the line of starts that wait for one.

    One serves all spawners of a hub that look at the same GPUs. ``look_every``: seconds between two looks at the GPUs
    while somebody waits; nobody waiting, nothing is looked at. ``patience``: seconds that a start waits while nothing
    can be known about the GPUs.
    """

    where: ClassVar[str]
    """The GPUs' place, for people: this machine."""
    away: ClassVar[str]
    """What to say while nothing is known of the GPUs, without a full stop."""
    unreachable: ClassVar[tuple[type[Exception], ...]]
    """What `view` and `_give` raise when nothing can be known now."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        strategy: Strategy | None = None,
        queue_length: int = 50,
        overtakes: int = 20,
        look_every: float = 1.5,
        patience: float = 20.0,
    ) -> None:
        self.log = log
        self.strategy = strategy or BestFit()
        self.line = WaitingLine(queue_length, overtakes)
        self.look_every = look_every
        self.patience = patience
        self.started_at = time.time()
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._away_since: float | None = None

    # -- what the place of the GPUs must say --

    @abstractmethod
    async def view(self, max_age: float = 0.0) -> GpuView:
        """The GPUs as they are now, or were at most ``max_age`` seconds ago. Raises one of `unreachable`."""

    @abstractmethod
    def in_flight(self) -> Iterable[Holding]:
        """Shares that are put aside, and that a view may not show yet."""

    @abstractmethod
    async def _give(self, ticket: Ticket, placement: Placement, view: GpuView) -> Holding | None:
        """Put the place aside and tell the ticket; what it holds. None: the place is not to be had, look again.

        Raises one of `unreachable`; then nothing is put aside.
        """

    @abstractmethod
    def give_back(self, reservation: Reserved) -> None:
        """The start does not need it after all."""

    async def _prepare(self, view: GpuView) -> GpuView:
        """Clear away what stands in the way of those in the line; the view after that."""
        return view

    def _held_up(self, ticket: Ticket) -> str:
        """Why this start cannot be placed yet, whatever is free; empty where it can."""
        return ""

    def counted(self, share: Share) -> Share:
        """The share as the ledger must count it, where GPUs are given out in coarser steps than 1 %."""
        return share

    # -- from a wish to a reservation --

    async def reserve(self, wish: Wish, patience: float, joined: Callable[[Ticket], None] | None = None) -> Reserved:
        """A place for the wish, at once or after a wait of at most ``patience`` seconds.

        ``joined`` gets the ticket, to show the place in the line. Raises StartRefused where it cannot or does not get
        one; then, and when the wait is cancelled, nothing stays reserved.
        """
        ticket = self.line.join(wish, time.monotonic())
        result: asyncio.Future[Any] = ticket.result
        try:
            if joined is not None:
                joined(ticket)
            self.look_soon()
            done, _ = await asyncio.wait({result}, timeout=patience)
            if not done:
                raise self._too_long(ticket)
            reservation: Reserved = result.result()
            return reservation
        except BaseException:
            if result.done() and not result.cancelled() and result.exception() is None:
                self.give_back(result.result())
            raise
        finally:
            self.line.leave(ticket)
            ticket.changed.set()
            self.look_soon()

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

    def look_soon(self) -> None:
        """Have the line looked at now."""
        self._wake.set()
        if len(self.line) and (self._looking is None or self._looking.done()):
            self._looking = self.in_background(self._look_while_somebody_waits())

    async def _look_while_somebody_waits(self) -> None:
        while len(self.line):
            self._wake.clear()
            try:
                async with self._lock:
                    await self._look()
                self._away_since = None
            except self.unreachable as error:
                self._nothing_known(error)
            except Exception:
                # a bug must not leave the hub without starts: the next look may go well, and every wait is bounded
                self.log.exception("Looking for room on the GPUs failed")
            if len(self.line):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self.look_every)

    async def _look(self) -> None:
        """Give everybody in the line who fits a place, on a fresh view."""
        view = await self._prepare(await self.view())
        ledger = self.ledger(view)
        passed: list[tuple[Ticket, frozenset[str]]] = []
        for ticket in self.line:
            if ticket not in self.line or ticket.result.done():
                continue
            held_up = self._held_up(ticket)
            if held_up:
                ticket.says(ticket.ahead or 0, held_up)
                continue
            models = ticket.wish.models(view)
            free = models - self.line.held_back(view, before=ticket)
            eligible = _on_node(ledger, view, ticket.wish.node)
            placement = eligible.place(self.counted(ticket.wish.share), free.__contains__, self.strategy)
            if placement is None:
                if not self._waits_on(ticket, view, eligible, models, free):
                    continue
                passed.append((ticket, models))
                continue
            holding = await self._give(ticket, placement, view)
            if holding is None:
                # counted otherwise elsewhere: look again with what is known now
                break
            ledger.add(holding)
            for earlier, wanted in passed:
                earlier.overtaken += not wanted.isdisjoint(models)

    def _waits_on(
        self, ticket: Ticket, view: GpuView, ledger: Ledger, models: frozenset[str], free: frozenset[str]
    ) -> bool:
        """Whether a start without a place goes on waiting; else it has been refused."""
        refusal = ledger.refusal(ticket.wish.share, models.__contains__)
        hint = "Those before you come first." if models and not free else refusal.message
        fits = ledger.place(self.counted(ticket.wish.share), models.__contains__, self.strategy) is not None
        if not refusal.may_pass and not fits:
            if not view.awaited:
                self._refuse(ticket, self._impossible(ticket.wish, refusal.message))
                return False
            hint = view.awaited
        if ticket.ahead is None and self.line.full:
            self._refuse(ticket, self._no_place_in_line(ticket.wish))
            return False
        ticket.says(self.line.ahead_of(models, view, ticket), hint)
        return True

    def _impossible(self, wish: Wish, why: str) -> StartRefused:
        where = f"{self.where}, which for you is node {wish.node} alone" if wish.node else self.where
        return StartRefused(
            f"{wish.template.name} cannot be started on {where}: {why}", reason="no-such-gpu", status=409
        )

    def _refuse(self, ticket: Ticket, error: StartRefused) -> None:
        if not ticket.result.done():
            ticket.result.set_exception(error)
            # the waiter may have left; an exception that nobody fetches must not end up in the log as a bug
            ticket.result.exception()

    def _why_nobody_is_placed(self, error: Exception) -> str:
        """A sentence for those in the line while the GPUs cannot be looked at."""
        return f"{self.away}; trying again."

    def _nothing_known(self, error: Exception) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            self.log.warning("%s: %s", self.away, error)
        for ticket in self.line:
            ticket.says(ticket.ahead or 0, self._why_nobody_is_placed(error))
            if now - max(ticket.joined, self._away_since) >= self.patience:
                self._refuse(
                    ticket,
                    StartRefused(
                        f"{self.away}, so nothing can be started on a GPU. "
                        "Try again in a minute, or choose a template without a GPU; tell the admin if it stays so.",
                        reason="agent-away",
                        status=503,
                        retry_after=60,
                        log_message=f"{self.away}: {error}",
                    ),
                )

    # -- what is free --

    def ledger(self, view: GpuView) -> Ledger:
        """All shares: those that the view shows, and those in flight."""
        return Ledger.of(view.reports, [*view.holdings, *self.in_flight()])

    async def outlook(self, max_age: float = 0.0) -> Outlook:
        """What a start would meet now. Raises one of `unreachable`."""
        view = await self.view(max_age)
        return Outlook(view, self.ledger(view), self.line, self.strategy, self.where, self.counted)

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something to its end, whoever asked for it."""
        task = asyncio.ensure_future(work)
        # the event loop keeps only weak references to tasks
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _on_node(ledger: Ledger, view: GpuView, node: str) -> Ledger:
    """The ledger of one node alone; all of it where no node is named."""
    if not node:
        return ledger
    return Ledger.of([report for report in view.reports if report.node == node], ledger.holdings.values())
