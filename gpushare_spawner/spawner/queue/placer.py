"""Decides for the spawns in the queue, on one snapshot: a place now, a longer wait, or a refusal.

Does not reserve anything and knows no clock: see `reservations`.
"""

from __future__ import annotations

from gpushare_spawner.model.placement import Placement
from gpushare_spawner.model.report import Notice
from gpushare_spawner.placement import (
    Allocation,
    Claim,
    LedgerFeed,
    PlacementRequest,
    Source,
    able_nodes,
    cheapest_claim,
    first_to_fit,
    helpful_actions,
    looking_for_claim,
)
from gpushare_spawner.spawner.queue.kept_nodes import KeptNodes
from gpushare_spawner.spawner.queue.loop_breaks import LoopBreaks
from gpushare_spawner.spawner.queue.other_layers import OtherLayers, Outcome
from gpushare_spawner.spawner.queue.placement_check import PlacementCheck
from gpushare_spawner.spawner.queue.positions import Positions
from gpushare_spawner.spawner.queue.queue import SpawnQueue, Ticket
from gpushare_spawner.spawner.queue.queue_errors import impossible, queue_full
from gpushare_spawner.wording.spawn.refusals import not_admitted

NOT_BY_THE_HUB = Placement("", ())
"""The place of a server that a layer's scheduler places."""

MOST_MOVES = 5
"""How often announced idle actions may move what is kept for a spawn to another node. Ours: users come back before
such an action, others fill the node that was kept before, and so the spawn could wait for ever."""


class Placer:
    """One pass over the queue, first come first.

    ``feed``: keeps the ledger of ``check``. ``where`` is the GPUs' place, for people.
    """

    def __init__(self, check: PlacementCheck, feed: LedgerFeed, queue: SpawnQueue, where: str) -> None:
        self._check = check
        self._feed = feed
        self._queue = queue
        self._where = where
        self._positions = Positions(check, queue)
        self._kept = KeptNodes()
        self._reached: set[str] = set()
        """Nodes that the spawns with a claim could use if everything were free there."""
        # each spawn meets the claims of those before it, and neither its own nor those of later ones
        for name in list(feed.ledger.claims):
            feed.claim(name, None)

    def place(self, ticket: Ticket) -> Placement | None:
        """Return a place for the ticket; None where it waits on, and knows its position, or has been refused.

        A place of another sharing layer has no node and no GPUs: the ticket has its offer.
        """
        request, snapshot = ticket.request, self._check.snapshot
        layers = snapshot.other_layers(request.template)
        if layers is not None:
            return self._place_by_layers(ticket, layers)
        asked = request.placement(snapshot)
        verdict = self._check.verdict(asked)
        # taints come and go: a spawn that was told to wait is not refused for one
        waits = verdict.outcome is Outcome.WAIT or (verdict.ineligible and ticket.ahead is not None)
        if waits:
            if ticket.ahead is None and self._positions.is_full(request.template):
                ticket.refuse(queue_full(request, self._queue.length))
            else:
                why = f"{not_admitted(request.left_out())}." if verdict.left_out else verdict.why
                ticket.says(self._positions.ahead_of(asked, ticket), why)
        elif verdict.outcome is Outcome.NEVER:
            ticket.refuse(impossible(request, self._where, verdict.why))
        return verdict.placement

    def _place_by_layers(self, ticket: Ticket, layers: OtherLayers) -> Placement | None:
        request = ticket.request
        found = layers.verdict(request.elsewhere(), self._kept.seen_by(ticket))
        if found.outcome is Outcome.NOW:
            ticket.offer = found.offer
            self._kept.placed(found.able)
            return NOT_BY_THE_HUB
        native = None
        if layers.native(request.template):
            native = self._check.verdict(request.placement(self._check.snapshot))
            if native.placement is not None:
                return native.placement
        waits = next((one for one in (found, native) if one is not None and one.outcome is Outcome.WAIT), None)
        if waits is None and ticket.ahead is None and not self._check.nodes_are_added:
            ticket.refuse(impossible(request, self._where, found.why))
        elif ticket.ahead is None and self._positions.is_full(request.template):
            ticket.refuse(queue_full(request, self._queue.length))
        else:
            ahead = self._positions.ahead_of_template(request.template, ticket)
            ticket.says(ahead, (waits or found).why)
            ticket.elsewhere = not layers.native(request.template)
            # where GPUs with an agent can serve it, some of these are kept for it: see `claim`
            only_here = native is None or native.outcome is Outcome.NEVER
            self._kept.waits(ticket, found.able if only_here else frozenset(), layers.least_used)
        return None

    async def claim(self, ticket: Ticket, breaks: LoopBreaks) -> None:
        """Keep GPUs for a ticket that waits, where it is the first in the queue that could use their node.

        The GPUs are those that will fit it first by announced idle actions; where none of these helps, those of which
        least has to become free. After `MOST_MOVES` the latter: of those less has to become free from pass to pass.
        """
        check = self._check
        if not check.snapshot.native(ticket.request.template):
            return
        request = check.counted_request(ticket.request.placement(check.snapshot))
        capacity = check.ledger.capacity
        await breaks.through(looking_for_claim(capacity, request))
        able = able_nodes(capacity, request)
        if ticket.result.done() or ticket not in self._queue or able <= self._reached:
            return
        claim = await self._first_to_fit(request, breaks) if ticket.moves < MOST_MOVES else None
        if ticket.result.done() or ticket not in self._queue:
            return
        claim = claim or cheapest_claim(capacity, request)
        if claim is not None:
            self._reached |= able
            ticket.keeps(claim.node)
            self._feed.claim(ticket.claimant, claim)

    async def _first_to_fit(self, request: PlacementRequest, breaks: LoopBreaks) -> Claim | None:
        """Return the GPUs that will fit a request first by announced idle actions; None: these do not help it."""
        ledger = self._check.ledger
        helpful: list[tuple[str, Notice]] = []
        for actions in helpful_actions(ledger, [request], self._check.snapshot.announced):
            helpful += actions
            await breaks.pause_if_due()
        found = None
        for claim in first_to_fit(ledger, request, helpful):
            found = claim
            await breaks.pause_if_due()
        return found

    def gave(self, allocation: Allocation) -> None:
        """Count what a ticket was given."""
        self._feed.put(Source.RESERVED, allocation)
