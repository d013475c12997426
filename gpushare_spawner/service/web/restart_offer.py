"""Whether a borrower whose lender has returned could own its full share after a restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from gpushare_spawner.model.report import GpuReport, Report, SessionReport
from gpushare_spawner.model.template import Template
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.placement import suits


class UnitsToOwn:
    """Units that nobody owns, on all nodes. They are counted once, when the first borrower is looked at."""

    def __init__(self, reports: Sequence[Report]) -> None:
        self._reports = reports

    def node_for(self, session: SessionReport, template: Template | None) -> str | None:
        """Return the first node whose GPUs have enough units that nobody owns; None: there is none, or the session has
        all its units.

        Units that idle sessions lend do not count: a session that restarts on them would borrow again. The session's
        own units count as free, since a restart gives them back. The template counts as it is now. CPU and memory of
        nodes are not looked at.
        """
        if session.tier is not Tier.ACTIVE or session.borrowed_now >= session.borrowed_units:
            return None
        if template is None or template.gpu is None:
            return None
        share = template.gpu.share  # the template may have been changed since the session started
        for node, gpus in self._free:
            found: Counter[str] = Counter()
            for gpu, free, owned in gpus:
                fits = free + owned[session.id] >= share.units
                if fits and suits(template.gpu, gpu.model, gpu.memory_bytes):
                    found[gpu.model] += 1
            if any(count >= share.count for count in found.values()):
                return node
        return None

    @cached_property
    def _free(self) -> list[tuple[str, list[tuple[GpuReport, int, Counter[str]]]]]:
        """The nodes with their GPUs that take native sessions: free units of each, and owned units by session."""
        found = []
        for report in self._reports:
            owned: dict[str, Counter[str]] = {gpu.uuid: Counter() for gpu in report.gpus}
            for one in report.sessions:
                for uuid in one.gpus:
                    if uuid in owned:
                        owned[uuid][one.id] += max(0, one.share_units - one.borrowed_units)
            gpus = [
                (gpu, gpu.capacity_units - owned[gpu.uuid].total(), owned[gpu.uuid])
                for gpu in report.gpus
                if gpu.healthy and not gpu.cordoned and gpu.mig is None
            ]
            found.append((report.node, gpus))
        return found
