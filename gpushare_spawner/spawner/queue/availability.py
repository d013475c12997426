"""Availability of a template on its card, and estimates of the wait of queued spawns.

An estimate uses pending idle actions and the waits of recent spawns; for GPUs of other sharing layers, it uses sessions
with a notice of a stop. Without data there is no estimate. The module is pure: the time is an argument. Positions are
computed in `queue`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import MigProfile
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Share
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.departures import TimeRange
from gpushare_spawner.placement.feed import SupposedLedger, helpful_actions
from gpushare_spawner.placement.obstacles import Reason
from gpushare_spawner.placement.request import Demand, PlacementRequest
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.queue.queue import (
    MOST_EXPECTED_SECONDS,
    LoopBreaks,
    PlacementCheck,
    Positions,
    SpawnQueue,
    Ticket,
    Verdict,
    WaitInterval,
)
from gpushare_spawner.spawner.queue.snapshot import (
    GpuKind,
    GpuSnapshot,
    LayerHolds,
    LayerOutcome,
    OtherLayers,
    SpawnRequest,
)
from gpushare_spawner.wording import spawn_failures as words
from gpushare_spawner.wording.spawn_form import gpu_models, not_on_one_machine


@dataclass(frozen=True)
class Availability:
    """The current state of a template on its card. ``kind`` is for colors and programs, ``text`` for people."""

    kind: Literal["now", "wait", "never", "unknown"]
    text: str
    detail: str = ""
    gpus: tuple[GpuKind, ...] = ()
    """Suitable GPUs, free or not."""
    borrowed: int = 0
    """Units of each GPU that idle sessions would lend; these units are not guaranteed."""
    layer: LayerName | None = None
    """The sharing layer of the server, if it is not the native layer; None if it is the template's layer."""
    profile: MigProfile | None = None
    """The profile of the server's MIG instance; None if there is no instance or it is unknown."""


NO_GPU_NEEDED = Availability("now", words.STARTS_NOW)
UNKNOWN = Availability("unknown", words.UNKNOWN, words.UNKNOWN_DETAIL)
UNKNOWN_AFTER_ERROR = Availability("unknown", words.UNKNOWN, words.UNKNOWN_AFTER_ERROR)


class UnknownNow:
    """Replacement for `AvailabilityNow` after an error in placement."""

    def availability(self, template: Template) -> Availability:
        """Return the kind "unknown" for the template."""
        return NO_GPU_NEEDED if template.gpu is None else UNKNOWN_AFTER_ERROR


def _raised(error: Exception) -> None:
    raise error


@dataclass(frozen=True)
class AvailabilityNow:
    """The outcome that a spawn would have now, computed from the GPUs, the free capacity and the queue."""

    check: PlacementCheck
    queue: SpawnQueue
    where: str = "this machine"
    ineligible: Callable[[Template], frozenset[str]] = lambda _: frozenset()
    """Returns the nodes that cannot run a server of a template, regardless of free capacity."""
    tenant: Tenant = field(default_factory=lambda: Tenant(""))
    """The user of the spawn; without a name: any user."""
    failed: Callable[[Exception], object] = _raised
    """Called with an error in placement. Unless it raises, the affected result is shown as unknown."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Names of the templates that this user can never use, each with the reason as a sentence."""
    _by_demand: dict[tuple[Demand, float | None], Availability] = field(default_factory=dict, repr=False)
    """By demand and `PlacementCheck.length_of`."""
    _prepared: set[Demand] = field(default_factory=set, repr=False)
    _requests: dict[int, SpawnRequest] = field(default_factory=dict, repr=False)
    """Requests by the identity of their template, which the request references."""
    _placements: dict[int, tuple[SpawnRequest, PlacementRequest]] = field(default_factory=dict, repr=False)
    """Placement requests by the identity of the spawn's request."""

    def availability(self, template: Template) -> Availability:
        """Return the outcome that a spawn of this template would have now."""
        if template.gpu is None:
            return NO_GPU_NEEDED
        if template.name in self.refused:
            return Availability("never", words.NO_SUITABLE_GPU, self.refused[template.name])
        try:
            return self._availability(self.request(template))
        except Exception as error:
            self.failed(error)
            return UNKNOWN_AFTER_ERROR

    def request(self, template: Template) -> SpawnRequest:
        """Return the user's request for a template with a GPU."""
        request = self._requests.get(id(template))
        if request is None:
            nodes = self.ineligible(template)
            request = self._requests[id(template)] = SpawnRequest(self.tenant, template, ineligible=lambda: nodes)
        return request

    def suitable_gpus(self, template: Template) -> str:
        """Return the suitable GPUs for a template, free or not, as text for people; empty: none are reported."""
        models = models_of(self.check.snapshot.suiting(template))
        return gpu_models(template.gpu.share, models) if template.gpu is not None else ""

    def startable(self, alternatives: Iterable[SpawnRequest], instead_of: str = "") -> tuple[Template, ...]:
        """Return the templates that would start now.

        ``instead_of``: a hold to ignore, because its spawn would end first.
        """
        return tuple(request.template for request in alternatives if self._would_start(request, instead_of))

    def preparing(self, requests: Iterable[SpawnRequest]) -> Iterator[object]:
        """Prepare `availability` and `startable` in pieces."""
        for request in requests:
            if request.template.gpu is not None and self.check.snapshot.native(request.template):
                placement_request = self._placement_request(request)
                if placement_request.demand not in self._prepared:
                    self._prepared.add(placement_request.demand)
                    yield from self.check.preparing(placement_request)
                yield None

    def _placement_request(self, request: SpawnRequest) -> PlacementRequest:
        cached = self._placements.get(id(request))
        if cached is None:
            cached = self._placements[id(request)] = request, request.placement_request(self.check.snapshot)
        return cached[1]

    def _availability(self, request: SpawnRequest, instead_of: str = "") -> Availability:
        layers = self.check.snapshot.other_layers(request.template)
        if layers is not None:
            return self._by_layers(request, layers, instead_of)
        cannot = not_on_one_machine(request.template)
        return Availability("never", words.NO_SUITABLE_GPU, cannot) if cannot else self._native(request)

    def _native(self, request: SpawnRequest) -> Availability:
        gpus = self.check.snapshot.suiting(request.template)
        result = self._native_now(self._placement_request(request))
        if result.layer is LayerName.MIG and result.profile is None:
            instances = [kind.mig.profile for kind in gpus if kind.mig is not None]
            result = replace(result, profile=min(instances, key=lambda instance: instance.size, default=None))
        return replace(result, gpus=gpus)

    def _would_start(self, request: SpawnRequest, instead_of: str) -> bool:
        template = request.template
        if template.gpu is None:
            return True
        try:
            availability = self._availability(request, instead_of)
            if availability.kind == "wait" and self.check.snapshot.other_layers(template) is None:
                return self.check.fits_without(self._placement_request(request), (instead_of,))
            return availability.kind == "now"
        except Exception as error:
            self.failed(error)
            return False

    def _native_now(self, request: PlacementRequest) -> Availability:
        key = (request.demand, self.check.length_of(request))
        result = self._by_demand.get(key)
        if result is None:
            result = self._by_demand[key] = self._verdict_now(request)
        return result

    def _by_layers(self, request: SpawnRequest, layers: OtherLayers, instead_of: str) -> Availability:
        template = request.template
        verdict = layers.verdict(request, LayerHolds(self.queue.held_elsewhere(instead_of)))
        native = self._native(request) if layers.native(template) else None
        gpus = (*(native.gpus if native is not None else ()), *verdict.gpus)
        if native is not None and native.kind == "now" and verdict.outcome is not LayerOutcome.NOW:
            return replace(native, gpus=gpus)
        layer = verdict.offer.layer if verdict.offer is not None else None
        if verdict.outcome is LayerOutcome.NOW:
            now = Availability("now", words.STARTS_NOW) if verdict.certain else UNKNOWN
            return replace(now, gpus=gpus, layer=layer, profile=verdict.profile)
        if verdict.outcome is LayerOutcome.WAIT or (native is not None and native.kind == "wait"):
            position = words.position(Positions(self.check, self.queue).ahead_of_template(template))
            why = verdict.why if verdict.outcome is LayerOutcome.WAIT or native is None else native.detail
            return Availability("wait", position, why, gpus, layer=layer, profile=verdict.profile)
        return Availability("never", words.NO_SUITABLE_GPU, verdict.why, gpus, layer=layer)

    def _verdict_now(self, request: PlacementRequest) -> Availability:
        verdict = self.check.verdict(request)
        place = verdict.placement
        layer = place.layer if place is not None else request.layer
        result = self._from_verdict(request, verdict)
        if place is not None and layer is LayerName.MIG:
            instance = self.check.snapshot.gpus[place.gpus[0]].mig
            result = replace(result, profile=instance.profile if instance is not None else None)
        return result if layer is LayerName.NATIVE else replace(result, layer=layer)

    def _from_verdict(self, request: PlacementRequest, verdict: Verdict) -> Availability:
        if verdict.placement is not None and verdict.placement.borrowed:
            borrowed = verdict.placement.borrowed
            return Availability("now", words.STARTS_ON_LENT, words.LENT_DETAIL, borrowed=borrowed)
        if verdict.outcome is LayerOutcome.NOW:
            return Availability("now", words.STARTS_NOW)
        if verdict.outcome is LayerOutcome.NEVER:
            return Availability("never", self._why_never(request, verdict), verdict.why)
        position = words.position(Positions(self.check, self.queue).ahead_of(request))
        return Availability("wait", position, verdict.why)

    def _why_never(self, request: PlacementRequest, verdict: Verdict) -> str:
        if verdict.reason is Reason.INELIGIBLE:
            return words.NO_SUITABLE_NODE
        unsuitable = not request.models or verdict.reason in (Reason.NO_MODEL, Reason.NO_GPUS, Reason.NOT_NAMED)
        return words.NO_SUITABLE_GPU if unsuitable else words.too_large(self.where)


def models_of(gpus: tuple[GpuKind, ...]) -> Mapping[str, int]:
    """Return the number of GPUs of each model."""
    counted: dict[str, int] = {}
    for kind in gpus:
        counted[kind.model] = counted.get(kind.model, 0) + kind.count
    return counted


RECENT_SECONDS = 3600.0
"""The maximum age of a wait that counts, in seconds; after that, other users work on the GPUs."""
FEWEST_WAITS = 3
"""The minimum number of waits for an estimate; the median of fewer waits depends on single users."""
MOST_WAITS = 200
"""The maximum number of stored waits."""
_STEPS = ((5, 1), (30, 5), (120, 15))
"""Pairs (minutes, step): an estimate of at most ``minutes`` is rounded to a multiple of ``step``."""


@dataclass(frozen=True)
class RecentWait:
    """The time for which a placed spawn was first in the queue for its GPUs."""

    ended: float
    """Seconds on a monotonic clock."""
    seconds: float
    share: Share
    kinds: frozenset[str]
    """Kinds of the GPUs: see `gpu_kinds`."""


class WaitEstimates:
    """Estimates for all spawns in one queue, from the waits of recently placed spawns."""

    def __init__(self) -> None:
        self.waits: deque[RecentWait] = deque(maxlen=MOST_WAITS)

    def placed(self, ticket: Ticket, snapshot: GpuSnapshot, now: float) -> None:
        """Record the wait of a placed ticket. ``now``: seconds on a monotonic clock."""
        if ticket.first_since is not None:
            kinds = gpu_kinds(ticket.request, snapshot)
            self.waits.append(RecentWait(now, now - ticket.first_since, ticket.request.share, kinds))

    def expected(self, share: Share, kinds: frozenset[str], ahead: int, waited: float, now: float) -> TimeRange | None:
        """Return the seconds until a spawn of this share is placed; None if too few such spawns waited recently.

        ``ahead``: number of spawns before it; ``waited``: seconds since it became first, else 0.
        """
        waits = [
            wait.seconds
            for wait in self.waits
            if wait.share == share and now - wait.ended <= RECENT_SECONDS and not wait.kinds.isdisjoint(kinds)
        ]
        if len(waits) < FEWEST_WAITS:
            return None
        if ahead:
            return TimeRange.of((ahead + 1) * seconds for seconds in waits)
        # only recent spawns that waited at least as long are comparable
        longer = [seconds - waited for seconds in waits if seconds >= waited]
        return TimeRange.of(longer) if len(longer) >= FEWEST_WAITS else None

    async def intervals(
        self, check: PlacementCheck, queue: SpawnQueue, now: float, wall_time: float, breaks: LoopBreaks
    ) -> Mapping[Ticket, WaitInterval]:
        """Return the rounded estimate of each spawn that has one.

        Of several estimates the earliest counts. ``now``: seconds on a monotonic clock; ``wall_time``: seconds since
        the epoch.
        """
        due = {**await after_pending_stops(check.snapshot, queue, breaks)}
        for ticket, at in (await after_idle_actions(check, queue, breaks)).items():
            due[ticket] = min(at, due.get(ticket, at))
        intervals: dict[Ticket, WaitInterval] = {}
        for ticket in queue:
            await breaks.pause_if_due()
            if ticket.ahead is None or ticket.result.done():
                continue
            kinds = gpu_kinds(ticket.request, check.snapshot)
            waited = now - ticket.first_since if ticket.first_since is not None else 0.0
            seconds = self.expected(ticket.request.share, kinds, ticket.ahead, waited, now)
            estimates = [seconds] if seconds is not None else []
            if ticket in due:
                estimates.append(TimeRange.of([due[ticket] - wall_time]))
            if ticket.start is not None and ticket.start.at.latest - wall_time < MOST_EXPECTED_SECONDS:
                estimates.append(TimeRange(*(at - wall_time for at in ticket.start.at)))
            if estimates:
                intervals[ticket] = rounded_interval(min(estimates, key=lambda estimate: estimate.likely))
        return intervals


def gpu_kinds(request: SpawnRequest, snapshot: GpuSnapshot) -> frozenset[str]:
    """Return the kinds of GPUs that a spawn waits for.

    A kind is a model of GPUs with an agent, or another layer with the models that the template names.
    """
    others = snapshot.layers.names(request.template) if snapshot.layers is not None else ()
    models = snapshot.models(request.template) if snapshot.native(request.template) else frozenset()
    return models | {f"{layer}: {' '.join(request.gpu.models)}" for layer in others}


async def after_pending_stops(snapshot: GpuSnapshot, queue: SpawnQueue, breaks: LoopBreaks) -> Mapping[Ticket, float]:
    """Return when other layers can place queued spawns if all notified stops happen, in seconds since the epoch.

    Spawns for which the benefit is zero or unknown are left out.
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
        # the number of servers of its size that the earlier spawns and this spawn need together
        servers = 1 + -(-max(ahead.get(name, 0) for name in names) // units)
        at = layers.starts_by(request, servers)
        if at is not None:
            expected[ticket] = at
        for name in names:
            ahead[name] = ahead.get(name, 0) + units
    return expected


def rounded_minutes(seconds: float, upward: bool = True) -> int:
    """Return minutes rounded to a suitable number for an estimate: 6 min gives 10, 31 min gives 45; upward at least 1.

    Downward, 6 min gives 5, 31 min gives 30.
    """
    minutes = seconds / 60
    step = next((step for most, step in _STEPS if minutes <= most), 60)
    return max(1, math.ceil(minutes / step)) * step if upward else math.floor(minutes / step) * step


def rounded_interval(seconds: TimeRange) -> WaitInterval:
    """Return the rounded minutes of an estimate: of an interval the earliest is rounded down."""
    is_interval = seconds.earliest < seconds.latest
    earliest = rounded_minutes(seconds.earliest, upward=not is_interval) if seconds.earliest > 60 else 0
    return WaitInterval(earliest, rounded_minutes(seconds.likely), rounded_minutes(seconds.latest))


async def after_idle_actions(check: PlacementCheck, queue: SpawnQueue, breaks: LoopBreaks) -> Mapping[Ticket, float]:
    """Return when queued spawns can be placed if all notified idle actions happen, in seconds since the epoch.

    Spawns without a benefit are left out. The ledger is not changed: the result is computed on copies of the affected
    nodes.
    """
    supposed = SupposedLedger(check.ledger)
    native = check.snapshot.native
    waiting = {
        ticket: check.request_of(ticket)
        for ticket in queue
        if not ticket.result.done() and native(ticket.request.template)
    }
    expected: dict[Ticket, float] = {}
    helpful: list[tuple[str, Notice]] = []
    for actions in helpful_actions(check.ledger, waiting.values(), check.snapshot.notices):
        helpful += actions
        await breaks.pause_if_due()
    for session, notice in sorted(helpful, key=lambda action: action[1].at):
        if len(expected) == len(waiting):
            break
        await breaks.pause_if_due()
        node = supposed.happens(session, notice)
        if node is None:
            continue
        for ticket, request in waiting.items():
            if ticket not in expected and supposed.place(ticket.hold_name, request, node) is not None:
                expected[ticket] = notice.at
    return expected
