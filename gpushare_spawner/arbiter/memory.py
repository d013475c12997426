"""Model of the GPU's memory: managed pages on the GPU, clients that fit together, and the order of page-outs.

The driver does not report residency, so the model assumes it. The working set of a client with a lease is on the GPU,
up to what fits. Clients are assumed to obey page-out orders until their reports correct this. A report counts only as
the answer to an order, and only up to the order's bytes.

The order of page-outs keeps page-ins of returning users short. Users do not notice a page-in of a few milliseconds,
so it is better if many sessions lack a little than if a few lack everything. If a session's return takes noticeable
time anyway, the rest of its pages does not delay it much more. schedule.py chooses the clients that run on the GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gpushare_spawner.arbiter.session import ArbiterSettings, Client, Presence


@dataclass(frozen=True)
class Answered:
    """A client's answer to an order to move memory."""

    amount: int
    """Moved bytes, at most the bytes of the order."""
    seconds: float
    """Seconds that the move took, at most the time from the order to the answer."""


@dataclass
class _Order:
    amount: int
    """Bytes."""
    at: float
    """Instant of the order."""
    superseded: bool = False
    """Whether the client got a lease before it answered: the grant has already counted these bytes as missing."""
    early: bool = False
    """Whether it is a page-in without a lease: nothing else brings in the bytes that are not moved."""

    def answered(self, amount: int, seconds: float, now: float) -> Answered:
        return Answered(max(0, min(amount, self.amount)), max(0.0, min(seconds, now - self.at)))


@dataclass
class _Pages:
    resident: int = 0
    in_host_memory: int = 0
    """Bytes paged out on an order and not fetched since.

    Other memory that is not on the GPU was probably never there: a fetch would only populate it.
    """
    outward: deque[_Order] = field(default_factory=deque)
    """Page-outs in progress, oldest first."""
    inward: _Order | None = None
    """Unanswered prefetch of the current lease, or page-in without a lease."""


class Residency:
    """Bytes of managed memory on the GPU, by client."""

    def __init__(self) -> None:
        self._pages: dict[Client, _Pages] = {}

    def add(self, client: Client) -> None:
        """Add a client without memory on the GPU."""
        self._pages[client] = _Pages()

    def remove(self, client: Client) -> None:
        """Remove a client's memory."""
        del self._pages[client]

    def of(self, client: Client) -> int:
        """Return the client's managed bytes on the GPU."""
        return self._pages[client].resident

    def in_host_memory(self, client: Client) -> int:
        """Return the client's bytes that were paged out and not fetched since, without page-outs in progress."""
        pages = self._pages[client]
        return max(0, pages.in_host_memory - sum(order.amount for order in pages.outward if not order.superseded))

    def missing(self, client: Client, capacity: int) -> int:
        """Return the missing bytes of the part of the client's working set that fits into `capacity` bytes."""
        return max(0, min(client.working_set, capacity) - self._pages[client].resident)

    def prefetch(self, client: Client, capacity: int) -> int:
        """Return the missing bytes that were once paged out: memory that was never used is not fetched."""
        return min(self.missing(client, capacity), self._pages[client].in_host_memory)

    def free(self, capacity: int) -> int:
        """Return the bytes of `capacity` without managed pages; negative: the model exceeds the capacity."""
        return capacity - sum(pages.resident for pages in self._pages.values())

    def resized(self, client: Client, capacity: int, used_now: int) -> None:
        """Update a client's changed memory. `used_now`: a holder's new bytes, which it will use on the GPU."""
        pages = self._pages[client]
        pages.resident = min(client.working_set, capacity, pages.resident + used_now)
        pages.in_host_memory = max(0, min(pages.in_host_memory, client.allocated - pages.resident))

    def presence_changed(self, client: Client) -> None:
        """Update the pages of a suspendable session's client: all or none are on the GPU."""
        pages, presence = self._pages[client], client.session.presence
        pages.resident = client.working_set if presence in (Presence.ON_GPU, Presence.RESUMING) else 0
        pages.in_host_memory = client.working_set if presence is Presence.SUSPENDED else 0
        pages.outward.clear()
        pages.inward = None

    def granted(self, client: Client, capacity: int, now: float) -> None:
        """Record a grant: the client's working set is paged in."""
        pages = self._pages[client]
        fetched = self.prefetch(client, capacity)
        pages.in_host_memory -= fetched
        early = pages.inward  # the prefetch continues it, and both have one answer
        if early is not None and early.early:
            pages.inward = _Order(fetched + early.amount, early.at)
        else:
            pages.inward = _Order(fetched, now) if fetched else None
        pages.resident = min(client.working_set, capacity)
        for order in pages.outward:
            order.superseded = True

    def order_in(self, client: Client, amount: int, now: float) -> None:
        """Order a client without a lease to page in `amount` bytes that were once paged out."""
        pages = self._pages[client]
        pages.in_host_memory -= amount
        pages.resident += amount
        before = pages.inward
        if before is not None and before.early:
            before.amount += amount
        else:
            pages.inward = _Order(amount, now, early=True)
        for order in pages.outward:
            order.superseded = True

    def coming_in(self, client: Client) -> int:
        """Return the bytes of the unanswered page-in without a lease."""
        order = self._pages[client].inward
        return order.amount if order is not None and order.early else 0

    def filled(self, client: Client, capacity: int) -> None:
        """Record that a holder's own use pages in the rest of its working set."""
        self._pages[client].resident = min(client.working_set, capacity)

    def order_out(self, client: Client, amount: int, now: float) -> int:
        """Order a client to page out `amount`, or all that it has. Return the order's bytes."""
        if client.session.suspendable:
            return amount  # `Suspensions` orders it
        pages = self._pages[client]
        amount = min(amount, self._can_leave(client))
        if amount > 0:
            pages.resident -= amount
            pages.in_host_memory += amount
            pages.outward.append(_Order(amount, now))
        return amount

    def paged_in(self, client: Client, amount: int, seconds: float, now: float) -> Answered | None:
        """Return the answer to the prefetch order from a client's report; None if there was no order."""
        pages = self._pages[client]
        order, pages.inward = pages.inward, None
        if order is None:
            return None
        answer = order.answered(amount, seconds, now)
        if order.early:
            self._stayed_on_host(pages, order.amount - answer.amount)
        return answer

    def _stayed_on_host(self, pages: _Pages, amount: int) -> None:
        """Correct a page-in that was cut short by `amount` bytes: they cannot be paged out either."""
        for order in reversed(pages.outward):
            never_came = min(amount, 0 if order.superseded else order.amount)
            order.amount -= never_came
            amount -= never_came
        pages.resident = max(0, pages.resident - amount)
        pages.in_host_memory += amount

    def paged_out(self, client: Client, amount: int, seconds: float, now: float) -> Answered | None:
        """Return the answer to the oldest page-out order from a client's report; None: there was no order."""
        pages = self._pages[client]
        if not pages.outward:
            return None
        order = pages.outward.popleft()
        answer = order.answered(amount, seconds, now)
        stayed = order.amount - answer.amount
        if stayed and not order.superseded:
            pages.in_host_memory = max(0, pages.in_host_memory - stayed)
            pages.resident = min(client.working_set, pages.resident + stayed)
        return answer

    def free_memory(
        self, need: int, capacity: int, order: Iterable[tuple[Client, int]], now: float
    ) -> list[tuple[Client, int]]:
        """Order page-outs so that `need` bytes of `capacity` are free. Return each client with its bytes.

        `order`: clients with the maximum bytes that each pages out at this point; a repeated client pages out more. The
        orders count as sent. A suspendable session is chosen once, with all its memory.
        """
        amounts: dict[Client, int] = {}
        lacking = need - self.free(capacity)
        for client, most in order:
            if lacking <= 0:
                break
            had = amounts.get(client, 0)
            if client.session.suspendable:
                if not had:
                    amounts[client] = client.session.present
                    lacking -= client.session.present
                continue
            amount = min(lacking, most, self._can_leave(client) - had)
            if amount > 0:
                amounts[client] = had + amount
                lacking -= amount
        return [(client, self.order_out(client, amount, now)) for client, amount in amounts.items()]

    def _can_leave(self, client: Client) -> int:
        """Return the client's bytes on the GPU that can leave it. The driver's figures limit the model's estimate."""
        pages = self._pages[client]
        if client.touched is not None and client.proven is None:
            pages.resident = min(pages.resident, client.shown)
        return pages.resident


def together(clients: Iterable[Client]) -> int:
    """Return the bytes that clients need on the GPU together. A suspendable session counts once."""
    return sum({client.unit: client.footprint for client in clients}.values())


class VramBudget:
    """Memory of the GPU for which clients compete."""

    def __init__(self, vram_bytes: int, always_resident: int, exclusive: bool) -> None:
        """Create the budget.

        `always_resident`: bytes that cannot leave the GPU. `exclusive`: allow one session at a time.
        """
        self.for_managed = max(0, vram_bytes - always_resident)
        """Bytes left for working sets that can move."""
        self._overfull = always_resident > vram_bytes
        self._exclusive = exclusive

    def fits(self, group: Iterable[Client]) -> bool:
        """Return whether the group may hold leases together. A single client always may."""
        clients = list(group)
        if len({client.unit for client in clients}) <= 1:
            return True
        if self._exclusive and any(client.session is not clients[0].session for client in clients):
            return False
        return not self._overfull and together(clients) <= self.for_managed

    def fill(self, order: Iterable[Client], group: Iterable[Client] = ()) -> list[Client]:
        """Return the group, followed by the clients of `order` that fit next to it."""
        chosen = dict.fromkeys(group)
        units = {client.unit: client.footprint for client in chosen}
        taken = sum(units.values())
        session = next((client.session for client in chosen), None)
        free = -1 if self._overfull else self.for_managed - taken
        for client in order:
            unit = client.unit
            footprint = 0 if unit in units else client.footprint
            if chosen:
                if footprint > free or client in chosen or (self._exclusive and client.session is not session):
                    continue
            else:
                session = client.session
            chosen[client] = None
            units[unit] = footprint
            free -= footprint
        return list(chosen)

    def blockers(self, waiter: Client, group: list[Client]) -> list[Client]:
        """Return the group's blockers: clients without which the waiter would fit, or next to which it never fits.

        Returns the whole group if no single client blocks the waiter, and no clients if the waiter fits.
        """
        if self._exclusive:
            strangers = [client for client in group if client.session is not waiter.session]
            if strangers:
                return strangers
        if self._overfull:
            return list(group)
        excess = together([*group, waiter]) - self.for_managed
        if excess <= 0 or not group:
            return []
        alone = self.for_managed - waiter.footprint
        return [client for client in group if client.footprint >= excess or client.footprint > alone] or list(group)


def page_out_order(
    clients: Iterable[Client],
    residency: Residency,
    capacity: int,
    page_in_bandwidth: float,
    now: float,
    settings: ArbiterSettings,
) -> Iterator[tuple[Client, int]]:
    """Yield clients without a lease, with the maximum bytes that each pages out; a client can occur more than once.

    First come idle clients that already have a noticeable page-in, with all their memory. Then come idle clients up to
    the unnoticed amount, then all clients. Within each step the least recently used client comes first; clients with an
    expected launch, waiting and parked clients come last. `capacity`: bytes for managed pages. `page_in_bandwidth`:
    bytes per second. The client of a suspendable session represents the session.
    """
    order = sorted(clients, key=lambda client: (client.parked, client.waiting, client.anticipated, client.last_used))
    idle = [
        client
        for client in order
        if not client.wants_memory
        and not client.anticipated
        and now - client.last_used >= settings.long_pause
        and client.last_used >= 0
    ]
    unnoticed = int(settings.unnoticed_page_in * page_in_bandwidth)
    lacking = {client: residency.prefetch(client, capacity) for client in idle}
    for client in idle:
        if lacking[client] > unnoticed:
            yield client, capacity
    for client in idle:
        if client.session.suspendable:
            if client.session.present <= unnoticed:
                yield client, client.session.present
        elif lacking[client] < unnoticed:
            yield client, unnoticed - lacking[client]
    for client in order:
        yield client, capacity
