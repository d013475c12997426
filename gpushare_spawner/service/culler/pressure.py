"""Determines the units of running sessions that waiting spawns need, from the hub's list and the agents' reports. Pure.

There are two cases. Spawns in quota reclaim units of sessions over quota. Waiting spawns need units of idle sessions
whose templates take idle shares only under pressure. `quota.reclaim` selects the sessions; `idle.policy` decides when
their idle actions are due: `idle.policy.reclaim_action` applies the notice period (`model.quota.Reclaim.notice`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from gpushare_spawner.idle.keep import exempts, keep_in_force
from gpushare_spawner.idle.policy import UnitsNeeded, first_work_delay
from gpushare_spawner.idle.use import Observation, RecentUse
from gpushare_spawner.model.control import QueueProgress
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.quota import Quota, Quotas, Reclaim
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.share import IdleCause, Tier, units_on
from gpushare_spawner.model.template import Idle, Template
from gpushare_spawner.placement.feed import LedgerFeed, SupposedLedger
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.node import Allocation, guaranteed_units
from gpushare_spawner.placement.request import Conditions, PlacementRequest, suitable_models
from gpushare_spawner.quota.accounts import Account, QuotaAccounts, QuotaUsage, needs_of
from gpushare_spawner.quota.entitlement import LEAST_EXCHANGED, MINIMUM_RUN, Entitlements, Exchanging, exchanged
from gpushare_spawner.quota.order import Asking, divided, lacks_half
from gpushare_spawner.quota.reclaim import NORMAL, MissingUnits, OverQuota, in_excess, reclaimed
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.service.reports import KnownReport
from gpushare_spawner.service.templates import SessionTemplates
from gpushare_spawner.service.waiting import account_of, in_order, quota_use, waiting_spawns


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

NO_NOTICE = Reclaim(notice=0.0, stop_after=None)
"""Rules for a session that was opened after its budget was used up: the form said so."""


def without_budget(
    needs: Pressure, reports: Iterable[Report], used_up: Mapping[str, float], rules: Reclaim
) -> Pressure:
    """Return the pressure with the sessions whose budgets are used up: they have no units while that lasts.

    ``used_up``: since when, in seconds since the epoch, by session. ``needs`` was computed without these sessions.
    """
    reclaimed, free_again, kept_on = dict(needs.reclaimed), set(needs.free_again), set(needs.kept_on)
    notified = rules.model_copy(update={"stop_after": None})
    for session in [session for report in reports for session in report.sessions]:
        if session.id in used_up:
            session_rules = NO_NOTICE if session.begun > used_up[session.id] else notified
            reclaimed[session.id] = UnitsNeeded(0, session_rules, IdleCause.BUDGET)
            free_again.discard(session.id)
            kept_on.add(session.id)
        elif session.background:
            reclaimed.pop(session.id, None)
            kept_on.discard(session.id)
            free_again.add(session.id)
    return replace(needs, reclaimed=reclaimed, free_again=frozenset(free_again), kept_on=frozenset(kept_on))


def within_budget(report: KnownReport, used_up: Container[str]) -> KnownReport:
    """Return a report without the sessions whose budgets are used up: their units are as good as free."""
    kept = tuple(session for session in report.sessions if session.id not in used_up)
    return report if len(kept) == len(report.sessions) else report.model_copy(update={"sessions": kept})


MOST_BY_WEIGHT = 8
"""Spawns over quota that get units in one round; the next round continues. Our value: with 5,000 sessions the plan for
each takes up to 0.1 s."""

ProgressOf = Mapping[tuple[str, str], QueueProgress]
"""The progress that the hub shows to the users of waiting spawns, by user and server name."""
NO_PROGRESS: ProgressOf = {}


def may_matter(reports: Sequence[Report], usage: QuotaUsage | None) -> bool:
    """Return whether the hub's list of pending spawns is needed, because reading it costs the hub a request.

    ``usage``: see `pressure`; None: no session makes way for a quota.
    """
    sessions = [session for report in reports for session in report.sessions]
    if any(session.yields for session in sessions):
        return True
    if usage is None:
        return False
    # without a session over quota, one in quota can still give units to one that lacks them
    lacking = any(session.most_units - session.guaranteed_units >= LEAST_EXCHANGED for session in sessions)
    return lacking or any(charge.needs.units for charge in usage.over_quota_sessions())


def pressure(
    quotas: Quotas | None,
    reports: Sequence[Report],
    pending: Sequence[HubServer],
    templates: Mapping[str, Template],
    now: float,
    use: RecentUse | None = None,
    silent: Sequence[Report] = (),
    progress: ProgressOf = NO_PROGRESS,
    usage: QuotaUsage | None = None,
) -> Pressure:
    """Return which sessions make way for spawns in quota, and for accounts that have less than they are entitled to.

    ``reports``: those of all available agents. ``pending``: the hub's pending spawns, longest wait first. ``use``: the
    GPU work that counted as use; None: all work. ``silent``: the last reports of other agents, which count only for the
    quotas. ``usage``: the use of the quotas; None: by the reports' sessions.
    ``progress``: the spawns' progress in the queue, with the nodes that have CPU and memory for them. A spawn
    whose quota is unknown, because the hub does not show the user's groups, reclaims no units.
    """
    yielding = [(report, session) for report in reports for session in report.sessions if session.yields]
    if quotas is None or not quotas.reclaim.enabled:
        return Pressure(free_again=frozenset(session.id for _, session in yielding))
    if usage is None:
        usage = quota_use(quotas, [*reports, *silent], templates)
    asking = list(
        _asking(reports, pending, templates, progress, lambda server: account_of(usage.accounts, server), quotas)
    )
    in_quota, others = divided(asking, usage)
    excess = _excess(usage.accounts, [*reports, *silent], asking)
    if not asking and not yielding and min(excess.values(), default=0.0) > -LEAST_EXCHANGED:
        return NO_PRESSURE
    ledger, use = LedgerFeed().follow(reports), use or RecentUse()
    gpus = SupposedGpus(ledger)
    can_make_way = list(_can_make_way(usage, reports, templates, now))
    over_quota = [
        candidate
        for candidate in _able_to_give(quotas, usage, can_make_way, now, use)
        if ledger.node_of(candidate.session) == candidate.node
    ]
    units_left = reclaimed(in_quota, over_quota, gpus)
    _count(units_left, over_quota, excess)
    for request in in_quota:
        excess[request.account.key] += request.needs.units
    remaining = [session for session in over_quota if session.session not in units_left]
    lacking, by_weight = _reclaimed_by_weight(others, remaining, gpus, excess)
    never_stopped = quotas.reclaim.model_copy(update={"stop_after": None})
    needs = {name: UnitsNeeded(units, never_stopped) for name, units in by_weight.items()}
    needs |= {name: UnitsNeeded(units, quotas.reclaim) for name, units in units_left.items()}
    free_again, reclaiming = set(), [request.spawn for request in in_quota]
    for report, session in yielding:
        rules = quotas.reclaim if _still_needed(session, report, reclaiming, gpus.helped) else never_stopped
        if exempts(session.exemption, now):
            free_again.add(session.id)
        elif rules is quotas.reclaim or _still_needed(session, report, lacking, gpus.helped):
            needs.setdefault(session.id, UnitsNeeded(session.effective_units, rules))
        elif not _server_starts(session, report):
            free_again.add(session.id)
    beyond = [
        (report, session, template)
        for report, session, template in _can_make_way(usage, reports, templates, now, in_quota=True)
        if excess[usage.accounts.find(session.quota, session.user).key] + session.most_units - session.effective_units
        >= LEAST_EXCHANGED
    ]
    able = [*over_quota, *_able_to_give(quotas, usage, beyond, now, use)]
    givers = {session.session: session for session in able if session.had_minimum_run}
    limited = {session.id for _, session, _ in [*can_make_way, *beyond]} - needs.keys()
    exchange = Exchange(ledger, usage, excess, givers, limited)
    for name, units in exchange.limits(reports, [*reclaiming, *lacking]):
        needs[name] = UnitsNeeded(units, never_stopped)
        free_again.discard(name)
    return Pressure(needs, frozenset(free_again), frozenset(session.id for _, session in yielding) - free_again)


def _reclaimed_by_weight(
    others: Iterable[Asking[ReclaimingSpawn]],
    over_quota: Sequence[OverQuota],
    gpus: SupposedGpus,
    excess: dict[str, float],
) -> tuple[list[ReclaimingSpawn], dict[str, int]]:
    """Return the spawns over quota with accounts that lack units, and the sessions that make way for them.

    Counts both in ``excess``. A spawn for which no GPU has enough units does not count: another one may start. At most
    `MOST_BY_WEIGHT` spawns count.
    """
    lacking: list[ReclaimingSpawn] = []
    units_left: dict[str, int] = {}
    in_vain: set[tuple[str, PlacementRequest]] = set()
    for request in others:
        key = (request.account.key, request.spawn.request)
        if not lacks_half(request, excess) or key in in_vain:
            continue
        if len(lacking) == MOST_BY_WEIGHT:
            break
        remaining = [session for session in over_quota if session.session not in units_left]
        able = list(in_excess(remaining, excess, -excess[request.account.key], request.needs.units))
        taken = reclaimed([request], able, gpus)
        if request.spawn.name in gpus.helped:
            _count(taken, remaining, excess)
            units_left |= taken
            excess[request.account.key] += request.needs.units
            lacking.append(request.spawn)
        else:
            in_vain.add(key)
    return lacking, units_left


def _count(units_left: Mapping[str, int], sessions: Iterable[OverQuota], excess: dict[str, float]) -> None:
    """Deduct the units that sessions give up from the excess of their accounts."""
    for session in sessions:
        if session.session in units_left:
            excess[session.account] -= session.freed_on_all(session.units - units_left[session.session])


def _excess(
    accounts: QuotaAccounts, reports: Iterable[Report], asking: Iterable[Asking[ReclaimingSpawn]]
) -> defaultdict[str, float]:
    """Return the units that each account has beyond its entitlement, see `Entitlements.excess`.

    Of a GPU that accepts no new sessions, only the units that sessions have there are divided: no account can get the
    others.
    """
    entitlements, capacity = Entitlements(), 0
    for report in reports:
        has: Counter[str] = Counter()
        for session in report.sessions:
            on_each = {gpu: session.on(gpu) for gpu in session.gpus}
            has.update({gpu: here.guaranteed_units for gpu, here in on_each.items()})
            account = accounts.find(session.quota, session.user)
            units = sum(here.guaranteed_units for here in on_each.values())
            entitlements.add(account, units, sum(here.most_units for here in on_each.values()))
        capacity += sum(
            gpu.capacity_units if gpu.healthy and not gpu.cordoned else min(has[gpu.uuid], gpu.capacity_units)
            for gpu in report.gpus
        )
    for request in asking:
        entitlements.add(request.account, 0, request.needs.units)
    return defaultdict(float, entitlements.excess(capacity))


class Exchange:
    """The exchange of units between the sessions of each GPU, until each account has what it is entitled to.

    ``givers``: sessions that can lose units now. ``limited``: those that can be limited to what they have.
    """

    def __init__(
        self,
        ledger: Ledger,
        usage: QuotaUsage,
        excess: Mapping[str, float],
        givers: Mapping[str, OverQuota],
        limited: Set[str],
    ) -> None:
        self._ledger = ledger
        self._usage = usage
        self._excess = excess
        self._givers = givers
        self._limited = limited

    def limits(self, reports: Iterable[Report], waiting: Sequence[ReclaimingSpawn]) -> Iterator[tuple[str, int]]:
        """Yield the sessions that are limited to less than their shares, and the units that each gets.

        ``waiting``: the spawns that units without an owner are kept for. GPUs on which a server starts, or a session
        makes way for a spawn, take no part; a session that has one of them neither gives nor gets units.
        """
        on_gpu: dict[str, list[SessionReport]] = {}
        free: dict[str, int] = {}
        for report in reports:
            for gpu in report.gpus:
                here = [session for session in report.sessions if gpu.uuid in session.gpus]
                if gpu.mig is None and here and all(map(self._takes_part, here)):
                    on_gpu[gpu.uuid] = here
                    if not any(_could_use(spawn, report.node, gpu.model) for spawn in waiting):
                        free[gpu.uuid] = self._ledger.free_units(gpu.uuid)
        sharing = {session.id: session for here in on_gpu.values() for session in here}
        able = {name for name in sharing if on_gpu.keys() >= set(self._ledger.allocations[name].gpus)}
        harmed: set[str] = set()
        while True:
            exchanging = {name: self._exchanging(session, name in able) for name, session in sharing.items()}
            for giver in exchanging.values():
                if giver.account in harmed:
                    giver.least = giver.units
            exchanged(exchanging.values(), self._excess, free)
            held = self._held(on_gpu, exchanging, able)
            more = self._harmed(on_gpu, exchanging, held) - harmed
            if not more:
                break
            harmed |= more
        for name, session in sharing.items():
            allocation, limit = self._ledger.allocations[name], held[name].effective_units
            if limit < session.most_units and (allocation.yields or limit < allocation.effective_units):
                yield name, limit

    def _held(
        self, on_gpu: Mapping[str, Sequence[SessionReport]], exchanging: Mapping[str, Exchanging], able: Set[str]
    ) -> Mapping[str, Allocation]:
        """Return the allocations with which the sessions get their new units. Units left go to the oldest."""
        allocations, limited = self._ledger.allocations, self._limited & able
        held = {
            name: allocations[name].with_effective(session.most) if name in able else allocations[name]
            for name, session in exchanging.items()
        }
        left = list(on_gpu)
        while left:
            gpu = left.pop()
            here = [exchanging[session.id] for session in on_gpu[gpu]]
            gets = guaranteed_units(
                self._ledger.capacity.gpus[gpu].capacity, [held[session.session].on(gpu) for session in here]
            )
            lack = any(gets[session.session] < session.on(gpu) for session in here)
            for session in here:
                name = session.session
                above = held[name].effective_units > session.units and gets[name] > session.on(gpu)
                if name in limited and above and (lack or allocations[name].yields):
                    held[name] = held[name].with_effective(session.units)
                    left += session.gpus
        return held

    def _harmed(
        self,
        on_gpu: Mapping[str, Sequence[SessionReport]],
        exchanging: Mapping[str, Exchanging],
        held: Mapping[str, Allocation],
    ) -> set[str]:
        """Return the accounts that would lose units to which they are entitled.

        An account between two others gives units to one and gets as many from the other. It would not get them if an
        older session that cannot be limited came first.
        """
        gets: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for gpu, here in on_gpu.items():
            capacity = self._ledger.capacity.gpus[gpu].capacity
            units_here = guaranteed_units(capacity, [held[session.id].on(gpu) for session in here])
            for name, units in units_here.items():
                gets[name][gpu] = units
        balance = Counter[str]()
        for name, by_gpu in gets.items():
            if len(by_gpu) == len(held[name].gpus):
                before = self._ledger.guaranteed_on(name)
                balance[exchanging[name].account] += sum(by_gpu.values()) - sum(before.values())
        return {
            account
            for account, change in balance.items()
            if change < 0 and self._excess[account] + change <= -LEAST_EXCHANGED
        }

    def _takes_part(self, session: SessionReport) -> bool:
        part = session.layer is LayerName.NATIVE and not session.neighbours.alone
        makes_way = session.yields and session.id not in self._limited
        return part and session.confirmed and not makes_way and self._ledger.node_of(session.id) is not None

    def _exchanging(self, session: SessionReport, able: bool) -> Exchanging:
        """Return a session of the exchange. ``able``: whether all its GPUs take part.

        If it has fewer units on one of its GPUs than its tier and the others allow, because their owners have reclaimed
        them, that GPU is as one with fewer units of the share. If it lacks units on several, it takes no part.
        """
        account = self._usage.accounts.find(session.quota, session.user).key
        units, in_quota = self._ledger.guaranteed(session.id), self._usage.in_quota(session.id)
        held = self._ledger.allocations[session.id]
        gpus, last, each = held.gpus, held.last_units, self._ledger.guaranteed_on(session.id)
        if able and any(here != units_on(gpu, gpus, units, last) for gpu, here in each.items()):
            fewest = min(gpus, key=lambda gpu: each[gpu])
            gpus = (*(gpu for gpu in gpus if gpu != fewest), fewest)
            able = each[fewest] > 0 and len({each[gpu] for gpu in gpus[:-1]}) == 1
            units, last = (each[gpus[0]], each[fewest]) if able else (units, last)
        most = max(units, session.most_units) if able else units
        giver = self._givers.get(session.id) if able and session.id in self._limited else None
        least, rank = (min(units, giver.steps[-1]), (giver.priority, *giver.rank)) if giver is not None else (units, ())
        return Exchanging(session.id, account, gpus, units, most, least, rank, last, in_quota)


@dataclass(frozen=True)
class ReclaimingSpawn:
    """A waiting spawn that reclaims units."""

    name: str
    request: PlacementRequest
    anywhere: bool = False
    """Whether sessions of ineligible nodes make way, so that they are stopped, if no others can."""


def _can_make_way(
    usage: QuotaUsage, reports: Sequence[Report], templates: Mapping[str, Template], now: float, in_quota: bool = False
) -> Iterator[tuple[Report, SessionReport, Template | None]]:
    """Yield the sessions over quota, or in quota. In a dry run a session keeps its units, but others can make way."""
    each = SessionTemplates.of(templates)
    for report in reports:
        for session in report.sessions:
            if not session.confirmed or not session.gpus or usage.in_quota(session.id) != in_quota:
                continue
            template = each.of_user(session.template, session.user)
            if not exempts(session.exemption, now) and (
                template is None or (template.reclaimable and not template.idle.dry_run)
            ):
                yield report, session, template


def _able_to_give(
    quotas: Quotas,
    usage: QuotaUsage,
    can_make_way: Iterable[tuple[Report, SessionReport, Template | None]],
    now: float,
    use: RecentUse,
) -> Iterator[OverQuota]:
    """Yield those of the sessions that have units to give, with the units that they could keep."""
    for report, session, template in can_make_way:
        seen = use.observe(session.id, Observation.of(session))
        idle = not seen.gpu_in_use and now - seen.gpu_idle_since >= quotas.reclaim.idle_after
        least = 0 if idle else quotas.reclaim.active_units
        if session.effective_units <= least:
            continue
        notified = session.notice is not None and session.notice.cause is IdleCause.RECLAIM
        since = max(session.begun, session.tier_since)
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
            had_minimum_run=notified or not 0 <= now - since < MINIMUM_RUN,
            priority=template.rank if template is not None else NORMAL,
            last_units=session.share.last_units,
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
        if node is None:
            placement = self._ledger.place(replace(spawn.request, left_out=frozenset(changed)))
            if placement is None or self._supposed.place(spawn.name, spawn.request, placement.node) is None:
                return None
            node = placement.node
        self.helped.add(spawn.name)
        return node

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
                # with fewer units on the last GPU, each can be the last
                for last in able if demand.last_units else able[:1]:
                    of_last = {last: ledger.missing_units(last, demand.least_units)}
                    yield MissingUnits(demand.count, missing | of_last, last_resort)

    def make_way(self, spawn: ReclaimingSpawn, node: str, units_left: Mapping[str, int]) -> None:
        (self._supposed.lending if self._lent else self._supposed.yielding)(units_left, node)
        if node not in spawn.request.ineligible:
            self.helped.add(spawn.name)
        self._supposed.place(spawn.name, replace(spawn.request, ineligible=frozenset()), node)


def _still_needed(
    session: SessionReport, report: Report, waiting: Sequence[ReclaimingSpawn], helped: Collection[str]
) -> bool:
    """Return whether a waiting spawn could use the GPUs of a session that yields. ``helped``: see `SupposedGpus`."""
    models = {gpu.model for gpu in report.gpus if gpu.uuid in session.gpus}
    return any(
        _could_use(spawn, report.node, model, spawn.anywhere and spawn.name not in helped)
        for spawn in waiting
        for model in models
    )


def _could_use(spawn: ReclaimingSpawn, node: str, model: str, anywhere: bool = False) -> bool:
    """Return whether a spawn can use units of a node's GPUs of one model. ``anywhere``: on ineligible nodes too."""
    request = spawn.request
    return (anywhere or node not in request.ineligible) and (request.models is None or model in request.models)


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
            if keep_in_force(session.keep, now) or exempts(session.exemption, now):
                continue
            seen = use.observe(session.id, Observation.of(session))
            idle_seconds = now - seen.gpu_idle_since - first_work_delay(template.idle, seen)
            steps = [] if seen.gpu_in_use else list(_pressure_steps(template.idle, session, idle_seconds))
            if steps:
                since, held, last = seen.gpu_idle_since, session.effective_units, session.share.last_units
                key = session.id, session.id, report.node
                idle_sessions.append(OverQuota(*key, held, steps, since, session.user, session.gpus, last_units=last))
    return idle_sessions


def _pressure_steps(idle: Idle, session: SessionReport, seconds: float) -> Iterator[int]:
    """Yield the units left by each idle action with its notice due after these idle seconds, in descending order."""
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
    anywhere, each = quotas.reclaim.stop_after is not None, SessionTemplates.of(templates)
    kinds = {(gpu.model, gpu.memory_bytes) for report in reports for gpu in report.gpus}
    names = frozenset(report.node for report in reports)
    waiting = sorted(waiting_spawns(pending, reports, templates), key=lambda spawn: -spawn.template.rank)
    for spawn in in_order(waiting, progress):
        account, gpu = account_of(spawn.server), spawn.template.gpu
        if account is not None and gpu is not None and each.native(spawn.template):
            answer = progress.get((spawn.server.user, spawn.server.name))
            nodes = answer.nodes if answer is not None else None
            request = PlacementRequest(
                gpu.share,
                models=suitable_models(gpu, kinds),
                template=spawn.template.name,
                conditions=Conditions.of(spawn.template),
                ineligible=frozenset() if nodes is None else names.difference(nodes),
            )
            needs = needs_of(spawn.template, quotas)
            yield Asking(
                ReclaimingSpawn(spawn.server.label, request, anywhere), account, needs, spawn.template.reclaimable
            )
