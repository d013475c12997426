"""Whether a template could start now, for its card."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gpushare_spawner.model.template import Template
from gpushare_spawner.placement import Demand, PlacementRequest
from gpushare_spawner.spawner.queue.inventory import GpuKind
from gpushare_spawner.spawner.queue.placement_check import Outcome, PlacementCheck
from gpushare_spawner.spawner.queue.queue import SpawnQueue
from gpushare_spawner.wording import queue as words


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
    _met: dict[Demand, Availability] = field(default_factory=dict, repr=False)

    def availability(self, template: Template) -> Availability:
        """What a spawn of this template would meet."""
        if template.gpu is None:
            return NO_GPU_NEEDED
        snapshot = self.check.snapshot
        request = snapshot.request(template)
        met = self._met.get(request.demand)
        if met is None:
            met = self._met[request.demand] = self._meets(request)
        return replace(met, gpus=snapshot.suiting(template.gpu))

    def preparing(self, template: Template) -> Iterator[None]:
        """Do in pieces what `availability` needs."""
        if template.gpu is not None:
            request = self.check.snapshot.request(template)
            if request.demand not in self._met:
                yield from self.check.preparing(request)

    def startable(self, templates: Iterable[Template], instead_of: str = "") -> tuple[str, ...]:
        """Return which of these templates would start now, by their display names.

        ``instead_of``: the claim of the spawn that would end first; it is not in the way.
        """
        return tuple(template.display_name for template in templates if self._would_start(template, instead_of))

    def _would_start(self, template: Template, instead_of: str) -> bool:
        if self.availability(template).kind == "now" or template.gpu is None:
            return True
        return self.check.fits_without(self.check.snapshot.request(template), (instead_of,))

    def _meets(self, request: PlacementRequest) -> Availability:
        verdict = self.check.verdict(request)
        if verdict.placement is not None and verdict.placement.borrowed:
            borrowed = verdict.placement.borrowed
            return Availability("now", words.STARTS_ON_LENT, words.LENT_DETAIL, borrowed=borrowed)
        if verdict.outcome is Outcome.NOW:
            return Availability("now", words.STARTS_NOW)
        if verdict.outcome is Outcome.NEVER:
            text = words.NO_SUITABLE_GPU if verdict.unsuitable else words.too_large(self.where)
            return Availability("never", text, verdict.why)
        position = words.position(self.queue.ahead_of(request.models or frozenset(), self.check.snapshot))
        return Availability("wait", position, verdict.why)


def models_of(gpus: tuple[GpuKind, ...]) -> Mapping[str, int]:
    """How many there are of each model."""
    counted: dict[str, int] = {}
    for kind in gpus:
        counted[kind.model] = counted.get(kind.model, 0) + kind.count
    return counted
