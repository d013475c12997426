"""Expected departures of sessions, and the expected start of a request that waits for them.

The lengths of ended sessions say how long the others of a template last: `SessionLengths`. A notice says when a session
gives up units; before a notice, an idle session can stay idle until its idle actions. `Departures` samples what these
allow on one node: 32 futures, the same in each pass. Pure: time is an argument, in seconds since the epoch. The hold
that follows: ledger.py and spawner/queue.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import NamedTuple
from zlib import crc32

from gpushare_spawner.model.idle_policy import PRESSURE_NOTICE
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import UNITS_PER_GPU, Share, Tier
from gpushare_spawner.model.template import Idle
from gpushare_spawner.placement.capacity import FreeCapacity
from gpushare_spawner.placement.ledger import LEAST_LACKING, Ledger, NodeHold
from gpushare_spawner.placement.node import NOTHING, Allocation, GpuCapacity, NodeCapacity, Requested
from gpushare_spawner.placement.request import Demand, PlacementRequest

SAMPLES = 32
_LEVELS = tuple((number + 0.5) / SAMPLES for number in range(SAMPLES))
FEWEST_LENGTHS = 5
"""Ended sessions that are needed: of a template, for the length of a new one, and as old as a session, for its end."""
MOST_LENGTHS = 200
"""Ended sessions of a template that count, the newest ones."""
MOST_TEMPLATES = 500
"""Templates with lengths, those with the newest ended sessions. Our value: at most about 1 MiB in the hub's file."""
SHORTEST_SECONDS = 60.0
"""Sessions that end earlier do not count: most of them are servers that failed to start."""
MOST_UNSEEN_SECONDS = 600.0
"""A session that ended while the ledger was not followed for longer does not count: its length is unknown."""
LATE_SECONDS = 120.0
"""An idle action without a notice is not expected so long after the notice was due: quiet hours or short work delay it.
Our value: a report can be as old."""
MOST_CANDIDATES = 20
"""Nodes that are compared: the nodes that lack the least. Each costs 0.2 to 1 ms."""


_ALL = ""
"""The key of the lengths of all templates."""


class TimeRange(NamedTuple):
    """The times between which something happens in four of five cases, and the time at which half of them have."""

    earliest: float
    likely: float
    latest: float

    @classmethod
    def of(cls, times: Iterable[float]) -> TimeRange:
        """Return the spread of at least one time."""
        ordered = sorted(times)
        return cls(*(ordered[int(level * len(ordered))] for level in (0.1, 0.5, 0.9)))


class SessionLengths:
    """The lengths in seconds of recently ended sessions, by template.

    For a template of which too few sessions have ended, those of all templates count.
    """

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {}
        self._ordered: dict[str, list[float]] = {}

    @property
    def recent(self) -> dict[str, list[float]]:
        """The lengths by template, oldest first, in whole seconds."""
        return {name: [round(seconds) for seconds in lengths] for name, lengths in self._recent.items() if name}

    def ended(self, template: str, seconds: float) -> None:
        """Record the length of an ended session."""
        if not template or seconds < SHORTEST_SECONDS:
            return
        for name in (template, _ALL):
            recent, ordered = self._recent.pop(name, deque()), self._ordered.setdefault(name, [])
            self._recent[name] = recent  # the newest last
            recent.append(seconds)
            insort(ordered, seconds)
            if len(recent) > MOST_LENGTHS:
                ordered.remove(recent.popleft())
        if len(self._recent) > MOST_TEMPLATES + 1:
            oldest = next(iter(self._recent))
            del self._recent[oldest], self._ordered[oldest]

    def _known(self, template: str) -> Sequence[float]:
        """Return lengths in ascending order; none if too few sessions have ended."""
        ordered = self._ordered.get(template, ())
        if len(ordered) < FEWEST_LENGTHS:
            ordered = self._ordered.get(_ALL, ())
        return ordered if len(ordered) >= FEWEST_LENGTHS else ()

    def expected(self, template: str) -> float | None:
        """Return the length that half of the template's sessions exceed; None: too few have ended."""
        ordered = self._known(template)
        return ordered[len(ordered) // 2] if ordered else None

    def remaining(self, template: str, age: float) -> Sequence[float]:
        """Return equally likely seconds for which a session of this age lasts, ascending.

        If few ended sessions lasted as long, it lasts as long again in half of the cases (Gott, Nature 363, 1993).
        Infinite: nothing is known of any sessions.
        """
        ordered = self._known(template)
        if not ordered:
            return [math.inf] * SAMPLES
        first = bisect_right(ordered, age)
        longer = len(ordered) - first
        if longer >= FEWEST_LENGTHS:
            return [ordered[first + int(level * longer)] - age for level in _LEVELS]
        return [age * level / (1 - level) for level in _LEVELS]


@dataclass(frozen=True)
class ExpectedStart:
    """The GPUs that are held for a waiting request on one node, and when it is expected to start there."""

    hold: NodeHold
    at: TimeRange


class IdleSince(NamedTuple):
    """Since when a session is idle, in seconds since the epoch."""

    gpu: float
    """Since the last GPU work."""
    server: float | None
    """Since the last activity of any kind; None: it is active."""


class _Departure(NamedTuple):
    """Units, CPU, memory and pods that a session gives up, with the time in each sample."""

    times: Sequence[float]
    units: Mapping[str, int]
    """By the UUIDs of its GPUs."""
    requested: Requested


class Departures:
    """The expected departures of a ledger's sessions.

    ``requested`` returns what a template's servers request; ``is_reserved``: whether a session is only a reservation.
    ``idle`` returns a template's idle actions; None: it has none, or they are unknown.
    """

    def __init__(
        self,
        ledger: Ledger,
        requested: Callable[[str], Requested] = lambda template: NOTHING,
        is_reserved: Callable[[str], bool] = lambda session: False,
        idle: Callable[[str], Idle | None] = lambda template: None,
    ) -> None:
        self.lengths = SessionLengths()
        self._ledger = ledger
        self._requested = requested
        self._is_reserved = is_reserved
        self._idle = idle
        self._opened: dict[str, tuple[str, float]] = {}
        self._changed: set[str] = set()
        self._followed_at = -math.inf
        ledger.observers.append(self._observe)

    def _observe(self, session: str, allocation: Allocation | None) -> None:
        if allocation is None:
            self._changed.add(session)
        elif allocation.template and not self._is_reserved(session):
            self._opened[session] = (allocation.template, allocation.opened_at)

    def follow(self, now: float) -> None:
        """Record the lengths of sessions that have ended since the last call."""
        seen_recently = now - self._followed_at <= MOST_UNSEEN_SECONDS
        self._followed_at = now
        for session in self._changed:
            if session not in self._ledger.allocations and session in self._opened:
                template, opened_at = self._opened.pop(session)
                if seen_recently and opened_at > 0:
                    self.lengths.ended(template, now - opened_at)
        self._changed.clear()

    def start_on(
        self,
        name: str,
        request: PlacementRequest,
        now: float,
        notices: Mapping[str, Notice],
        idle_since: Callable[[str], IdleSince | None] = lambda session: None,
    ) -> ExpectedStart | None:
        """Return the expected start of a request on a node; None: it cannot start there.

        ``notices``: of idle actions, by session. ``idle_since`` returns since when a session is idle; None: it works.
        """
        node = self._ledger.capacity.nodes.get(name)
        if node is None:
            return None
        demand = self._ledger.capacity.resolved(request.demand)
        sessions = dict.fromkeys(session for gpu in node.gpus for session in self._ledger.sessions_on(gpu.uuid))
        leaving = [
            departure
            for session in sessions
            for departure in self._leaving(self._ledger.allocations[session], now, notices.get(session), idle_since)
        ]
        resources = self._resources_free(node, demand, leaving, now)
        starts_by_model = []
        for model, gpus in node.healthy.items():
            able = [gpu for gpu in gpus if gpu.capacity >= demand.units and gpu.can_ever_meet(demand.conditions)]
            if not demand.count or not demand.accepts(model) or len(able) < demand.count:
                continue
            free = {gpu: _units_free(gpu, demand, demand.units, leaving, now) for gpu in able}
            last = free
            if demand.least_units != demand.units:
                last = {gpu: _units_free(gpu, demand, demand.least_units, leaving, now) for gpu in able}
            if len(able) == demand.count and last is free:
                starts = list(map(max, zip(resources, *free.values(), strict=True)))
            else:
                starts = []
                for sample, start in enumerate(resources):
                    times = {gpu: free[gpu][sample] for gpu in able}
                    chosen = _first(able, demand.count, times, {gpu: last[gpu][sample] for gpu in able})
                    starts.append(max(start, last[chosen[-1]][sample], *(times[gpu] for gpu in chosen[:-1])))
            likely = ({gpu: TimeRange.of(times[gpu]).likely for gpu in able} for times in (free, last))
            uuids = tuple(gpu.uuid for gpu in _first(able, demand.count, *likely))
            at = TimeRange.of(starts)
            starts_by_model.append(ExpectedStart(NodeHold(node.name, uuids, demand, at.likely), at))
        return min(starts_by_model, key=lambda start: start.at.likely, default=None)

    def _leaving(
        self, allocation: Allocation, now: float, notice: Notice | None, idle_since: Callable[[str], IdleSince | None]
    ) -> Iterable[_Departure]:
        """Yield what a session is expected to give up."""
        requested = replace(self._requested(allocation.template), pods=1)
        units = {gpu: allocation.on(gpu).effective_units for gpu in allocation.gpus}
        stops = notice is not None and notice.tier is Tier.STOPPED
        if notice is not None:
            units_left = {gpu: 0 if stops else min(notice.effective_units, most) for gpu, most in units.items()}
            given = {gpu: most - units_left[gpu] for gpu, most in units.items()}
            yield _Departure([max(now, notice.at)] * SAMPLES, given, requested if stops else NOTHING)
            units = units_left
        if not stops:
            remaining = self.lengths.remaining(allocation.template, max(0.0, now - allocation.opened_at))
            # another order for each session, and the same one in each pass
            seed = crc32(allocation.session.encode())
            step = 2 * (seed >> 8) + 1
            times: Sequence[float] = [now + remaining[(seed + step * sample) % SAMPLES] for sample in range(SAMPLES)]
            idle, since = self._idle(allocation.template), idle_since(allocation.session)
            if notice is None and idle is not None and since is not None:
                if since.server is not None:
                    times = _or_idle_action(times, idle, Tier.STOPPED, since.server, now, seed)
                for tier in (Tier.DOWNGRADED, Tier.RELEASED):
                    most = idle.units(tier, Share()) if idle.after(tier) is not None else UNITS_PER_GPU
                    given = {gpu: max(0, here - most) for gpu, here in units.items()}
                    if any(given.values()):
                        yield _Departure(_or_idle_action(times, idle, tier, since.gpu, now, seed), given, NOTHING)
                        units = {gpu: min(here, most) for gpu, here in units.items()}
            yield _Departure(times, units, requested)

    @staticmethod
    def _resources_free(
        node: NodeCapacity, demand: Demand, leaving: Sequence[_Departure], now: float
    ) -> Sequence[float]:
        """Return when the node has CPU, memory and a pod for the demand, in each sample."""
        free = node.resources
        lacking = [
            (free.lacks_cpu(demand.cpu), demand.cpu - (free.cpu or 0), "cpu"),
            (free.lacks_memory(demand.memory), demand.memory - (free.memory or 0), "memory"),
            (free.lacks_pods(), 1 - (free.pods or 0), "pods"),
        ]
        times = [now] * SAMPLES
        for lacks, amount, name in lacking:
            if lacks:
                given = [(part.times, getattr(part.requested, name)) for part in leaving]
                times = list(map(max, times, _reached(amount, given, now)))
        return times


def _or_idle_action(
    ends: Sequence[float], idle: Idle, tier: Tier, since: float, now: float, seed: int
) -> Sequence[float]:
    """Return the times of an idle action without a notice, in each sample; where none is expected, the session's end.

    ``since``: the begin of the idle time. Half of the sessions stay idle as long again (Gott, as for `remaining`).
    """
    after = idle.after(tier)
    if after is None:
        return ends
    at, notice = since + after, idle.warn_before if idle.warn_before <= after else after / 2
    if idle.when == "pressure" and tier is not Tier.STOPPED:
        at = max(at, now + min(notice, PRESSURE_NOTICE))  # a spawn waits
    elif now > at - notice + LATE_SECONDS:
        return ends
    longest = [max(0.0, now - since) / (1 - level) for level in _LEVELS]
    # another order than that of the ends
    samples = ((seed >> 16) + (2 * seed + 1) * sample for sample in range(SAMPLES))
    return [
        min(end, at) if since + longest[sample % SAMPLES] >= at else end
        for end, sample in zip(ends, samples, strict=True)
    ]


def _first(
    gpus: Sequence[GpuCapacity],
    number: int,
    times: Mapping[GpuCapacity, float],
    last_times: Mapping[GpuCapacity, float],
) -> Sequence[GpuCapacity]:
    """Return the GPUs that are free first. ``last_times``: when these have the units that the last GPU needs."""
    ordered = sorted(gpus, key=lambda gpu: (times[gpu], gpu.preference))
    last = min(ordered[number - 1 :], key=lambda gpu: (last_times[gpu], gpu.preference))
    return [*ordered[: number - 1], last]


def _units_free(
    gpu: GpuCapacity, demand: Demand, units: int, leaving: Sequence[_Departure], now: float
) -> Sequence[float]:
    """Return when the GPU has these units, in each sample; it must be empty if its sessions exclude the demand."""
    needed = units if gpu.left_for(demand) is gpu else gpu.capacity
    given = [(part.times, part.units[gpu.uuid]) for part in leaving if gpu.uuid in part.units]
    return _reached(needed - gpu.free, given, now)


def _reached(lacking: int, given: Sequence[tuple[Sequence[float], int]], now: float) -> Sequence[float]:
    """Return when so much is given, in each sample; infinite: never."""
    if lacking <= 0:
        return [now] * SAMPLES
    total = sum(amount for _, amount in given)
    if total <= lacking:
        # all must leave, which is usual for whole GPUs, or all are not enough
        every = [times for times, amount in given if amount]
        return list(map(max, zip(*every, strict=True))) if total == lacking else [math.inf] * SAMPLES
    times = []
    for sample in range(SAMPLES):
        left, at = lacking, math.inf
        for time, amount in sorted([(each[sample], amount) for each, amount in given]):
            left -= amount
            if left <= 0:
                at = time
                break
        times.append(at)
    return times


def candidates(capacity: FreeCapacity, request: PlacementRequest) -> Sequence[str]:
    """Return the nodes that could take a request if sessions there ended, and that lack the least now."""
    places = capacity.rated(request.demand, LEAST_LACKING, request.node)
    return [
        name for _, name in nsmallest(MOST_CANDIDATES, (each for each in places if each[1] not in request.left_out))
    ]
