"""Whether a template could start now, for its card."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gpushare_spawner.model.template import Template
from gpushare_spawner.placement import Demand, PlacementRequest
from gpushare_spawner.spawner.queue.inventory import GpuKind
from gpushare_spawner.spawner.queue.placement_check import Outcome, PlacementCheck, Verdict
from gpushare_spawner.spawner.queue.positions import Positions
from gpushare_spawner.spawner.queue.queue import Alternative, SpawnQueue
from gpushare_spawner.wording.spawn import queue as words


@dataclass(frozen=True)
class Availability:
    """What a card says about now. ``kind`` is for colours and programs, ``text`` for people."""

    kind: Literal["now", "wait", "never", "unknown"]
    text: str
    detail: str = ""
    gpus: tuple[GpuKind, ...] = ()
    """GPUs that would do, free or not."""
    borrowed: int = 0
    """Units of each GPU that idle sessions would lend; nothing is guaranteed of these."""


NO_GPU_NEEDED = Availability("now", words.STARTS_NOW)
UNKNOWN = Availability("unknown", words.UNKNOWN, words.UNKNOWN_DETAIL)


@dataclass(frozen=True)
class AvailabilityNow:
    """What a spawn would meet now: the GPUs, what is left on them, and the queue."""

    check: PlacementCheck
    queue: SpawnQueue
    where: str = "this machine"
    ineligible: Callable[[Template], frozenset[str]] = lambda _: frozenset()
    """Returns the nodes that cannot take a server of a template whatever is free there."""
    _met: dict[Demand, Availability] = field(default_factory=dict, repr=False)

    def availability(self, template: Template) -> Availability:
        """What a spawn of this template would meet."""
        if template.gpu is None:
            return NO_GPU_NEEDED
        return replace(self._met_by(self._request(template)), gpus=self.check.snapshot.suiting(template.gpu))

    def preparing(self, templates: Iterable[Template]) -> Iterator[None]:
        """Do in pieces what `availability` needs."""
        for template in templates:
            if template.gpu is not None:
                yield from self._preparing(self._request(template))

    def startable(self, alternatives: Iterable[Alternative], instead_of: str = "") -> tuple[str, ...]:
        """Return which of these templates would start now, by their display names.

        ``instead_of``: the claim of the spawn that would end first; it is not in the way.
        """
        return tuple(one.template.display_name for one in alternatives if self._would_start(one, instead_of))

    def preparing_startable(self, alternatives: Iterable[Alternative]) -> Iterator[None]:
        """Do in pieces what `startable` needs."""
        for one in alternatives:
            if one.template.gpu is not None:
                yield from self._preparing(self._alternative(one))

    def _would_start(self, one: Alternative, instead_of: str) -> bool:
        if one.template.gpu is None:
            return True
        request = self._alternative(one)
        return self._met_by(request).kind == "now" or self.check.fits_without(request, (instead_of,))

    def _request(self, template: Template) -> PlacementRequest:
        return replace(self.check.snapshot.request(template), ineligible=self.ineligible(template))

    def _alternative(self, one: Alternative) -> PlacementRequest:
        return replace(self.check.snapshot.request(one.template), ineligible=one.ineligible())

    def _preparing(self, request: PlacementRequest) -> Iterator[None]:
        if request.demand not in self._met:
            yield from self.check.preparing(request)
        yield

    def _met_by(self, request: PlacementRequest) -> Availability:
        met = self._met.get(request.demand)
        if met is None:
            met = self._met[request.demand] = self._meets(request)
        return met

    def _meets(self, request: PlacementRequest) -> Availability:
        verdict = self.check.verdict(request)
        if verdict.placement is not None and verdict.placement.borrowed:
            borrowed = verdict.placement.borrowed
            return Availability("now", words.STARTS_ON_LENT, words.LENT_DETAIL, borrowed=borrowed)
        if verdict.outcome is Outcome.NOW:
            return Availability("now", words.STARTS_NOW)
        if verdict.outcome is Outcome.NEVER:
            return Availability("never", self._why_never(verdict), verdict.why)
        position = words.position(Positions(self.check, self.queue).ahead_of(request))
        return Availability("wait", position, verdict.why)

    def _why_never(self, verdict: Verdict) -> str:
        if verdict.ineligible:
            return words.NO_SUITABLE_NODE
        return words.NO_SUITABLE_GPU if verdict.unsuitable else words.too_large(self.where)


def models_of(gpus: tuple[GpuKind, ...]) -> Mapping[str, int]:
    """How many there are of each model."""
    counted: dict[str, int] = {}
    for kind in gpus:
        counted[kind.model] = counted.get(kind.model, 0) + kind.count
    return counted
