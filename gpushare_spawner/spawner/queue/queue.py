"""The queue of spawns that wait for free GPU capacity: its order, and the earlier spawns of each. No clock, no network.

`placer.Positions` counts the positions that users read. `LoopBreaks` divides long work, so that the event loop is free.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from gpushare_spawner.model.layers import Placement
from gpushare_spawner.model.report import GpuReport
from gpushare_spawner.model.template import Template
from gpushare_spawner.spawner.queue.snapshot import LayerOffer, SpawnRequest


@dataclass(frozen=True)
class Reservation:
    """A share that is kept for a spawn, until its server runs or it is released."""

    request: SpawnRequest
    placement: Placement
    gpus: tuple[GpuReport, ...]
    offer: LayerOffer | None = field(default=None, kw_only=True)
    """The offer of another sharing layer; None if the server runs on these GPUs, which have an agent."""


@dataclass(frozen=True)
class WaitStatus:
    """The state of a queued spawn, for its user."""

    ahead: int
    """Earlier spawns that could use the same GPUs."""
    hint: str = ""
    """The reason for the wait, as a sentence."""
    minutes: int | None = None
    """The estimated wait; None: unknown."""
    startable: tuple[Template, ...] = ()
    """Templates that the user could start now instead."""
    gpus: str = ""
    """The suitable GPUs, for people; empty: none are reported."""
    elsewhere: bool = False
    """Whether only other sharing layers can serve the spawn. Their state is largely unknown: without an estimate, the
    user gets a text that says so.
    """


@dataclass(eq=False)
class Ticket:
    """A spawn in the queue."""

    request: SpawnRequest
    joined: float
    """Seconds on a monotonic clock."""
    alternatives: tuple[SpawnRequest, ...] = ()
    """Requests for the other templates that the user may start."""
    result: asyncio.Future[Reservation] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ahead: int | None = None
    """Earlier spawns that could use the same GPUs, as of the last pass; None before the first."""
    hint: str = ""
    """The reason for the wait."""
    first_since: float | None = None
    """The time since which no spawn is before it (monotonic clock, seconds); None if a spawn is before it."""
    status: WaitStatus | None = None
    """The state that its user saw last."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `status` changes, and when the wait ends."""
    considered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a pass over the queue has decided about it, with the GPUs available."""
    offer: LayerOffer | None = None
    """The offer of another sharing layer, once it has a place; None: on GPUs with an agent."""
    kept: str = ""
    """The node of the GPUs that were last kept for it; empty: none."""
    moves: int = 0
    """Number of changes of that node."""
    overtaken: int = 0
    """Number of later spawns that another layer has placed on nodes that suit this spawn."""
    kept_elsewhere: str = ""
    """The node of another layer that is kept for it now; empty: none."""
    elsewhere: bool = False
    """Whether only other layers can serve it."""

    @property
    def hold_name(self) -> str:
        """The name of its hold in the ledger."""
        return f"{self.request.session}#{id(self)}"

    def keeps(self, node: str) -> None:
        """Record the node of the GPUs that are kept for it."""
        self.moves += self.kept not in ("", node)
        self.kept = node

    def says(self, ahead: int, hint: str) -> None:
        """Record the position and the reason for the wait. `publish` shows them to the user."""
        self.ahead, self.hint = ahead, hint

    def publish(
        self, now: float, minutes: int | None = None, startable: tuple[Template, ...] = (), gpus: str = ""
    ) -> None:
        """Show the user the position, an estimate of the wait, the templates that could start now, and suitable GPUs.

        ``now``: seconds on a monotonic clock. Does nothing before the first pass over the ticket.
        """
        if self.ahead is None:
            return
        if self.ahead > 0:
            self.first_since = None
        elif self.first_since is None:
            self.first_since = now
        status = WaitStatus(self.ahead, self.hint, minutes, startable, gpus, self.elsewhere)
        if status != self.status:
            self.status = status
            self.changed.set()

    def refuse(self, error: Exception) -> None:
        """End the wait with an error. Does nothing if it has ended."""
        if not self.result.done():
            self.result.set_exception(error)
            # the spawn may have left; an exception that is never retrieved must not be logged as a bug
            self.result.exception()


class SpawnQueue:
    """Spawns in the order in which they are served: first come first, unless quotas change it (`arrange`).

    Policy: first come, first served among the spawns that fit. Later spawns that fit pass a spawn that does not fit.
    Meanwhile GPUs are kept for the first spawn that could use some node: see `placer`.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._tickets: dict[int, Ticket] = {}
        """By identity, in the order in which they are served: two tickets may have equal requests."""

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        """Return an iterator over a copy of the tickets, first come first: joining and leaving do not disturb it."""
        return iter(tuple(self._tickets.values()))

    def __contains__(self, ticket: Ticket) -> bool:
        return id(ticket) in self._tickets

    def is_full(self, competes: Callable[[Ticket], bool]) -> bool:
        """Return whether the queue is full, counting only competing spawns.

        A spawn that no pass has considered may get a place at once: it does not count.
        """
        waiting = (ticket for ticket in self if ticket.ahead is not None and not ticket.result.done())
        return sum(map(competes, waiting)) >= self.length

    def kept_elsewhere(self, besides: str = "") -> frozenset[str]:
        """Return the nodes of other layers that are kept for spawns. ``besides``: the hold of a spawn to leave out."""
        return frozenset(
            ticket.kept_elsewhere
            for ticket in self
            if ticket.kept_elsewhere and not ticket.result.done() and ticket.hold_name != besides
        )

    def join(self, request: SpawnRequest, now: float) -> Ticket:
        """Add a spawn at the end of the queue."""
        ticket = Ticket(request, now)
        self._tickets[id(ticket)] = ticket
        return ticket

    def arrange(self, order: Iterable[Ticket]) -> None:
        """Set the order. ``order``: tickets of the queue; tickets that are not in it come after the others."""
        arranged = {id(ticket): ticket for ticket in order if ticket in self}
        self._tickets = arranged | {key: ticket for key, ticket in self._tickets.items() if key not in arranged}

    def leave(self, ticket: Ticket) -> None:
        """Leave the queue. Does nothing for a ticket that is not in it."""
        self._tickets.pop(id(ticket), None)

    def ahead_of(self, competes: Callable[[Ticket], bool], ticket: Ticket | None = None) -> int:
        """Return how many earlier tickets compete with this ticket; without a ticket, of all tickets."""
        count = 0
        for other in self._tickets.values():
            if other is ticket:
                break
            count += not other.result.done() and competes(other)
        return count


LONGEST_SECONDS = 0.004
"""Longest work without a break for the event loop, as far as the pieces of the work allow. Our value: the hub's own
callbacks take about as long.
"""


MOST_FREEZES = 5000
"""Breaks at which objects are excluded from garbage collection. Measured: the first read of 100,000 GPUs has 2,000 to
3,500. A hub with failing first reads excludes no more than that.
"""


class LastingObjects:
    """Exclusion of long-lived objects from garbage collection during the first read of a large cluster.

    Python's garbage collector would block the event loop while it traverses the many new objects. An object without
    references is freed all the same; only cycles that were garbage at that moment are not. So the exclusion happens at
    most `MOST_FREEZES` times.
    """

    def __init__(self) -> None:
        self._left = MOST_FREEZES

    def exclude(self) -> None:
        """Exclude all existing objects from garbage collection."""
        if self._left:
            self._left -= 1
            # Collect the youngest generation first. Its garbage is freed, and tuples of numbers and strings need no
            # collector at all.
            gc.collect(0)
            gc.freeze()


class LoopBreaks:
    """Breaks in which other tasks of the event loop run during one long task."""

    def __init__(
        self,
        longest: float = LONGEST_SECONDS,
        clock: Callable[[], float] = time.perf_counter,
        lasting: LastingObjects | None = None,
    ) -> None:
        """Start the clock. ``longest``: seconds of work between two breaks; ``clock``: returns seconds.

        ``lasting``: excludes the objects of the work from garbage collection at each break; None if there is no
        exclusion.
        """
        self._longest = longest
        self._clock = clock
        self._since = clock()
        self._lasting = lasting

    async def pause_if_due(self) -> None:
        """Let other tasks run if the last break is too long ago."""
        if self._clock() - self._since >= self._longest:
            if self._lasting is not None:
                self._lasting.exclude()
            await asyncio.sleep(0)
            self._since = self._clock()

    async def through(self, pieces: Iterable[object]) -> None:
        """Run all pieces of some work, with breaks between them."""
        for _ in pieces:
            await self.pause_if_due()
