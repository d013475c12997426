"""Estimates how long queued spawns wait: by idle actions that are due, and by how long recent spawns waited.

Of sessions on GPUs of other sharing layers those count that have a notice of a stop.

Pure: the time is an argument. Where nothing is known there is no estimate. Positions are computed in `queue`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement import PlacementRequest, SupposedLedger, helpful_actions
from gpushare_spawner.spawner.queue.loop_breaks import LoopBreaks
from gpushare_spawner.spawner.queue.placement_check import PlacementCheck
from gpushare_spawner.spawner.queue.queue import SpawnQueue, SpawnRequest, Ticket
from gpushare_spawner.spawner.queue.snapshot import GpuSnapshot

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
    kinds: frozenset[str]
    """Of the GPUs: see `gpu_kinds`."""


class RecentWaits:
    """The waits of spawns that have been placed lately."""

    def __init__(self) -> None:
        self._waits: deque[RecentWait] = deque(maxlen=MOST_WAITS)

    def add(self, wait: RecentWait) -> None:
        """Remember a wait."""
        self._waits.append(wait)

    def expected(self, share: Share, kinds: frozenset[str], ahead: int, waited: float, now: float) -> float | None:
        """Return in how many seconds a spawn of this share is placed; None where too few such spawns waited lately.

        ``ahead``: spawns before it; ``waited``: seconds for which it has been the first, 0 while it is not.
        """
        waits = [
            wait.seconds
            for wait in self._waits
            if wait.share == share and now - wait.ended <= RECENT_SECONDS and not wait.kinds.isdisjoint(kinds)
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

    def placed(self, ticket: Ticket, snapshot: GpuSnapshot, now: float) -> None:
        """Note that a ticket got its place. ``now``: seconds on a monotonic clock."""
        if ticket.first_since is not None:
            kinds = gpu_kinds(ticket.request, snapshot)
            self._recent.add(RecentWait(now, now - ticket.first_since, ticket.request.share, kinds))

    async def minutes(
        self, check: PlacementCheck, queue: SpawnQueue, now: float, wall_time: float, breaks: LoopBreaks
    ) -> Mapping[Ticket, int]:
        """Return the rounded estimate of each spawn for which there is one.

        ``now``: seconds on a monotonic clock; ``wall_time``: seconds since the epoch.
        """
        due = {**await after_announced_stops(check.snapshot, queue, breaks)}
        for ticket, at in (await after_idle_actions(check, queue, breaks)).items():
            due[ticket] = min(at, due.get(ticket, at))
        found: dict[Ticket, int] = {}
        for ticket in queue:
            await breaks.pause_if_due()
            if ticket.ahead is None or ticket.result.done():
                continue
            kinds = gpu_kinds(ticket.request, check.snapshot)
            waited = now - ticket.first_since if ticket.first_since is not None else 0.0
            seconds = self._recent.expected(ticket.request.share, kinds, ticket.ahead, waited, now)
            estimates = [due[ticket] - wall_time] if ticket in due else []
            estimates += [seconds] if seconds is not None else []
            if estimates:
                found[ticket] = rounded_minutes(min(estimates))
        return found


def gpu_kinds(request: SpawnRequest, snapshot: GpuSnapshot) -> frozenset[str]:
    """Return the kinds of GPUs that a spawn waits for: models of GPUs with an agent, and other layers, each with the
    models that the template names."""
    others = snapshot.layers.names(request.template) if snapshot.layers is not None else ()
    models = request.models(snapshot) if snapshot.native(request.template) else frozenset()
    return models | {f"{layer}: {' '.join(request.gpu.models)}" for layer in others}


async def after_announced_stops(snapshot: GpuSnapshot, queue: SpawnQueue, breaks: LoopBreaks) -> Mapping[Ticket, float]:
    """Return when other layers can place queued spawns if all announced stops happen: seconds since the epoch.

    Spawns that this does not help, or of which it is not known, are left out.
    """
    layers = snapshot.layers
    expected: dict[Ticket, float] = {}
    if layers is None:
        return expected
    ahead: dict[LayerName, int] = {}
    for ticket in queue:
        names = layers.names(ticket.request.template)
        if ticket.result.done() or not names:
            continue
        await breaks.pause_if_due()
        request, units = ticket.request, ticket.request.share.total_units
        # as many servers of its size as those before it and itself need
        servers = 1 + -(-max(ahead.get(name, 0) for name in names) // units)
        at = layers.starts_by(request.elsewhere(), servers)
        if at is not None:
            expected[ticket] = at
        for name in names:
            ahead[name] = ahead.get(name, 0) + units
    return expected


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
