"""The queue of spawns that wait for free GPU capacity, and one pass over it, which places, keeps or refuses each spawn.

`SpawnQueue` defines the order of the spawns. `PlacementCheck` decides on one snapshot whether a share can be placed
now, later or never, for the queue and for the form's cards. `Positions` counts the earlier spawns that compete with a
spawn. `HeldNodes` holds nodes of other sharing layers for overtaken spawns: the ledger does not contain these GPUs,
and their layer's scheduler chooses the GPU, so a whole node is held. GPUs with an agent are held in the ledger, see
`Placer.hold`. Positions, HeldNodes and Placer live for one pass over the queue. `LoopBreaks` divides long work so that
the event loop is not blocked.

This module reserves nothing and reads no clock: see `reservations`. The texts of refusals are in
`wording.spawn_failures`.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from gpushare_spawner.model.layers import LayerName, Placement
from gpushare_spawner.model.report import GpuReport, Notice
from gpushare_spawner.model.share import Share
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.capacity import FreeCapacity, Rating
from gpushare_spawner.placement.departures import Departures, ExpectedStart, candidates
from gpushare_spawner.placement.feed import EntrySource, LedgerFeed, first_to_fit, helpful_actions
from gpushare_spawner.placement.ledger import (
    Ledger,
    NodeHold,
    able_nodes,
    cheapest_hold,
    preparing_hold,
    rating_steps,
    yielding_nodes,
)
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.placement.obstacles import Reason, Unplaceable
from gpushare_spawner.placement.request import Demand, PlacementRequest
from gpushare_spawner.placement.strategy import Strategy
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.queue.snapshot import (
    GpuSnapshot,
    LayerHolds,
    LayerOffer,
    LayerOutcome,
    OtherLayers,
    SpawnRequest,
)
from gpushare_spawner.wording import spawn_failures, spawn_form
from gpushare_spawner.wording.spawn_failures import EARLIER_FIRST, refused_by_nodes

LATE_PART = 0.5
"""Part of the expected wait by which a hold may outlast the expected start, from `LEAST_LATE_SECONDS` to
`MOST_LATE_SECONDS`. Our values, from `benchmarks.queue`."""
LEAST_LATE_SECONDS = 60.0
MOST_LATE_SECONDS = 600.0
MOST_EXPECTED_SECONDS = 86400.0
"""A start that is expected later is unknown."""
UNKNOWN_HOLD_SECONDS = 300.0
"""Seconds of a hold with an unknown start."""
PAUSE_SECONDS = 120.0
"""Seconds after a late hold in which the same spawn has none on that node, or none at all without an expected start:
what became free serves others."""


@dataclass(frozen=True)
class Reservation:
    """A share that is kept for a spawn, until its server runs or it is released."""

    request: SpawnRequest
    placement: Placement
    gpus: tuple[GpuReport, ...]
    offer: LayerOffer | None = field(default=None, kw_only=True)
    """The offer of another sharing layer; None if the server runs on these GPUs, which have an agent."""


class WaitInterval(NamedTuple):
    """Minutes between which a spawn starts in four of five cases, and after which half of such spawns have started."""

    earliest: int
    likely: int
    latest: int


@dataclass(frozen=True)
class WaitStatus:
    """The state of a queued spawn, for its user."""

    ahead: int
    """Number of earlier spawns that could use the same GPUs."""
    hint: str = ""
    """The reason for the wait, as a sentence."""
    wait: WaitInterval | None = None
    """The estimated wait; None: unknown."""
    startable: tuple[Template, ...] = ()
    """Templates that the user could start now instead."""
    gpus: str = ""
    """The suitable GPUs as text for people; empty: none are reported."""
    elsewhere: bool = False
    """Whether only other sharing layers can serve the spawn. Their state is largely unknown; without an estimate, the
    user gets a text that says so.
    """
    nodes: tuple[str, ...] | None = None
    """Nodes that could take the spawn if sessions there gave up units; None: unknown, or too many."""


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
    """Number of earlier spawns that could use the same GPUs, as of the last pass; None before the first pass."""
    hint: str = ""
    """The reason for the wait."""
    first_since: float | None = None
    """The time at which it became first (monotonic clock, seconds); None while another spawn is before it."""
    status: WaitStatus | None = None
    """The state that was last shown to its user."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `status` changes, and when the wait ends."""
    considered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a pass over the queue has decided on it while the GPUs were available."""
    offer: LayerOffer | None = None
    """The offer of another sharing layer, once the spawn has a place; None on GPUs with an agent."""
    held_node: str = ""
    """The node of the GPUs most recently held for it; empty: none."""
    moves: int = 0
    """The number of times that this node has changed."""
    overtaken: int = 0
    """Number of later spawns that another layer has placed on nodes that suit this spawn."""
    held_elsewhere: str = ""
    """The node of another layer that is held for it now; empty: none."""
    elsewhere: bool = False
    """Whether only other layers can serve it."""
    nodes: tuple[str, ...] | None = None
    """See `WaitStatus.nodes`."""
    start: ExpectedStart | None = None
    """Where and when it is expected to start; None: unknown, or earlier spawns could use the same nodes."""
    hold_ends: float | None = None
    """When its hold is given up unless it has started (monotonic clock, seconds); None: it has no hold."""
    promised: float = 0.0
    """When it was expected to start on the node held for it, as the hold began (seconds since the epoch)."""
    holds_again: float = 0.0
    """When it may have a hold on `late_node` again, or any hold without an expected start."""
    late_node: str = ""
    """The node of the hold that was given up last; empty: none."""
    ends: float = math.inf
    """When its wait ends."""

    def give_up_late(self, now: float) -> None:
        """Give up the hold if the start is late. ``now``: seconds on a monotonic clock.

        The estimate was wrong: others may use the GPUs for `PAUSE_SECONDS`. Only if the spawn is expected to start
        first on another node by then, it has a hold there at once.
        """
        if self.hold_ends is not None and now >= self.hold_ends:
            self.late_node, self.holds_again = self.held_node, now + PAUSE_SECONDS
            self.hold_ends, self.held_node = None, ""

    def may_hold(self, now: float, wall_time: float) -> bool:
        """Return whether GPUs may be held for the spawn, see `give_up_late`.

        ``now``: seconds on a monotonic clock; ``wall_time``: seconds since the epoch. Nothing is held for a spawn if
        its wait ends before its earliest expected start.
        """
        if self.start is not None and self.start.at.earliest - wall_time > self.ends - now:
            return False
        self.give_up_late(now)
        if now < self.holds_again and (self.start is None or self.start.hold.node == self.late_node):
            return False
        if self.hold_ends is None:
            self.hold_ends = now + UNKNOWN_HOLD_SECONDS
        return True

    @property
    def hold_name(self) -> str:
        """The name of its hold in the ledger."""
        return f"{self.request.session}#{id(self)}"

    def record_hold(self, hold: NodeHold, now: float, wall_time: float) -> NodeHold:
        """Record the GPUs that are held for this spawn; return their hold, with the start before which others must end.

        Sessions that pass the hold can outlast the start that was expected when it began; no others pass for that.
        """
        if self.held_node != hold.node:
            self.moves += self.held_node != ""
            self.held_node, self.promised = hold.node, hold.start
            if self.start is not None:
                wait = hold.start - wall_time
                late = min(max(wait * LATE_PART, LEAST_LATE_SECONDS), MOST_LATE_SECONDS)
                self.hold_ends = now + wait + late
        return replace(hold, start=min(self.promised, hold.start))

    def says(self, ahead: int, hint: str) -> None:
        """Record the position and the reason for the wait. `publish` shows them to the user."""
        self.ahead, self.hint = ahead, hint

    def publish(
        self, now: float, wait: WaitInterval | None = None, startable: tuple[Template, ...] = (), gpus: str = ""
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
        status = WaitStatus(self.ahead, self.hint, wait, startable, gpus, self.elsewhere, self.nodes)
        if status != self.status:
            self.status = status
            self.changed.set()

    def refuse(self, error: Exception) -> None:
        """End the wait with an error. Does nothing if the wait has ended."""
        if not self.result.done():
            self.result.set_exception(error)
            # the spawn may have left; an exception that is never retrieved must not be logged as a bug
            self.result.exception()


class SpawnQueue:
    """Spawns in the order of service: first come, first served, unless quotas change the order (`arrange`).

    Policy: first come, first served among the spawns that fit. Later spawns that fit pass a spawn that does not fit.
    Meanwhile GPUs are held for the first spawn that could use some node: see `Placer`.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._tickets: dict[int, Ticket] = {}
        """Tickets by identity, because two tickets may have equal requests, in the order in which they are served."""

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        """Return an iterator over a copy of the tickets; tickets can join and leave during the iteration."""
        return iter(tuple(self._tickets.values()))

    def __contains__(self, ticket: Ticket) -> bool:
        return id(ticket) in self._tickets

    def is_full(self, competes: Callable[[Ticket], bool]) -> bool:
        """Return whether the queue is full, counting only competing spawns.

        A spawn that no pass has considered does not count, because it may get a place immediately.
        """
        waiting = (ticket for ticket in self if ticket.ahead is not None and not ticket.result.done())
        return sum(map(competes, waiting)) >= self.length

    def held_elsewhere(self, besides: str = "") -> frozenset[str]:
        """Return the nodes of other layers that are held for spawns. ``besides``: the hold of a spawn to exclude."""
        return frozenset(
            ticket.held_elsewhere
            for ticket in self
            if ticket.held_elsewhere and not ticket.result.done() and ticket.hold_name != besides
        )

    def join(self, request: SpawnRequest, now: float) -> Ticket:
        """Add a spawn at the end of the queue."""
        ticket = Ticket(request, now)
        self._tickets[id(ticket)] = ticket
        return ticket

    def arrange(self, order: Iterable[Ticket]) -> None:
        """Set the order. ``order``: tickets of the queue; tickets that are missing there follow at the end."""
        arranged = {id(ticket): ticket for ticket in order if ticket in self}
        self._tickets = arranged | {key: ticket for key, ticket in self._tickets.items() if key not in arranged}

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket. Does nothing if the ticket is not in the queue."""
        self._tickets.pop(id(ticket), None)

    def ahead_of(self, competes: Callable[[Ticket], bool], ticket: Ticket | None = None) -> int:
        """Return how many tickets before this ticket compete with it; without a ticket, count all competing tickets."""
        count = 0
        for other in self._tickets.values():
            if other is ticket:
                break
            count += not other.result.done() and competes(other)
        return count


LONGEST_SECONDS = 0.004
"""Longest time in seconds that work blocks the event loop, unless one piece of the work takes longer. Our value: the
hub's own callbacks take about as long.
"""


MOST_FREEZES = 10000
"""Maximum number of breaks at which objects are excluded from garbage collection, also if a hub's first reads fail.
Measured: each of the two first reads of 100,000 GPUs has 2,000 to 3,500 breaks.
"""
MIDDLE_COLLECTIONS = 2
"""Collections of the middle generation after which a break collects all: about 7,000 new objects each."""


class LoopBreaks:
    """Breaks during one long task in which other tasks of the event loop run.

    The first read of a large cluster creates many long-lived objects, and Python's garbage collector would block the
    event loop while it traverses them. Each break of such a read therefore excludes all existing objects from garbage
    collection. An excluded object is still freed when its last reference disappears; only cycles that become garbage
    later are never freed. Therefore the exclusion happens at most `MOST_FREEZES` times in a process. Objects that later
    work creates are excluded when the collection of all others takes longer than work may.
    """

    freezes: ClassVar[int] = 0
    """The number of exclusions so far."""

    def __init__(
        self, longest: float = LONGEST_SECONDS, clock: Callable[[], float] = time.perf_counter, lasting: bool = False
    ) -> None:
        """Start the clock. ``longest``: seconds of work between two breaks; ``clock``: returns seconds.

        ``lasting``: whether the work creates long-lived objects.
        """
        self._longest = longest
        self._clock = clock
        self._since = clock()
        self._lasting = lasting

    async def pause_if_due(self) -> None:
        """Let other tasks run if the last break was too long ago."""
        if self._clock() - self._since >= self._longest:
            await asyncio.sleep(0)
            if self._collect():
                await asyncio.sleep(0)  # a collection is a step of its own
            self._since = self._clock()

    def _collect(self) -> bool:
        """Collect garbage where little is left to collect, and exclude the objects that stay. Return whether it did."""
        if LoopBreaks.freezes >= MOST_FREEZES:
            return False
        if not self._lasting and (not LoopBreaks.freezes or gc.get_count()[2] < MIDDLE_COLLECTIONS):
            return False
        began = self._clock()
        # The youngest generation during a first read: all older objects are excluded, and tuples of numbers and strings
        # are untracked.
        gc.collect(0 if self._lasting else 2)
        if self._lasting or self._clock() - began >= self._longest:
            LoopBreaks.freezes += 1
            gc.freeze()
        return True

    async def through(self, pieces: Iterable[object]) -> None:
        """Run all pieces of some work, with breaks between them."""
        for _ in pieces:
            await self.pause_if_due()


NODES_AT_ONCE = 20
"""Nodes that are processed without a break for the event loop: 1 to 2 ms."""


@dataclass(frozen=True)
class Verdict:
    """The result for one share."""

    outcome: LayerOutcome
    placement: Placement | None = None
    """The place, for NOW."""
    why: str = ""
    """The reason as a sentence, for WAIT and NEVER."""
    reason: Reason | None = None
    """The kind of the reason, for WAIT and NEVER; None if earlier spawns or missing reports are the reason."""


@dataclass(frozen=True)
class PlacementCheck:
    """Check of shares against one snapshot and its ledger.

    ``counted`` returns a share as the ledger counts it if GPUs are allocated in coarser steps than 1 %.
    """

    snapshot: GpuSnapshot
    ledger: Ledger
    strategy: Strategy
    counted: Callable[[Share], Share] = field(default=lambda share: share)
    nodes_are_added: bool = False
    """Whether nodes that are added later may suit a request that no current node can take."""
    departures: Departures | None = None
    """The expected departures of sessions; None: unknown."""
    now: float = 0.0
    """Seconds since the epoch."""
    monotonic: float = 0.0
    """Seconds on a monotonic clock."""
    _placed: dict[PlacementRequest, tuple[FreeCapacity, int, Placement | None]] = field(
        default_factory=dict, repr=False
    )
    """By request, the capacity with its version, and the place. A rebuilt ledger has another capacity."""

    def verdict(self, request: PlacementRequest) -> Verdict:
        """Return whether a request can be placed without the capacity that is held for waiting spawns."""
        placement = self._place(request)
        if placement is not None:
            return Verdict(LayerOutcome.NOW, placement)
        unplaceable: Unplaceable = self.ledger.why_unplaceable(request)
        why = (
            self._no_instance(request)
            or self._native_there(request, unplaceable)
            or spawn_failures.capacity(unplaceable)
        )
        if not unplaceable.may_pass:
            if self.snapshot.awaited:
                return Verdict(LayerOutcome.WAIT, why=self.snapshot.awaited)
            outcome = LayerOutcome.WAIT if self.nodes_are_added else LayerOutcome.NEVER
            return Verdict(outcome, why=why, reason=unplaceable.reason)
        if self.fits_without(request, self.ledger.holds.keys()):
            placement = self._ends_before_holds_start(request)
            return Verdict(LayerOutcome.NOW, placement) if placement else Verdict(LayerOutcome.WAIT, why=EARLIER_FIRST)
        return Verdict(LayerOutcome.WAIT, why=why, reason=unplaceable.reason)

    def _place(self, request: PlacementRequest) -> Placement | None:
        """Return a place for a request; it is computed once until a node changes."""
        capacity = self.ledger.capacity
        cached = self._placed.get(request)
        if cached is None or cached[0] is not capacity or cached[1] != capacity.version:
            cached = capacity, capacity.version, self.ledger.place(self.counted_request(request), self.strategy)
            self._placed[request] = cached
        return cached[2]

    def length_of(self, request: PlacementRequest) -> float | None:
        """Return the expected seconds of a session, with which it may pass holds; None: unknown, or there are none."""
        if self.departures is None or not self.ledger.holds:
            return None
        return self.departures.lengths.expected(request.template)

    def _ends_before_holds_start(self, request: PlacementRequest) -> Placement | None:
        """Return a place on GPUs on hold, if a session like this ends before these are expected to be used."""
        length = self.length_of(request)
        if length is None:
            return None
        later = [name for name, hold in self.ledger.holds.items() if hold.start >= self.now + length]
        if not later or not self.fits_without(request, later):
            return None
        with self.ledger.without(later):
            return self.ledger.place(self.counted_request(request), self.strategy)

    def _no_instance(self, request: PlacementRequest) -> str:
        """Return why no MIG instance suits the request; empty if an instance suits or none is requested."""
        if request.layer is not LayerName.MIG or request.models:
            return ""
        profiles = [kind.mig.profile.name for kind in self.snapshot.kinds if kind.mig is not None]
        return spawn_form.no_instance(request.share, profiles)

    def _native_there(self, request: PlacementRequest, why: Unplaceable) -> str:
        """Return a sentence if native sessions block MPS on GPUs with enough free units; empty otherwise."""
        if request.layer is not LayerName.MPS or why.reason is not Reason.FULL:
            return ""
        native = replace(self.counted_request(request), layer=LayerName.NATIVE)
        return spawn_form.layer_taken(request.share) if self.ledger.place(native, self.strategy) is not None else ""

    def fits_without(self, request: PlacementRequest, holds: Collection[str]) -> bool:
        """Return whether a request would fit on a node of these holds without the holds."""
        return self.ledger.fits_without(self.counted_request(request), holds)

    def request_of(self, ticket: Ticket) -> PlacementRequest:
        """Return the request of a ticket, as the ledger counts its share."""
        return self.counted_request(ticket.request.placement_request(self.snapshot))

    def counted_request(self, request: PlacementRequest) -> PlacementRequest:
        """Return the request with its share as the ledger counts it."""
        share = self.counted(request.share)
        return request if share == request.share else replace(request, share=share)

    def preparing(self, request: PlacementRequest) -> Iterator[int]:
        """Prepare `verdict` in pieces, because on a large cluster its first result for a kind of request takes long."""
        counted = self.counted_request(request)
        if request.node:
            return  # no need for pieces
        capacity = self.ledger.capacity
        if isinstance(self.strategy, Rating):
            yield from rating_steps(capacity, counted.demand, self.strategy, NODES_AT_ONCE)
        if self._place(request) is None:
            yield from iter(lambda: capacity.prepare_obstacles(request.demand, NODES_AT_ONCE), 0)
            # prepares the spawn's position and hold
            yield from preparing_hold(capacity, counted)


_Kind = tuple[Demand, str]
"""A request's demand on a node, and the only suitable node (empty: any)."""


class Positions:
    """Counter of competing earlier spawns. GPU models, taints, labels and node sizes determine which spawns compete.

    Prepared by `PlacementCheck.preparing`.
    """

    def __init__(self, check: PlacementCheck, queue: SpawnQueue) -> None:
        self._check = check
        self._queue = queue
        self._by_template: dict[int, tuple[Template, Set[LayerName]]] = {}
        self._requests: dict[Ticket, PlacementRequest] = {}
        self._compete: dict[tuple[_Kind, _Kind], bool] = {}

    def ahead_of(self, request: PlacementRequest, ticket: Ticket | None = None) -> int:
        """Return how many tickets before ``ticket`` compete with a request; without a ticket, count all of them."""
        counted = self._check.counted_request(request)
        snapshot = self._check.snapshot
        return self._queue.ahead_of(
            lambda other: snapshot.native(other.request.template) and self._competes(counted, self._request(other)),
            ticket,
        )

    def ahead_of_template(self, template: Template, ticket: Ticket | None = None) -> int:
        """Return how many tickets before ``ticket`` share a layer with a template; without a ticket, count all."""
        return self._queue.ahead_of(self._shares_layer(template), ticket)

    def is_full(self, template: Template) -> bool:
        """Return whether the queue is full for a template; only spawns that share a layer with the template count.

        Spawns that wait for one layer take no place in the queue of another layer.
        """
        return self._queue.is_full(self._shares_layer(template))

    def _shares_layer(self, template: Template) -> Callable[[Ticket], bool]:
        layers = self._layers(template)
        return lambda other: not layers.isdisjoint(self._layers(other.request.template))

    def _layers(self, template: Template) -> Set[LayerName]:
        entry = self._by_template.get(id(template))
        if entry is None:
            snapshot = self._check.snapshot
            others = snapshot.layers.names(template) if snapshot.layers is not None else ()
            names = {*others, *([LayerName.NATIVE] if snapshot.native(template) else [])}
            # the value references the template, so that its id() is not reused
            entry = self._by_template[id(template)] = (template, names)
        return entry[1]

    def _request(self, ticket: Ticket) -> PlacementRequest:
        counted = self._requests.get(ticket)
        if counted is None:
            counted = self._requests[ticket] = self._check.request_of(ticket)
        return counted

    def _competes(self, request: PlacementRequest, other: PlacementRequest) -> bool:
        key = ((request.demand, request.node), (other.demand, other.node))
        competes = self._compete.get(key)
        if competes is None:
            competes = self._compete[key] = self._share_gpus(request, other)
        return competes

    def _share_gpus(self, request: PlacementRequest, other: PlacementRequest) -> bool:
        if request.models is not None and other.models is not None and request.models.isdisjoint(other.models):
            return False
        these, those = self._able(request), self._able(other)
        # No node can serve it. The spawn waits for GPUs to become healthy or for new nodes.
        return not (these and those) or not these.isdisjoint(those)

    def _able(self, request: PlacementRequest) -> Set[str]:
        return able_nodes(self._check.ledger.capacity, request)


MOST_OVERTAKEN = 5
"""Number of later spawns that may be placed before a waiting spawn until a node is held for it. Our value: a held node
stays partly empty, and most spawns wait only until the next session ends.
"""


class HeldNodes:
    """Nodes of other layers that are held for tickets. Call its methods for each ticket in queue order.

    ``may_hold``: see `Ticket.may_hold`.
    """

    def __init__(self, may_hold: Callable[[Ticket], bool] = lambda ticket: True) -> None:
        self._may_hold = may_hold
        self._held: set[str] = set()
        self._reached: set[str] = set()
        """Nodes that the spawns with a held node could use."""
        self._waiting: list[tuple[Ticket, frozenset[str]]] = []
        """Earlier waiting tickets, each with the nodes that it could use."""

    def seen_by(self, ticket: Ticket) -> LayerHolds:
        """Return the nodes that a ticket must leave to earlier tickets, and the node that is held for it."""
        return LayerHolds(frozenset(self._held), ticket.held_elsewhere)

    def waits(self, ticket: Ticket, able: frozenset[str], least_used: Callable[[Set[str]], str]) -> None:
        """Record a ticket without a place; hold a node for it if enough later spawns have overtaken it.

        ``able``: the nodes that could serve it. At most one node of each kind is held: a spawn gets no node if earlier
        spawns with a held node could use all of its nodes.
        """
        self._waiting.append((ticket, able))
        before, ticket.held_elsewhere = ticket.held_elsewhere, ""
        if ticket.overtaken < MOST_OVERTAKEN or able <= self._reached:
            return
        self._reached |= able
        if not self._may_hold(ticket):
            return
        left = able - self._held
        ticket.held_elsewhere = before if before in left else least_used(left)
        self._held.add(ticket.held_elsewhere)

    def placed(self, able: frozenset[str]) -> None:
        """Record that a ticket got a place on one of these nodes.

        The ticket has overtaken earlier tickets that could use one of these nodes.
        """
        for ticket, nodes in self._waiting:
            ticket.overtaken += not nodes.isdisjoint(able)


NOT_BY_THE_HUB = Placement("", ())
"""The placement of a server that a layer's scheduler places."""

MOST_MOVES = 5
"""The maximum number of times that pending idle actions move a spawn's hold to another node. Our value: users come back
before an action, other spawns fill the previous node, and the spawn could wait forever.
"""


class Placer:
    """One pass over the queue, in queue order.

    ``feed`` updates the ledger of ``check``. ``where``: the location of the GPUs, as text for people.
    """

    def __init__(self, check: PlacementCheck, feed: LedgerFeed, queue: SpawnQueue, where: str) -> None:
        self._check = check
        self._feed = feed
        self._queue = queue
        self._where = where
        self._positions = Positions(check, queue)
        self._held_nodes = HeldNodes(lambda ticket: ticket.may_hold(check.monotonic, check.now))
        self._reached: set[str] = set()
        """Nodes that the spawns with a hold could use if the nodes were empty."""
        self._yielding: dict[Hashable, tuple[FreeCapacity, int, tuple[str, ...] | None]] = {}
        """Results of `yielding_nodes`, each with its capacity and version; see `PlacementCheck._placed`."""
        self._notices = dict(check.snapshot.notices) if check.departures is not None else {}
        # a spawn respects the holds of earlier spawns, but not its own hold or those of later spawns
        for name in list(feed.ledger.holds):
            feed.hold(name, None)

    def place(self, ticket: Ticket) -> Placement | None:
        """Return a place for the ticket; None if it continues to wait with its new position or is refused.

        A place of another sharing layer has no node and no GPUs; the ticket's offer describes it.
        """
        request, snapshot = ticket.request, self._check.snapshot
        layers = snapshot.other_layers(request.template)
        if layers is not None:
            return self._place_by_layers(ticket, layers)
        placement_request = request.placement_request(snapshot)
        verdict = self._check.verdict(placement_request)
        outcome, reason = verdict.outcome, verdict.reason
        # Taints can be removed. A spawn that is already waiting is not refused because of a taint.
        if outcome is LayerOutcome.WAIT or (reason is Reason.INELIGIBLE and ticket.ahead is not None):
            if not self._refused_by_full_queue(ticket):
                why = f"{refused_by_nodes(request.left_out())}." if reason is Reason.NOT_ADMITTED else verdict.why
                ticket.says(self._positions.ahead_of(placement_request, ticket), why)
        elif outcome is LayerOutcome.NEVER:
            self._refuse_for_ever(ticket, verdict.why)
        return verdict.placement

    def _place_by_layers(self, ticket: Ticket, layers: OtherLayers) -> Placement | None:
        request = ticket.request
        elsewhere = layers.verdict(request, self._held_nodes.seen_by(ticket))
        if elsewhere.outcome is LayerOutcome.NOW:
            ticket.offer = elsewhere.offer
            self._held_nodes.placed(elsewhere.able)
            return NOT_BY_THE_HUB
        native = None
        if layers.native(request.template):
            native = self._check.verdict(request.placement_request(self._check.snapshot))
            if native.placement is not None:
                return native.placement
        waits = next(
            (result for result in (elsewhere, native) if result is not None and result.outcome is LayerOutcome.WAIT),
            None,
        )
        if waits is None and ticket.ahead is None and not self._check.nodes_are_added:
            self._refuse_for_ever(ticket, elsewhere.why)
        elif not self._refused_by_full_queue(ticket):
            ahead = self._positions.ahead_of_template(request.template, ticket)
            ticket.says(ahead, (waits or elsewhere).why)
            ticket.elsewhere = not layers.native(request.template)
            # if GPUs with an agent can serve the ticket, `hold` keeps some of these for it
            only_here = native is None or native.outcome is LayerOutcome.NEVER
            self._held_nodes.waits(ticket, elsewhere.able if only_here else frozenset(), layers.least_used)
        return None

    def _refused_by_full_queue(self, ticket: Ticket) -> bool:
        """Refuse a new ticket if the queue is full for its template. Return whether it is refused."""
        if ticket.ahead is not None or not self._positions.is_full(ticket.request.template):
            return False
        message = spawn_failures.queue_full(ticket.request.share, self._queue.length)
        ticket.refuse(SpawnRefused(message, reason="queue-full", status=503, retry_after=120))
        return True

    def _refuse_for_ever(self, ticket: Ticket, why: str) -> None:
        """Refuse a ticket that can never be placed. ``why``: the reason as a sentence."""
        request = ticket.request
        message = spawn_failures.impossible(request.template.display_name, self._where, request.node, why)
        ticket.refuse(SpawnRefused(message, reason="no-such-gpu", status=409))

    async def hold(self, ticket: Ticket, breaks: LoopBreaks) -> None:
        """Hold GPUs for a waiting ticket if no earlier ticket could use their node.

        Chooses the GPUs on which it is expected to start first, for a stated time, see `Ticket.give_up_late`. If
        nothing is expected, chooses the GPUs on which the least capacity must become free; that amount decreases from
        pass to pass.
        """
        check = self._check
        if not check.snapshot.native(ticket.request.template):
            ticket.start = None
            return
        request = check.request_of(ticket)
        capacity = check.ledger.capacity
        await breaks.through(preparing_hold(capacity, request))
        able = able_nodes(capacity, request)
        ticket.give_up_late(check.monotonic)
        ticket.nodes, ticket.start = self._yielding_nodes(request), None
        if ticket.result.done() or ticket not in self._queue:
            return
        if able <= self._reached:
            if not ticket.held_elsewhere:
                ticket.hold_ends, ticket.held_node = None, ""
            return
        hold = await self._first_to_fit(request, breaks) if ticket.moves < MOST_MOVES else None
        await self._expect_start(ticket, request, hold, able - request.left_out, breaks)
        if ticket.result.done() or ticket not in self._queue:
            return
        hold = ticket.start.hold if ticket.start is not None else hold or cheapest_hold(capacity, request)
        if hold is None:
            return
        holds = ticket.may_hold(check.monotonic, check.now)
        if holds or check.monotonic < ticket.holds_again:
            # also during a pause: a later spawn must not take the GPUs that are open to all then
            self._reached |= able
        if holds:
            self._feed.hold(ticket.hold_name, ticket.record_hold(hold, check.monotonic, check.now))

    async def _expect_start(
        self, ticket: Ticket, request: PlacementRequest, hold: NodeHold | None, able: Set[str], breaks: LoopBreaks
    ) -> None:
        """Find the node on which the ticket is expected to start first. ``hold``: where idle actions make it fit first.

        ``able``: the nodes that could take it if their sessions ended; the node held so far may no longer be one.
        A hold moves to another node only if the wait there is expected to be half as long, and at most `MOST_MOVES`
        times.
        """
        departures, now = self._check.departures, self._check.now
        if departures is None:
            return
        names = {
            *candidates(self._check.ledger.capacity, request),
            ticket.held_node,
            hold.node if hold is not None else "",
        }
        names &= able
        if ticket.moves >= MOST_MOVES and ticket.held_node in able:
            names = {ticket.held_node}
        starts = []
        for name in sorted(names):
            await breaks.pause_if_due()
            start = departures.start_on(name, request, now, self._notices, self._check.snapshot.idle_since)
            if start is not None and start.at.likely < now + MOST_EXPECTED_SECONDS:
                starts.append(start)
        ticket.start = min(
            starts,
            key=lambda start: (start.at.likely - now) * (0.5 if start.hold.node == ticket.held_node else 1.0),
            default=None,
        )

    def _yielding_nodes(self, request: PlacementRequest) -> tuple[str, ...] | None:
        """Return the nodes that could take a request if sessions gave up units. Equal requests cost one search."""
        capacity, key = self._check.ledger.capacity, (request.demand, request.left_out, request.node)
        cached = self._yielding.get(key)
        if cached is None or cached[0] is not capacity or cached[1] != capacity.version:
            cached = self._yielding[key] = (capacity, capacity.version, yielding_nodes(capacity, request))
        return cached[2]

    async def _first_to_fit(self, request: PlacementRequest, breaks: LoopBreaks) -> NodeHold | None:
        """Return the GPUs on which notified idle actions will first make a request fit; None if no action helps."""
        ledger = self._check.ledger
        helpful: list[tuple[str, Notice]] = []
        for actions in helpful_actions(ledger, [request], self._check.snapshot.notices):
            helpful += actions
            await breaks.pause_if_due()
        hold = None
        for hold in first_to_fit(ledger, request, helpful):  # noqa: B007
            await breaks.pause_if_due()
        return hold

    def gave(self, allocation: Allocation) -> None:
        """Count the allocation of a ticket."""
        self._feed.put(EntrySource.RESERVED, allocation)
