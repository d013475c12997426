"""Whether a template could start now, for its card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from gpushare_spawner.model.share import Share
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement import Ledger, Reason, Refusal, Strategy
from gpushare_spawner.spawner.queue.queue import SpawnQueue
from gpushare_spawner.spawner.queue.snapshot import GpuKind, GpuSnapshot
from gpushare_spawner.wording import queue as words
from gpushare_spawner.wording import refusals


@dataclass(frozen=True)
class Availability:
    """What a card says about now. ``kind`` is for colours and programs, ``text`` for people."""

    kind: Literal["now", "wait", "never", "unknown"]
    text: str
    detail: str = ""
    gpus: tuple[GpuKind, ...] = ()
    """GPUs that would do, free or not."""


NO_GPU_NEEDED = Availability("now", words.STARTS_NOW)
UNKNOWN = Availability("unknown", words.UNKNOWN, words.UNKNOWN_DETAIL)


@dataclass(frozen=True)
class AvailabilityNow:
    """What a spawn would meet now: the GPUs, what is left on them, and the queue."""

    snapshot: GpuSnapshot
    ledger: Ledger
    queue: SpawnQueue
    strategy: Strategy
    where: str = "this machine"
    counted: Callable[[Share], Share] = lambda share: share
    """A share as the ledger counts it."""
    _met: dict[tuple[Share, frozenset[str]], Availability] = field(default_factory=dict, repr=False)

    @cached_property
    def _held_back(self) -> frozenset[str]:
        return self.queue.held_back(self.snapshot)

    def availability(self, template: Template) -> Availability:
        """What a spawn of this template would meet."""
        if template.gpu is None:
            return NO_GPU_NEEDED
        share, kinds = template.gpu.share, self.snapshot.suiting(template.gpu)
        models = self.snapshot.models(template.gpu)
        met = self._met.get((share, models))
        if met is None:
            met = self._met[share, models] = self._meets(share, models)
        return Availability(met.kind, met.text, met.detail, kinds)

    def _meets(self, share: Share, models: frozenset[str]) -> Availability:
        free = models - self._held_back
        placement = self.ledger.place(self.counted(share), free.__contains__, self.strategy)
        if placement is not None and placement.borrowed:
            return Availability("now", words.STARTS_ON_LENT, words.LENT_DETAIL)
        if placement is not None:
            return Availability("now", words.STARTS_NOW)
        refusal: Refusal = self.ledger.refusal(share, models.__contains__)
        why = refusals.capacity(refusal)
        waits = Availability("wait", words.position(self.queue.ahead_of(models, self.snapshot)), why)
        if self.snapshot.awaited and not refusal.may_pass:
            return Availability("wait", waits.text, self.snapshot.awaited)
        if not models or refusal.reason in (Reason.NO_MODEL, Reason.NO_GPUS):
            return Availability("never", words.NO_SUITABLE_GPU, why)
        if free and not refusal.may_pass:
            return Availability("never", words.too_large(self.where), why)
        return waits


def models_of(gpus: tuple[GpuKind, ...]) -> Mapping[str, int]:
    """How many there are of each model."""
    counted: dict[str, int] = {}
    for kind in gpus:
        counted[kind.model] = counted.get(kind.model, 0) + kind.count
    return counted
