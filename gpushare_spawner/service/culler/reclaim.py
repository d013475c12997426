"""What spawns in quota that wait need of the sessions over quota, by the hub's list and the agents' reports. Pure.

Which sessions make way is decided in quota/reclaim.py, when they do in idle/policy.py.

Which idle sessions a waiting spawn needs, where templates take idle shares only under pressure. Pure.

The other half is `idle.policy`: when such a session's idle action comes. Sessions over quota: see `reclaim`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpushare_spawner.idle import Observation, RecentUse, UnitsNeeded, exempts, first_work_delay, holds
from gpushare_spawner.model.quota import Quota, Quotas
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.model.template import Idle, Template
from gpushare_spawner.placement import Ledger, PlacementRequest, SupposedLedger, suitable_models
from gpushare_spawner.quota import Account, Asking, OverQuota, QuotaAccounts, QuotaUsage, divided, reclaimed
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.service.templates import SessionTemplates
from gpushare_spawner.service.waiting import quota_use, waiting_spawns


@dataclass(frozen=True)
class Pressure:
    """What spawns in quota make necessary now."""

    claims: Mapping[str, UnitsNeeded] = field(default_factory=dict)
    """By the sessions that make way."""
    free_again: frozenset[str] = frozenset()
    """Sessions that yield units, and need not any longer."""
    kept_on: frozenset[str] = frozenset()
    """Sessions that yield units, and have to go on."""
    needed: Mapping[str, int] = field(default_factory=dict)
    """The units that spawns leave idle sessions of templates that take idle shares only then; see `idle_pressure`."""


NO_PRESSURE = Pressure()


def may_matter(quotas: Quotas | None, reports: Sequence[Report]) -> bool:
    """Return whether the hub's list of pending spawns can lead to anything: it costs the hub a request."""
    if any(session.yields for report in reports for session in report.sessions):
        return True
    if quotas is None or not quotas.reclaim.enabled:
        return False
    return any(True for _ in quota_use(quotas, reports).over_quota_sessions())


def pressure(
    quotas: Quotas | None,
    reports: Sequence[Report],
    pending: Sequence[HubServer],
    templates: Mapping[str, Template],
    now: float,
    use: RecentUse | None = None,
    silent: Sequence[Report] = (),
) -> Pressure:
    """Return which sessions make way. ``reports``: of all agents that answer; ``pending``: the hub's, the
    longest first.

    A spawn whose quota is unknown, because the hub does not show the user's groups, makes nobody make way. ``use``:
    which GPU work counted as use; None: all. ``silent``: the last reports of other agents; their sessions count for
    the quotas only.
    """
    yielding = [(report, one) for report in reports for one in report.sessions if one.yields]
    if quotas is None or not quotas.reclaim.enabled:
        return Pressure(free_again=frozenset(one.id for _, one in yielding))
    usage = quota_use(quotas, [*reports, *silent])
    waiting = list(_in_quota(quotas, usage, reports, pending, templates))
    if not waiting:
        kept: dict[str, int] = {}
    else:
        ledger = Ledger.of(reports)
        over_quota = _over_quota(quotas, usage, reports, templates, now, use)
        known = (one for one in over_quota if ledger.node_of(one.session) == one.node)
        kept = reclaimed(waiting, known, SupposedGpus(ledger))
    claims = {session: UnitsNeeded(units, quotas.reclaim) for session, units in kept.items()}
    free_again = set()
    for report, one in yielding:
        if exempts(one.exemption, now):
            free_again.add(one.id)
        elif _still_needed(one, report, [asking.spawn for asking in waiting]):
            claims.setdefault(one.id, UnitsNeeded(one.effective_units, quotas.reclaim))
        elif not _somebody_starts(one, report):
            free_again.add(one.id)
    return Pressure(claims, frozenset(free_again), frozenset(one.id for _, one in yielding) - free_again)


@dataclass(frozen=True)
class ReclaimingSpawn:
    """A spawn that waits."""

    name: str
    request: PlacementRequest


def _in_quota(
    quotas: Quotas,
    usage: QuotaUsage,
    reports: Sequence[Report],
    pending: Sequence[HubServer],
    templates: Mapping[str, Template],
) -> Iterator[Asking[ReclaimingSpawn]]:
    kinds = {(gpu.model, gpu.memory_bytes) for report in reports for gpu in report.gpus}
    asking = []
    for spawn in waiting_spawns(pending, reports, templates):
        account, gpu = _account_of(usage.accounts, spawn.server), spawn.template.gpu
        if account is None or gpu is None or not SessionTemplates.of(templates).native(spawn.template):
            # what sessions of ours give up is no GPU of another layer
            continue
        request = PlacementRequest(gpu.share, models=suitable_models(gpu, kinds), template=spawn.template.name)
        asking.append(Asking(ReclaimingSpawn(spawn.server.label, request), account, gpu.share.total_units))
    yield from divided(asking, usage)[0]


def _account_of(accounts: QuotaAccounts, server: HubServer) -> Account | None:
    """Return the account that a spawn will be charged to; None: unknown."""
    if server.groups is not None:
        choices: Collection[Account] = accounts.of_user(server.user, server.groups)
    elif server.quota or server.user in accounts.quotas.users:
        # the hub has checked the choice
        choices = [accounts.find(f"{kind}:{server.quota or server.user}", server.user) for kind in ("user", "group")]
        choices = [account for account in choices if account.known]
    else:
        return None
    named = [account for account in choices if not server.quota or account.name == server.quota]
    return named[0] if named else None


def _over_quota(
    quotas: Quotas,
    usage: QuotaUsage,
    reports: Sequence[Report],
    templates: Mapping[str, Template],
    now: float,
    use: RecentUse | None,
) -> Iterator[OverQuota]:
    each = SessionTemplates.of(templates)
    for report in reports:
        for session in report.sessions:
            if not session.confirmed or not session.gpus or not session.effective_units or usage.in_quota(session.id):
                continue
            if exempts(session.exemption, now):
                continue
            seen = Observation.of(session)
            if use is not None:
                seen = use.observe(session.id, seen)
            idle = not seen.gpu_in_use and now - seen.gpu_idle_since >= quotas.reclaim.idle_after
            template = each.of_user(session.template, session.user)
            if template is not None and template.idle.dry_run:
                continue  # it would not make way: others can
            steps = _steps(session, template, idle, quotas.reclaim.active_units)
            if not steps:
                continue
            told = session.notice is not None and session.notice.cause is IdleCause.RECLAIM
            yield OverQuota(
                session.id,
                usage.accounts.find(session.quota, session.user).key,
                report.node,
                session.effective_units,
                steps,
                seen.gpu_idle_since if idle else None,
                told,
                session.begun,
            )


def _steps(session: SessionReport, template: Template | None, idle: bool, least: int) -> Sequence[int]:
    """Return what a session can keep, the most first."""
    if not idle:
        return range(session.effective_units - 1, least - 1, -1)
    smaller = template.idle.units(Tier.DOWNGRADED, session.share) if template is not None else 0
    return [smaller, 0] if 0 < smaller < session.effective_units else [0]


class SupposedGpus:
    """`quota.Gpus` of a ledger. ``lent``: sessions that make way lend their units, and still own them."""

    def __init__(self, ledger: Ledger, lent: bool = False) -> None:
        self._lent = lent
        self._ledger = ledger
        self._supposed = SupposedLedger(ledger)

    def kind(self, spawn: ReclaimingSpawn) -> Hashable:
        return spawn.request

    def place(self, spawn: ReclaimingSpawn) -> bool:
        nodes = self._supposed.nodes
        if any(self._supposed.place(spawn.name, spawn.request, node) is not None for node in sorted(nodes)):
            return True
        found = self._ledger.place(replace(spawn.request, left_out=nodes))
        return found is not None and self._supposed.place(spawn.name, spawn.request, found.node) is not None

    def fits(self, spawn: ReclaimingSpawn, node: str, kept: Mapping[str, int]) -> bool:
        trial = self._supposed.copy_of(node)
        self._suppose(trial, node, kept)
        return trial.place(spawn.name, spawn.request, node) is not None

    def make_way(self, spawn: ReclaimingSpawn, node: str, kept: Mapping[str, int]) -> None:
        self._suppose(self._supposed, node, kept)
        self._supposed.place(spawn.name, spawn.request, node)

    def _suppose(self, ledger: SupposedLedger, node: str, kept: Mapping[str, int]) -> None:
        (ledger.lending if self._lent else ledger.yielding)(kept, node)


def _still_needed(session: SessionReport, report: Report, waiting: Sequence[ReclaimingSpawn]) -> bool:
    """Return whether a spawn that waits could use the GPUs of a session that yields."""
    models = {gpu.model for gpu in report.gpus if gpu.uuid in session.gpus}
    return any(one.request.models is None or not models.isdisjoint(one.request.models) for one in waiting)


def _somebody_starts(session: SessionReport, report: Report) -> bool:
    """Return whether a server with a place on the session's GPUs does not run yet: the units may be kept for it."""
    return any(not other.confirmed and not set(other.gpus).isdisjoint(session.gpus) for other in report.sessions)


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
            steps = [] if seen.gpu_in_use else list(_pressure_steps(template.idle, session, idle_seconds))
            if steps:
                found.append(
                    OverQuota(session.id, session.id, report.node, session.effective_units, steps, seen.gpu_idle_since)
                )
    return found


def _pressure_steps(idle: Idle, session: SessionReport, seconds: float) -> Iterator[int]:
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
    known = (session for session in idle_sessions if ledger.node_of(session.session) == session.node)
    return reclaimed(waiting, known, SupposedGpus(ledger, lent=True))


def _asking(
    reports: Sequence[Report], pending: Sequence[HubServer], templates: Mapping[str, Template]
) -> Iterator[Asking[ReclaimingSpawn]]:
    kinds = {(gpu.model, gpu.memory_bytes) for report in reports for gpu in report.gpus}
    for spawn in waiting_spawns(pending, reports, templates):
        gpu = spawn.template.gpu
        if gpu is not None and SessionTemplates.of(templates).native(spawn.template):
            request = PlacementRequest(gpu.share, models=suitable_models(gpu, kinds), template=spawn.template.name)
            yield Asking(ReclaimingSpawn(spawn.server.label, request), _NO_ACCOUNT, gpu.share.total_units)
