"""Whether a template could start now, in a few words for its card."""

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


@dataclass(frozen=True)
class Availability:
    """What a card says about now. ``kind`` is for colours and programs, ``text`` for people."""

    kind: Literal["now", "wait", "never", "unknown"]
    text: str
    detail: str = ""
    gpus: tuple[GpuKind, ...] = ()
    """GPUs that would do, free or not."""


NO_GPU_NEEDED = Availability("now", "Starts now")
UNKNOWN = Availability("unknown", "Not known", "What is free now is not known at the moment.")


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
        if self.ledger.place(self.counted(share), free.__contains__, self.strategy) is not None:
            return Availability("now", "Starts now")
        refusal: Refusal = self.ledger.refusal(share, models.__contains__)
        waits = Availability("wait", waiting_text(self.queue.ahead_of(models, self.snapshot)), refusal.message)
        if self.snapshot.awaited and not refusal.may_pass:
            return Availability("wait", waits.text, self.snapshot.awaited)
        if not models or refusal.reason in (Reason.NO_MODEL, Reason.NO_GPUS):
            return Availability("never", "No GPU of this kind", refusal.message)
        if free and not refusal.may_pass:
            return Availability("never", f"Too big for {self.where}", refusal.message)
        return waits


def waiting_text(ahead: int) -> str:
    """A position in the queue; ``ahead``: how many spawns come first."""
    return "Next in line" if ahead == 0 else f"{ahead} ahead of you"


def models_of(gpus: tuple[GpuKind, ...]) -> Mapping[str, int]:
    """How many there are of each model."""
    counted: dict[str, int] = {}
    for kind in gpus:
        counted[kind.model] = counted.get(kind.model, 0) + kind.count
    return counted
