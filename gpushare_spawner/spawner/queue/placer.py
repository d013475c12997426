"""Decides for the spawns in the queue, on one snapshot: a place now, a longer wait, or a refusal.

Does not reserve anything and knows no clock: see `reservations`.
"""

from __future__ import annotations

from collections.abc import Callable

from gpushare_spawner.model.placement import Placement
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement import Allocation, Ledger, Strategy
from gpushare_spawner.spawner.queue.queue import SpawnQueue, Ticket
from gpushare_spawner.spawner.queue.refusals import impossible, queue_full
from gpushare_spawner.spawner.queue.snapshot import GpuSnapshot
from gpushare_spawner.wording import queue as words
from gpushare_spawner.wording import refusals


class Placer:
    """One pass over the queue, first come first.

    ``counted`` is a share as the ledger counts it, where GPUs are given out in coarser steps than 1 %; ``where`` is the
    GPUs' place, for people.
    """

    def __init__(
        self,
        snapshot: GpuSnapshot,
        ledger: Ledger,
        queue: SpawnQueue,
        strategy: Strategy,
        counted: Callable[[Share], Share],
        where: str,
    ) -> None:
        self._snapshot = snapshot
        self._ledger = ledger
        self._queue = queue
        self._strategy = strategy
        self._counted = counted
        self._where = where
        self._passed: list[tuple[Ticket, frozenset[str]]] = []

    def place(self, ticket: Ticket) -> Placement | None:
        """Return a place for the ticket; None where it waits on, and knows its position, or has been refused."""
        request = ticket.request
        models = request.models(self._snapshot)
        free = models - self._queue.held_back(self._snapshot, before=ticket)
        eligible = _on_node(self._ledger, self._snapshot, request.node)
        placement = eligible.place(self._counted(request.share), free.__contains__, self._strategy)
        if placement is None and self._waits_on(ticket, eligible, models, free):
            self._passed.append((ticket, models))
        return placement

    def gave(self, ticket: Ticket, holding: Allocation) -> None:
        """Count what the ticket was given, and note whom it has overtaken."""
        self._ledger.add(holding)
        models = ticket.request.models(self._snapshot)
        for earlier, wanted in self._passed:
            earlier.overtaken += not wanted.isdisjoint(models)

    def _waits_on(self, ticket: Ticket, ledger: Ledger, models: frozenset[str], free: frozenset[str]) -> bool:
        share = ticket.request.share
        refusal = ledger.refusal(share, models.__contains__)
        why = refusals.capacity(refusal)
        hint = words.EARLIER_FIRST if models and not free else why
        fits = ledger.place(self._counted(share), models.__contains__, self._strategy) is not None
        if not refusal.may_pass and not fits:
            if not self._snapshot.awaited:
                ticket.refuse(impossible(ticket.request, self._where, why))
                return False
            hint = self._snapshot.awaited
        if ticket.ahead is None and self._queue.full:
            ticket.refuse(queue_full(ticket.request, self._queue.length))
            return False
        ticket.says(self._queue.ahead_of(models, self._snapshot, ticket), hint)
        return True


def _on_node(ledger: Ledger, snapshot: GpuSnapshot, node: str) -> Ledger:
    """The ledger of one node alone; all of it where no node is named."""
    if not node:
        return ledger
    return Ledger.of([report for report in snapshot.reports if report.node == node], ledger.allocations.values())
