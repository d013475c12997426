"""Which idle sessions a waiting spawn needs, where templates take idle shares only under pressure. Pure.

The other half is `idle.policy`: when such a session's idle action comes. Sessions over quota: see `reclaim`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpushare_spawner.idle import Observation, RecentUse, exempts, first_work_delay, holds
from gpushare_spawner.model.quota import Quota
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.template import Idle, Template
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.placement import Ledger, PlacementRequest, suitable_models
from gpushare_spawner.quota import Account, Asking, OverQuota, reclaimed
from gpushare_spawner.service.culler.reclaim import Spawn, SupposedGpus
from gpushare_spawner.service.culler.settings import CullerSettings
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.service.session_templates import SessionTemplates
from gpushare_spawner.service.waiting_spawns import waiting_spawns

_NO_ACCOUNT = Account("", Quota())
"""Who waits is the same for idle sessions: their owners lose nothing."""


def candidates(
    reports: Sequence[Report], templates: Mapping[str, Template], now: float, settings: CullerSettings, use: RecentUse
) -> list[OverQuota]:
    """Return the idle sessions that a waiting spawn can need, with what the idle actions that are due leave them.

    They are none where no template asks for pressure: then nobody has to know which spawns wait.
    """
    found, each = [], SessionTemplates.of(templates)
    for report in reports:
        for session in report.sessions:
            template = each.of_user(session.template, session.user)
            if template is None or not settings.only_under_pressure(template.idle) or not session.confirmed:
                continue
            if holds(session.keep, now) or exempts(session.exemption, now):
                continue
            seen = use.observe(session.id, Observation.of(session))
            idle_seconds = now - seen.gpu_idle_since - first_work_delay(template.idle, seen)
            steps = [] if seen.gpu_busy else list(_steps(template.idle, session, idle_seconds))
            if steps:
                found.append(
                    OverQuota(session.id, session.id, report.node, session.effective_units, steps, seen.gpu_idle_since)
                )
    return found


def _steps(idle: Idle, session: SessionReport, seconds: float) -> Iterator[int]:
    """Yield the units that the idle actions leave whose notice is due after so many idle seconds, the most first."""
    for tier in (Tier.DOWNGRADED, Tier.RELEASED):
        after, units = idle.after(tier), idle.units(tier, session.share)
        if after is not None and seconds >= after - idle.warn_before and units < session.effective_units:
            yield units


def needed(
    idle_sessions: Sequence[OverQuota],
    reports: Sequence[Report],
    pending: Sequence[HubServer],
    templates: Mapping[str, Template],
) -> Mapping[str, int]:
    """Return the units that waiting spawns leave the sessions whose units they need.

    They are those of the longest idle, and no more than are needed.

    ``reports``: of all agents; ``pending``: the hub's, the longest first.
    """
    waiting = list(_asking(reports, pending, templates))
    if not waiting or not idle_sessions:
        return {}
    ledger = Ledger.of(reports)
    known = (one for one in idle_sessions if ledger.node_of(one.session) == one.node)
    return reclaimed(waiting, known, SupposedGpus(ledger, lent=True))


def _asking(
    reports: Sequence[Report], pending: Sequence[HubServer], templates: Mapping[str, Template]
) -> Iterator[Asking[Spawn]]:
    kinds = {(gpu.model, gpu.memory_bytes) for report in reports for gpu in report.gpus}
    for one in waiting_spawns(pending, reports, templates):
        gpu = one.template.gpu
        if gpu is not None and SessionTemplates.of(templates).native(one.template):
            request = PlacementRequest(gpu.share, models=suitable_models(gpu, kinds), template=one.template.name)
            yield Asking(Spawn(one.server.label, request), _NO_ACCOUNT, gpu.share.total_units)
