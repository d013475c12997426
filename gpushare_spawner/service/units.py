"""GPUs' units for pages, the API and metrics. Pure.

`gpu_bar` shows a GPU's units as a bar of owned, borrowed, lent and free units. `UnitsToOwn` finds a node where a
borrower could own its full share after a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from gpushare_spawner.model.report import GpuReport, Report, SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.request import suits

Kind = Literal["owned", "borrowed", "lent", "free"]
"""Kinds of units. Owned: guaranteed to their owner, even while it is idle. Borrowed: lent and used by another session.
Lent: lent and not borrowed. Free: not allocated."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Segment:
    """A segment of the bar. ``session``: the id of the session that uses the units (owned, borrowed) or lends them."""

    kind: Kind
    units: int
    session: str | None = None


def gpu_bar(gpu: GpuReport, sessions: Iterable[SessionReport]) -> list[Segment]:
    """Return the GPU's bar from its node's sessions, oldest first.

    The units add up to the GPU's capacity, or to the allocated units if those exceed it.
    """
    here = sorted(
        (session.on(gpu.uuid) for session in sessions if gpu.uuid in session.gpus),
        key=lambda session: (session.opened_at, session.id),
    )
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


class UnitsToOwn:
    """Units without an owner on all nodes. They are counted once, at the first call of `node_for`."""

    def __init__(self, reports: Sequence[Report]) -> None:
        self._reports = reports

    def node_for(self, session: SessionReport, template: Template | None) -> str | None:
        """Return the first node with enough units without an owner.

        Return None if there is no such node or the session has all its units. Units that idle sessions lend do not
        count, because a session that restarts on them would borrow again. The session's own units count as free,
        because a restart releases them. The current template applies. The nodes' CPU and memory are not checked.
        """
        if session.tier is not Tier.ACTIVE or session.borrowed_now >= session.borrowed_units:
            return None
        if template is None or template.gpu is None:
            return None
        share = template.gpu.share  # the template may have been changed since the session started
        for node, gpus in self._free:
            matches: Counter[str] = Counter()
            whole: Counter[str] = Counter()
            for gpu, free, owned in gpus:
                left = free + owned[session.id]
                if left >= share.least_units and suits(template.gpu, gpu.model, gpu.memory_bytes):
                    matches[gpu.model] += 1
                    whole[gpu.model] += left >= share.units
            enough = (model for model, count in matches.items() if count >= share.count)
            if any(whole[model] >= share.count - bool(share.last_units) for model in enough):
                return node
        return None

    @cached_property
    def _free(self) -> list[tuple[str, list[tuple[GpuReport, int, Counter[str]]]]]:
        """The nodes with their GPUs for native sessions, each with its free units and owned units by session."""
        nodes = []
        for report in self._reports:
            owned: dict[str, Counter[str]] = {gpu.uuid: Counter() for gpu in report.gpus}
            for session in report.sessions:
                for uuid in session.gpus:
                    if uuid in owned:
                        here = session.on(uuid)
                        owned[uuid][session.id] += max(0, here.share_units - here.borrowed_units)
            gpus = [
                (gpu, gpu.capacity_units - owned[gpu.uuid].total(), owned[gpu.uuid])
                for gpu in report.gpus
                if gpu.healthy and not gpu.cordoned and gpu.mig is None
            ]
            nodes.append((report.node, gpus))
        return nodes
