"""Whether a template could start now, in a few words for its card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gpushare_spawner.model.report import GpuReport, Report
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement import Ledger, Reason, Strategy
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.queue import WaitingLine, Wish


@dataclass(frozen=True)
class Availability:
    """What a card says about now. ``kind`` is for colours and programs, ``text`` for people."""

    kind: Literal["now", "wait", "never", "unknown"]
    text: str
    detail: str = ""
    gpus: tuple[GpuReport, ...] = ()
    """GPUs that would do, free or not."""


NO_GPU_NEEDED = Availability("now", "Starts now")
UNKNOWN = Availability("unknown", "Not known", "The GPU agent of this machine does not answer at the moment.")


def availability(
    template: Template, report: Report | None, ledger: Ledger | None, line: WaitingLine, strategy: Strategy
) -> Availability:
    """What a start of this template would meet now; without ``report`` and ``ledger`` the agent does not answer."""
    if template.gpu is None:
        return NO_GPU_NEEDED
    if report is None or ledger is None:
        return UNKNOWN
    wish = Wish(Tenant(user="?"), template)
    models = wish.models(report)
    gpus = tuple(gpu for gpu in report.gpus if wish.takes(gpu))
    free = models - line.held_back(report)
    if ledger.place(wish.share, free.__contains__, strategy) is not None:
        return Availability("now", "Starts now", gpus=gpus)
    refusal = ledger.refusal(wish.share, models.__contains__)
    if not models or refusal.reason in (Reason.NO_MODEL, Reason.NO_GPUS):
        return Availability("never", "No GPU of this kind", refusal.message, gpus)
    if free and not refusal.may_pass:
        return Availability("never", "Too big for this machine", refusal.message, gpus)
    ahead = line.ahead_of(models, report)
    return Availability("wait", waiting_text(ahead), refusal.message, gpus)


def waiting_text(ahead: int) -> str:
    """A place in the line: 0 is the first."""
    return "Next in line" if ahead == 0 else f"{ahead} ahead of you"


def models_of(gpus: tuple[GpuReport, ...]) -> Mapping[str, int]:
    """How many there are of each model."""
    counted: dict[str, int] = {}
    for gpu in gpus:
        counted[gpu.model] = counted.get(gpu.model, 0) + 1
    return counted
