"""The queue of spawns that wait for free GPU capacity: order and positions. No clock and no network here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from gpushare_spawner.model.placement import Placement
from gpushare_spawner.model.report import GpuReport
from gpushare_spawner.model.share import Share
from gpushare_spawner.model.template import Template, TemplateGpu
from gpushare_spawner.placement import PlacementRequest, Requested
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.queue.snapshot import AskedServer, GpuSnapshot, LayerOffer


@dataclass(frozen=True)
class SpawnRequest:
    """What a spawn in the queue is for: a template with a GPU, and a server. See `placement` for what it asks."""

    tenant: Tenant
    template: Template
    node: str = ""
    """The only node that will do; empty: any."""
    requested: Requested | None = None
    """What its pod requests; None: what the template guarantees."""
    left_out: Callable[[], Mapping[str, str]] = dict
    """Returns the nodes that it avoids now, because a pod of it was not admitted there, and what is missing on each."""

    ineligible: Callable[[], frozenset[str]] = frozenset
    """Returns the nodes that cannot take its pod whatever is free there."""

    @property
    def session(self) -> str:
        """The session's id."""
        return self.tenant.session

    @property
    def gpu(self) -> TemplateGpu:
        """What the template asks for. Raises ValueError for a template without a GPU."""
        if self.template.gpu is None:
            raise ValueError(f"template {self.template.name} asks for no GPU")
        return self.template.gpu

    @property
    def share(self) -> Share:
        """How much of how many GPUs."""
        return self.gpu.share

    def elsewhere(self) -> AskedServer:
        """Return what it asks of other sharing layers."""
        return AskedServer(self.template, self.tenant, self.node, self.ineligible())

    def models(self, snapshot: GpuSnapshot) -> frozenset[str]:
        """The models in a snapshot that would do."""
        return snapshot.models(self.template)

    def placement(self, snapshot: GpuSnapshot) -> PlacementRequest:
        """What it asks of placement, on the GPUs of a snapshot."""
        request = snapshot.request(self.template)
        return replace(
            request,
            cpu=self.requested.cpu if self.requested is not None else request.cpu,
            memory=self.requested.memory if self.requested is not None else request.memory,
            user=self.tenant.user,
            node=self.node,
            left_out=frozenset(self.left_out()),
            ineligible=self.ineligible(),
        )


@dataclass(frozen=True)
class Alternative:
    """Another template that the user of a queued spawn may start."""

    template: Template
    ineligible: Callable[[], frozenset[str]] = frozenset
    """Returns the nodes that cannot take its pod whatever is free there."""


@dataclass(frozen=True)
class Reservation:
    """A share that has been put aside, until its server runs or it is released."""

    request: SpawnRequest
    placement: Placement
    gpus: tuple[GpuReport, ...]
    offer: LayerOffer | None = field(default=None, kw_only=True)
    """Where another sharing layer starts the server; None: on these GPUs, which have an agent."""


@dataclass(frozen=True)
class Startable:
    """A template that would start now."""

    name: str
    title: str
    """Its display name."""


@dataclass(frozen=True)
class WaitStatus:
    """What the user of a queued spawn is told."""

    ahead: int
    """Spawns before it that could use the same GPUs."""
    hint: str = ""
    """What it waits for, as a sentence."""
    minutes: int | None = None
    """How long it will wait, about; None: nothing is known."""
    startable: tuple[Startable, ...] = ()
    """Templates that the user could start now instead."""
    gpus: str = ""
    """The GPUs that would do, for people; empty: none is known."""
    elsewhere: bool = False
    """Only other sharing layers can serve it, of which little is known: where there is no estimate, its user is told
    so."""


@dataclass(eq=False)
class Ticket:
    """One spawn in the queue."""

    request: SpawnRequest
    joined: float
    """Seconds on a monotonic clock."""
    alternatives: tuple[Alternative, ...] = ()
    """The other templates that the user may start."""
    result: asyncio.Future[Reservation] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ahead: int | None = None
    """Spawns before it that could use the same GPUs, as of the last pass; None before the first."""
    hint: str = ""
    """What it waits for."""
    first_since: float | None = None
    """Since when no spawn is before it (monotonic clock, seconds); None while one is."""
    status: WaitStatus | None = None
    """What its user was told last."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `status` changes, and when the wait ends."""
    considered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a pass over the queue has decided about it, on GPUs that are known."""
    offer: LayerOffer | None = None
    """Where another sharing layer starts its server, once it has a place; None: on GPUs with an agent."""
    kept: str = ""
    """The node of the GPUs that were kept for it last; empty: none were."""
    moves: int = 0
    """How often that node became another one."""
    overtaken: int = 0
    """How many later spawns another layer has placed where it could have been."""
    kept_elsewhere: str = ""
    """The node of another layer that is kept for it now; empty: none is."""
    elsewhere: bool = False
    """Only other layers can serve it."""

    @property
    def claimant(self) -> str:
        """The name of its claim in the ledger."""
        return f"{self.request.session}#{id(self)}"

    def keeps(self, node: str) -> None:
        """Note the node of the GPUs that are kept for it."""
        self.moves += self.kept not in ("", node)
        self.kept = node

    def says(self, ahead: int, hint: str) -> None:
        """Note the position and what the spawn waits for. `publish` tells the user."""
        self.ahead, self.hint = ahead, hint

    def publish(
        self, now: float, minutes: int | None = None, startable: tuple[Startable, ...] = (), gpus: str = ""
    ) -> None:
        """Tell the user the position, with an estimate of the wait, what could start now instead, and suitable GPUs.

        ``now``: seconds on a monotonic clock. Nothing happens before the first pass has seen the ticket.
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
        """End the wait with an error; nothing happens where it has ended."""
        if not self.result.done():
            self.result.set_exception(error)
            # the waiter may have left; an exception that nobody fetches must not end up in the log as a bug
            self.result.exception()


class SpawnQueue:
    """Spawns in the order in which they are served: that in which they came, unless quotas say otherwise (`arrange`).

    Policy: first come, first served among those that fit. A spawn that does not fit is passed by later ones that do.
    The first one that could use some node has GPUs kept for it meanwhile: see `placer`.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._tickets: dict[int, Ticket] = {}
        """By identity, in the order in which they are served: two tickets may request the same."""

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        """The tickets as they are now, first come first; joining and leaving does not disturb the iteration."""
        return iter(tuple(self._tickets.values()))

    def __contains__(self, ticket: Ticket) -> bool:
        return id(ticket) in self._tickets

    def is_full(self, competes: Callable[[Ticket], bool]) -> bool:
        """Whether as many spawns wait as may, of those that compete with one.

        One that no pass has seen may get a place at once: it does not count.
        """
        waiting = (ticket for ticket in self if ticket.ahead is not None and not ticket.result.done())
        return sum(map(competes, waiting)) >= self.length

    def kept_elsewhere(self, besides: str = "") -> frozenset[str]:
        """Return the nodes of other layers that are kept for spawns. ``besides``: the claim of one that is left out."""
        return frozenset(
            ticket.kept_elsewhere
            for ticket in self
            if ticket.kept_elsewhere and not ticket.result.done() and ticket.claimant != besides
        )

    def join(self, request: SpawnRequest, now: float) -> Ticket:
        """Queue up, at the end."""
        ticket = Ticket(request, now)
        self._tickets[id(ticket)] = ticket
        return ticket

    def arrange(self, order: Iterable[Ticket]) -> None:
        """Put the tickets in another order. ``order``: tickets of the queue; those that are not in it stay behind."""
        arranged = {id(ticket): ticket for ticket in order if ticket in self}
        self._tickets = arranged | {key: one for key, one in self._tickets.items() if key not in arranged}

    def leave(self, ticket: Ticket) -> None:
        """Leave the queue; nothing happens if it is not in it."""
        self._tickets.pop(id(ticket), None)

    def ahead_of(self, competes: Callable[[Ticket], bool], ticket: Ticket | None = None) -> int:
        """How many earlier tickets compete with this one; of all tickets where none is given."""
        count = 0
        for other in self._tickets.values():
            if other is ticket:
                break
            count += not other.result.done() and competes(other)
        return count
