"""Estimates how long queued spawns wait: by idle actions that are due, and by how long recent spawns waited.

Pure: the time is an argument. Where nothing is known there is no estimate. Positions are computed in `queue`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement import PlacementRequest, SupposedLedger, helpful_actions
from gpushare_spawner.spawner.queue.loop_breaks import LoopBreaks
from gpushare_spawner.spawner.queue.placement_check import PlacementCheck
from gpushare_spawner.spawner.queue.queue import SpawnQueue, Ticket

RECENT_SECONDS = 3600.0
"""How old a recent wait may be: after that, other users work on the GPUs."""
FEWEST_WAITS = 3
"""Waits that an estimate needs at least: the median of fewer is one user's chance."""
MOST_WAITS = 200
"""Waits that are remembered at most."""
_STEPS = ((5, 1), (30, 5), (120, 15))
"""Up to so many minutes an estimate is rounded up to a multiple of so many."""


@dataclass(frozen=True)
class RecentWait:
    """How long one spawn that was placed had been the first in the queue for its GPUs."""

    ended: float
    """Seconds on a monotonic clock."""
    seconds: float
    share: Share
    models: frozenset[str]


class RecentWaits:
    """The waits of spawns that have been placed lately."""

    def __init__(self) -> None:
        self._waits: deque[RecentWait] = deque(maxlen=MOST_WAITS)

    def add(self, wait: RecentWait) -> None:
        """Remember a wait."""
        self._waits.append(wait)

    def expected(self, share: Share, models: frozenset[str], ahead: int, waited: float, now: float) -> float | None:
        """Return in how many seconds a spawn of this share is placed; None where too few such spawns waited lately.

        ``ahead``: spawns before it; ``waited``: seconds for which it has been the first, 0 while it is not.
        """
        waits = [
            wait.seconds
            for wait in self._waits
            if wait.share == share and now - wait.ended <= RECENT_SECONDS and not wait.models.isdisjoint(models)
        ]
        if len(waits) < FEWEST_WAITS:
            return None
        if ahead:
            return (ahead + 1) * median(waits)
        # of the recent spawns only those are like this one that waited at least as long
        longer = [seconds - waited for seconds in waits if seconds >= waited]
        return median(longer) if len(longer) >= FEWEST_WAITS else None


class WaitEstimates:
    """Estimates for all spawns in one queue."""

    def __init__(self) -> None:
        self._recent = RecentWaits()

    def placed(self, ticket: Ticket, models: frozenset[str], now: float) -> None:
        """Note that a ticket got its place. ``now``: seconds on a monotonic clock."""
        if ticket.first_since is not None:
            self._recent.add(RecentWait(now, now - ticket.first_since, ticket.request.share, models))

    async def minutes(
        self, check: PlacementCheck, queue: SpawnQueue, now: float, wall_time: float, breaks: LoopBreaks
    ) -> Mapping[Ticket, int]:
        """Return the rounded estimate of each spawn for which there is one.

        ``now``: seconds on a monotonic clock; ``wall_time``: seconds since the epoch.
        """
        due = await after_idle_actions(check, queue, breaks)
        found: dict[Ticket, int] = {}
        for ticket in queue:
            await breaks.pause_if_due()
            if ticket.ahead is None or ticket.result.done():
                continue
            models = ticket.request.models(check.snapshot)
            waited = now - ticket.first_since if ticket.first_since is not None else 0.0
            seconds = self._recent.expected(ticket.request.share, models, ticket.ahead, waited, now)
            estimates = [due[ticket] - wall_time] if ticket in due else []
            estimates += [seconds] if seconds is not None else []
            if estimates:
                found[ticket] = rounded_minutes(min(estimates))
        return found


def rounded_minutes(seconds: float) -> int:
    """Return minutes, at least 1, rounded up to a number that suits an estimate: 6 min is 10, 31 min is 45."""
    minutes = max(1, math.ceil(seconds / 60))
    step = next((step for most, step in _STEPS if minutes <= most), 60)
    return math.ceil(minutes / step) * step


async def after_idle_actions(check: PlacementCheck, queue: SpawnQueue, breaks: LoopBreaks) -> Mapping[Ticket, float]:
    """Return when queued spawns can be placed if all announced idle actions happen: seconds since the epoch.

    Spawns that these actions do not help are left out. Nothing is changed: what would be is computed on copies of the
    nodes that the actions concern.
    """
    supposed = SupposedLedger(check.ledger)
    native = check.snapshot.native
    waiting = {
        ticket: _counted(check, ticket)
        for ticket in queue
        if not ticket.result.done() and native(ticket.request.template)
    }
    expected: dict[Ticket, float] = {}
    helpful: list[tuple[str, Notice]] = []
    for actions in helpful_actions(check.ledger, waiting.values(), check.snapshot.announced):
        helpful += actions
        await breaks.pause_if_due()
    for session, announced in sorted(helpful, key=lambda known: known[1].at):
        if len(expected) == len(waiting):
            break
        await breaks.pause_if_due()
        node = supposed.happens(session, announced)
        if node is None:
            continue
        for ticket, request in waiting.items():
            if ticket not in expected and supposed.place(ticket.claimant, request, node) is not None:
                expected[ticket] = announced.at
    return expected


def _counted(check: PlacementCheck, ticket: Ticket) -> PlacementRequest:
    return check.counted_request(ticket.request.placement(check.snapshot))
