"""One GPU's units as a bar: units that are guaranteed to their owner, borrowed, lent and free units."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gpushare_spawner.model.report import GpuReport, SessionReport

Kind = Literal["owned", "borrowed", "lent", "free"]
"""Owned: guaranteed to their owner, who may be idle. Borrowed: lent, and another session has them. Lent: lent, and not
borrowed. Free: not allocated."""


@dataclass(frozen=True)
class Segment:
    """A segment of the bar; ``session`` is the id of the session that uses it (owned, borrowed) or lends it."""

    kind: Kind
    units: int
    session: str | None = None


def gpu_bar(gpu: GpuReport, sessions: Iterable[SessionReport]) -> list[Segment]:
    """Return the GPU's bar, from the sessions of its node, the oldest first.

    The units add up to the GPU's capacity, or to the allocated units if these are more.
    """
    here = sorted((one for one in sessions if gpu.uuid in one.gpus), key=lambda one: (one.opened_at, one.id))
    if gpu.mig is not None and here:
        return [Segment("owned", gpu.capacity_units, here[0].id)]  # a session has all of a MIG instance
    bar: list[Segment] = []
    lent: list[Segment] = []
    taken = 0
    for session in here:
        own = max(0, session.share_units - session.borrowed_units)
        used = min(own, session.guaranteed_units)
        bar += [Segment("owned", used, session.id)] * (used > 0)
        lent += [Segment("lent", own - used, session.id)] * (own > used)
    for session in here:
        borrowed = session.borrowed_now
        bar += [Segment("borrowed", borrowed, session.id)] * (borrowed > 0)
        taken += borrowed
    for segment in lent:
        left = max(0, segment.units - taken)
        taken -= segment.units - left
        bar += [Segment("lent", left, segment.session)] * (left > 0)
    free = gpu.capacity_units - sum(segment.units for segment in bar)
    return bar + [Segment("free", free)] * (free > 0)


def units_of(bar: Iterable[Segment], kind: Kind) -> int:
    """Return the number of units of one kind."""
    return sum(segment.units for segment in bar if segment.kind == kind)
