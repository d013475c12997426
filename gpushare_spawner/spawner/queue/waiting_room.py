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
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement import BestFit, Holding, Ledger, Strategy
from gpushare_spawner.spawner.queue.availability import Outlook
from gpushare_spawner.spawner.queue.placer import Placer
from gpushare_spawner.spawner.queue.queue import Reservation, Ticket, WaitingLine, Wish
from gpushare_spawner.spawner.queue.refusals import nothing_known, waited_too_long
from gpushare_spawner.spawner.queue.snapshot import GpuView

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
                raise waited_too_long(wish, time.monotonic() - ticket.joined, ticket.hint)
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
        placer = Placer(view, self.ledger(view), self.line, self.strategy, self.counted, self.where)
        for ticket in self.line:
            if ticket not in self.line or ticket.result.done():
                continue
            held_up = self._held_up(ticket)
            if held_up:
                ticket.says(ticket.ahead or 0, held_up)
                continue
            placement = placer.place(ticket)
            if placement is None:
                continue
            holding = await self._give(ticket, placement, view)
            if holding is None:
                # counted otherwise elsewhere: look again with what is known now
                break
            placer.gave(ticket, holding)

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
                ticket.refuse(nothing_known(self.away, error))

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
