"""Determines the units of running sessions that waiting spawns need, from the hub's list and the agents' reports. Pure.

There are two cases. Spawns in quota reclaim units of sessions over quota. Waiting spawns need units of idle sessions
whose templates take idle shares only under pressure. `quota.reclaim` selects the sessions; `idle.policy` decides when
their idle actions are due: `idle.policy.reclaim_action` applies the notice period (`model.quota.Reclaim.notice`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpushare_spawner.idle.keep import exempts, holds
from gpushare_spawner.idle.policy import UnitsNeeded, first_work_delay
from gpushare_spawner.idle.use import Observation, RecentUse
from gpushare_spawner.model.control import QueueProgress
from gpushare_spawner.model.quota import Quota, Quotas
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.model.template import Idle, Template
from gpushare_spawner.placement.feed import LedgerFeed, SupposedLedger
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.request import Conditions, PlacementRequest, suitable_models
from gpushare_spawner.quota.accounts import Account, QuotaUsage, needs_of
from gpushare_spawner.quota.order import Asking, divided
from gpushare_spawner.quota.reclaim import MissingUnits, OverQuota, reclaimed
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.service.templates import SessionTemplates
from gpushare_spawner.service.waiting import NO_TEMPLATES, account_of, quota_use, waiting_spawns


@dataclass(frozen=True)
class Pressure:
    """The units that waiting spawns currently need."""

    reclaimed: Mapping[str, UnitsNeeded] = field(default_factory=dict)
    """Units that spawns in quota need, by session that makes way."""
    free_again: frozenset[str] = frozenset()
    """Sessions that no longer need to yield units."""
    kept_on: frozenset[str] = frozenset()
    """Sessions that must continue to yield units."""
    needed: Mapping[str, int] = field(default_factory=dict)
    """Units left to idle sessions with templates that take shares only under pressure, see the function `needed`."""


NO_PRESSURE = Pressure()

ProgressOf = Mapping[tuple[str, str], QueueProgress]
"""The progress that the hub shows to the users of waiting spawns, by user and server name."""
NO_PROGRESS: ProgressOf = {}


def may_matter(
    quotas: Quotas | None,
    reports: Sequence[Report],
    templates: Mapping[str, Template] = NO_TEMPLATES,
    servers: Iterable[HubServer] = (),
) -> bool:
    """Return whether the hub's list of pending spawns is needed, because reading it costs the hub a request.

    ``templates`` and ``servers``: see `quota_use`.
    """
    if any(session.yields for report in reports for session in report.sessions):
        return True
    if quotas is None or not quotas.reclaim.enabled:
        return False
    return any(charge.needs.units for charge in quota_use(quotas, reports, templates, servers).over_quota_sessions())


def pressure(
    quotas: Quotas | None,
    reports: Sequence[Report],
    pending: Sequence[HubServer],
    templates: Mapping[str, Template],
    now: float,
    use: RecentUse | None = None,
    silent: Sequence[Report] = (),
    progress: ProgressOf = NO_PROGRESS,
    servers: Iterable[HubServer] = (),
) -> Pressure:
    """Return which sessions make way for spawns in quota.

    ``reports``: those of all available agents. ``pending``: the hub's pending spawns, longest wait first. ``use``: the
    GPU work that counted as use; None: all work. ``silent``: the last reports of other agents, which count only for the
    quotas. ``servers``: all servers of the hub, of which those without a GPU count for the quotas too.
    ``progress``: the spawns' progress in the queue, with the nodes that have CPU and memory for them. A spawn
    whose quota is unknown, because the hub does not show the user's groups, reclaims no units.
    """
    yielding = [(report, session) for report in reports for session in report.sessions if session.yields]
    if quotas is None or not quotas.reclaim.enabled:
        return Pressure(free_again=frozenset(session.id for _, session in yielding))
    usage = quota_use(quotas, [*reports, *silent], templates, servers)
    asking = _asking(reports, pending, templates, progress, lambda server: account_of(usage.accounts, server), quotas)
    waiting = list(divided(list(asking), usage)[0])
    if not waiting:
        kept: dict[str, int] = {}
        helped: Collection[str] = ()
    else:
        ledger = LedgerFeed().follow(reports)
        gpus = SupposedGpus(ledger)
        over_quota = _over_quota(quotas, usage, reports, templates, now, use)
        placed = (candidate for candidate in over_quota if ledger.node_of(candidate.session) == candidate.node)
        kept, helped = reclaimed(waiting, placed, gpus), gpus.helped
    needs = {name: UnitsNeeded(units, quotas.reclaim) for name, units in kept.items()}
    free_again = set()
    for report, session in yielding:
        if exempts(session.exemption, now):
            free_again.add(session.id)
        elif _still_needed(session, report, [asking.spawn for asking in waiting], helped):
            needs.setdefault(session.id, UnitsNeeded(session.effective_units, quotas.reclaim))
        elif not _server_starts(session, report):
            free_again.add(session.id)
    return Pressure(needs, frozenset(free_again), frozenset(session.id for _, session in yielding) - free_again)


@dataclass(frozen=True)
class ReclaimingSpawn:
    """A waiting spawn that reclaims units."""

    name: str
    request: PlacementRequest
    anywhere: bool = False
    """Whether sessions of ineligible nodes make way, so that they are stopped, if no others can."""


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
                continue  # a session in a dry run keeps its units, but others can make way
            least = 0 if idle else quotas.reclaim.active_units
            if session.effective_units <= least:
                continue
            notified = session.notice is not None and session.notice.cause is IdleCause.RECLAIM
            yield OverQuota(
                session.id,
                usage.accounts.find(session.quota, session.user).key,
                report.node,
                session.effective_units,
                range(session.effective_units - 1, least - 1, -1),
                seen.gpu_idle_since if idle else None,
                session.user,
                session.gpus,
                notified,
                session.begun,
            )


class SupposedGpus:
    """The `quota.Gpus` of a ledger. ``lent``: whether sessions that make way lend their units and still own them."""

    def __init__(self, ledger: Ledger, lent: bool = False) -> None:
        self._lent = lent
        self._ledger = ledger
        self._supposed = SupposedLedger(ledger)
        self.helped: set[str] = set()
        """Names of the spawns with a place or a plan on an eligible node."""

    def kind(self, spawn: ReclaimingSpawn) -> Hashable:
        return spawn.request

    def place(self, spawn: ReclaimingSpawn) -> str | None:
        changed = sorted(self._supposed.nodes)
        node = next((node for node in changed if self._supposed.place(spawn.name, spawn.request, node)), None)
        if node is not None:
            self.helped.add(spawn.name)
            return node
        placement = self._ledger.place(replace(spawn.request, left_out=frozenset(changed)))
        if placement is None or self._supposed.place(spawn.name, spawn.request, placement.node) is None:
            return None
        self.helped.add(spawn.name)
        return placement.node

    def lacking(self, spawn: ReclaimingSpawn, node: str) -> Iterator[MissingUnits]:
        ledger = self._supposed.now(node)
        demand = ledger.capacity.resolved(spawn.request.demand)
        last_resort = node in demand.ineligible
        if last_resort and not spawn.anywhere:
            return
        for model, gpus in ledger.capacity.nodes[node].healthy.items():
            # `left_for` returns the GPU itself if its sessions need only give up units, or if one is alone there
            able = [
                gpu.uuid
                for gpu in gpus
                if gpu.capacity >= demand.units and gpu.left_for(demand) is gpu and not gpu.neighbours.alone
            ]
            if demand.accepts(model) and len(able) >= demand.count:
                missing = {uuid: ledger.missing_units(uuid, demand.units) for uuid in able}
                yield MissingUnits(demand.count, missing, last_resort)

    def make_way(self, spawn: ReclaimingSpawn, node: str, kept: Mapping[str, int]) -> None:
        (self._supposed.lending if self._lent else self._supposed.yielding)(kept, node)
        if node not in spawn.request.ineligible:
            self.helped.add(spawn.name)
        self._supposed.place(spawn.name, replace(spawn.request, ineligible=frozenset()), node)


def _still_needed(
    session: SessionReport, report: Report, waiting: Sequence[ReclaimingSpawn], helped: Collection[str]
) -> bool:
    """Return whether a waiting spawn could use the GPUs of a session that yields. ``helped``: see `SupposedGpus`."""
    models = {gpu.model for gpu in report.gpus if gpu.uuid in session.gpus}
    requests = [
        spawn.request
        for spawn in waiting
        if report.node not in spawn.request.ineligible or (spawn.anywhere and spawn.name not in helped)
    ]
    return any(request.models is None or not models.isdisjoint(request.models) for request in requests)


def _server_starts(session: SessionReport, report: Report) -> bool:
    """Return whether a server that is placed on the session's GPUs is still starting, and may need the units."""
    return any(not other.confirmed and not set(other.gpus).isdisjoint(session.gpus) for other in report.sessions)


_NO_ACCOUNT, _NO_QUOTAS = Account("", Quota()), Quotas()
"""The account of all spawns that need idle units. Quotas do not apply, because owners keep the lent units."""


def candidates(
    reports: Sequence[Report], templates: Mapping[str, Template], now: float, use: RecentUse
) -> list[OverQuota]:
    """Return the idle sessions that a waiting spawn may need, with the units that due idle actions leave to them.

    The result is empty if no template takes idle shares only under pressure; the hub's list of spawns is then not
    needed.
    """
    idle_sessions, each = [], SessionTemplates.of(templates)
    for report in reports:
        for session in report.sessions:
            template = each.of_user(session.template, session.user)
            if template is None or template.idle.when != "pressure" or not session.confirmed:
                continue
            if holds(session.keep, now) or exempts(session.exemption, now):
                continue
            seen = use.observe(session.id, Observation.of(session))
            idle_seconds = now - seen.gpu_idle_since - first_work_delay(template.idle, seen)
            steps = [] if seen.gpu_in_use else list(_pressure_steps(template.idle, session, idle_seconds))
            if steps:
                since, held = seen.gpu_idle_since, session.effective_units
                idle_sessions.append(
                    OverQuota(session.id, session.id, report.node, held, steps, since, session.user, session.gpus)
                )
    return idle_sessions


def _pressure_steps(idle: Idle, session: SessionReport, seconds: float) -> Iterator[int]:
    """Yield the units left by each idle action whose notice is due after these idle seconds, in descending order."""
    for tier in (Tier.DOWNGRADED, Tier.RELEASED):
        after, units = idle.after(tier), idle.units(tier, session.share)
        if after is not None and seconds >= after - idle.warn_before and units < session.effective_units:
            yield units


def needed(
    idle_sessions: Sequence[OverQuota],
    reports: Sequence[Report],
    pending: Sequence[HubServer],
    templates: Mapping[str, Template],
    progress: ProgressOf = NO_PROGRESS,
) -> Mapping[str, int]:
    """Return the units that waiting spawns leave to the idle sessions, by session.

    As few users as possible lose units, and only needed units are taken. ``reports``: those of all agents;
    ``pending``: the hub's pending spawns, longest wait first; ``progress``: see `pressure`.
    """
    waiting = list(_asking(reports, pending, templates, progress))
    if not waiting or not idle_sessions:
        return {}
    ledger = LedgerFeed().follow(reports)
    placed = (session for session in idle_sessions if ledger.node_of(session.session) == session.node)
    return reclaimed(waiting, placed, SupposedGpus(ledger, lent=True))


def _asking(
    reports: Sequence[Report],
    pending: Sequence[HubServer],
    templates: Mapping[str, Template],
    progress: ProgressOf,
    account_of: Callable[[HubServer], Account | None] = lambda server: _NO_ACCOUNT,
    quotas: Quotas = _NO_QUOTAS,
) -> Iterator[Asking[ReclaimingSpawn]]:
    """Yield the waiting spawns with a known account that can use native units, which are useless to other layers.

    ``quotas``: those in force; they say whether sessions are stopped, see `ReclaimingSpawn.anywhere`. Nodes without CPU
    and memory for a spawn are ineligible.
    """
    anywhere = quotas.reclaim.stop_after is not None
    kinds = {(gpu.model, gpu.memory_bytes) for report in reports for gpu in report.gpus}
    names = frozenset(report.node for report in reports)
    for spawn in waiting_spawns(pending, reports, templates):
        account, gpu = account_of(spawn.server), spawn.template.gpu
        if account is not None and gpu is not None and SessionTemplates.of(templates).native(spawn.template):
            known = progress.get((spawn.server.user, spawn.server.name))
            nodes = known.nodes if known is not None else None
            request = PlacementRequest(
                gpu.share,
                models=suitable_models(gpu, kinds),
                template=spawn.template.name,
                conditions=Conditions.of(spawn.template),
                ineligible=frozenset() if nodes is None else names.difference(nodes),
            )
            needs = needs_of(spawn.template, quotas)
            yield Asking(ReclaimingSpawn(spawn.server.label, request, anywhere), account, needs)
