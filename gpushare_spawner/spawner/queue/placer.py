"""Decides for the spawns in the queue, on one snapshot: a place now, a longer wait, or a refusal.

Does not reserve anything and knows no clock: see `reservations`.
"""

from __future__ import annotations

from gpushare_spawner.model.placement import Placement
from gpushare_spawner.placement import Allocation, LedgerFeed, Source
from gpushare_spawner.spawner.queue.placement_check import Outcome, PlacementCheck
from gpushare_spawner.spawner.queue.queue import SpawnQueue, Ticket
from gpushare_spawner.spawner.queue.queue_errors import impossible, queue_full
from gpushare_spawner.wording.refusals import not_admitted


class Placer:
    """One pass over the queue, first come first.

    ``feed``: keeps the ledger of ``check``. ``where`` is the GPUs' place, for people.
    """

    def __init__(self, check: PlacementCheck, feed: LedgerFeed, queue: SpawnQueue, where: str) -> None:
        self._check = check
        self._feed = feed
        self._queue = queue
        self._where = where
        self._passed: list[tuple[Ticket, frozenset[str]]] = []

    def place(self, ticket: Ticket) -> Placement | None:
        """Return a place for the ticket; None where it waits on, and knows its position, or has been refused."""
        request, snapshot = ticket.request, self._check.snapshot
        models = request.models(snapshot)
        held_back = self._queue.held_back(snapshot, before=ticket)
        verdict = self._check.verdict(request.placement(snapshot), held_back)
        # taints come and go: a spawn that was told to wait is not refused for one
        waits = verdict.outcome is Outcome.WAIT or (verdict.ineligible and ticket.ahead is not None)
        if waits:
            if ticket.ahead is None and self._queue.full:
                ticket.refuse(queue_full(request, self._queue.length))
            else:
                why = f"{not_admitted(request.left_out())}." if verdict.left_out else verdict.why
                ticket.says(self._queue.ahead_of(models, snapshot, ticket), why)
                self._passed.append((ticket, models))
        elif verdict.outcome is Outcome.NEVER:
            ticket.refuse(impossible(request, self._where, verdict.why))
        return verdict.placement

    def gave(self, ticket: Ticket, allocation: Allocation) -> None:
        """Count what the ticket was given, and note whom it has overtaken."""
        self._feed.put(Source.RESERVED, allocation)
        models = ticket.request.models(self._check.snapshot)
        for earlier, wanted in self._passed:
            earlier.overtaken += not wanted.isdisjoint(models)
