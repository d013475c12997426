"""Whether a borrower whose lender has returned could own its full share after a restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.template import Template
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.placement import suits


def node_to_own(session: SessionReport, template: Template | None, reports: Iterable[Report]) -> str | None:
    """Return the first node whose GPUs have enough units that nobody owns; None: there is none, or the session has all
    its units.

    Units that idle sessions lend do not count: a session that restarts on them would borrow again. The session's own
    units count as free, since a restart gives them back. The template counts as it is now. CPU and
    memory of nodes are not looked at.
    """
    if session.tier is not Tier.ACTIVE or session.borrowed_now >= session.borrowed_units:
        return None
    if template is None or template.gpu is None:
        return None
    share = template.gpu.share  # the template may have been changed since the session started
    for report in reports:
        free: Counter[str] = Counter()
        for gpu in report.gpus:
            owned = sum(
                max(0, one.share_units - one.borrowed_units)
                for one in report.sessions
                if gpu.uuid in one.gpus and one.id != session.id
            )
            fits = gpu.healthy and not gpu.cordoned and gpu.capacity_units - owned >= share.units
            if fits and suits(template.gpu, gpu.model, gpu.memory_bytes):
                free[gpu.model] += 1
        if any(gpus >= share.count for gpus in free.values()):
            return report.node
    return None
