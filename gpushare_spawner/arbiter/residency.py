"""A model of whose pages are on the GPU: what an incomer lacks, and who must make room for it.

It is a model: the driver does not tell. A client that got a lease is taken to have its working set on the GPU, as far
as it fits; orders to page out are taken to be obeyed, and corrected by what the clients report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpushare_spawner.arbiter.session import Client


@dataclass
class _Pages:
    resident: int = 0
    ordered: deque[int] = field(default_factory=deque)
    """Bytes of the page-outs that are under way, oldest first."""


class Residency:
    """Bytes of managed memory on the GPU, by client."""

    def __init__(self) -> None:
        self._pages: dict[Client, _Pages] = {}

    def add(self, client: Client) -> None:
        """A client with nothing on the GPU."""
        self._pages[client] = _Pages()

    def remove(self, client: Client) -> None:
        """The client's memory is gone."""
        del self._pages[client]

    def of(self, client: Client) -> int:
        """Managed bytes of the client that are on the GPU."""
        return self._pages[client].resident

    def missing(self, client: Client, room: int) -> int:
        """Bytes that the client lacks of its working set, as far as that fits into `room` bytes."""
        return max(0, min(client.managed, room) - self._pages[client].resident)

    def free(self, room: int) -> int:
        """Bytes of `room` that nobody's managed pages occupy; negative: more is thought to be there than can be."""
        return room - sum(pages.resident for pages in self._pages.values())

    def resized(self, client: Client, room: int, used_now: int) -> None:
        """The client's allocations changed. `used_now`: new bytes of a holder, which is about to use them on the
        GPU."""
        pages = self._pages[client]
        pages.resident = min(client.managed, room, pages.resident + used_now)

    def granted(self, client: Client, room: int) -> None:
        """The client got a lease: its working set comes in."""
        pages = self._pages[client]
        pages.resident = min(client.managed, room)
        pages.ordered.clear()

    def order_out(self, client: Client, amount: int) -> int:
        """The client is told to page out so much, or what it has. Returns the bytes of the order."""
        pages = self._pages[client]
        amount = min(amount, pages.resident)
        if amount > 0:
            pages.resident -= amount
            pages.ordered.append(amount)
        return amount

    def paged_out(self, client: Client, amount: int) -> None:
        """The client has paged out `amount` bytes, on the oldest order or by itself."""
        pages = self._pages[client]
        ordered = pages.ordered.popleft() if pages.ordered else 0
        pages.resident = max(0, min(client.managed, pages.resident + ordered - amount))

    def make_room(self, need: int, room: int, candidates: Iterable[Client]) -> list[tuple[Client, int]]:
        """Who pages out how much, in this order, so that `need` bytes of `room` are free. The orders are taken as
        given."""
        orders = []
        lacking = need - self.free(room)
        for client in candidates:
            if lacking <= 0:
                break
            amount = self.order_out(client, lacking)
            if amount > 0:
                orders.append((client, amount))
                lacking -= amount
        return orders
