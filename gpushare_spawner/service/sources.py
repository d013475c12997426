"""Snapshots of all data for pages, the API and metrics, and their sources: agents, hub, templates, culler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gpushare_spawner.model.quota import BudgetState, Quotas
from gpushare_spawner.model.report import GpuReport, SessionReport, doubled_gpus
from gpushare_spawner.model.template import Template
from gpushare_spawner.quota.accounts import QuotaUsage
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.service.reports import KnownReport, NodeSnapshot, RecentReports, answered
from gpushare_spawner.service.units import KINDS, Kind, Segment, UnitsToOwn, gpu_bar, units_of
from gpushare_spawner.service.waiting import (
    QueueProgressOf,
    WaitingSpawn,
    in_order,
    progress_unknown,
    quota_use,
    waiting_spawns,
)
from gpushare_spawner.wording.service import cannot_stop

AVAILABLE: tuple[Kind, ...] = ("lent", "free")
"""The kinds of units that a new session can get."""


@dataclass(frozen=True)
class ServiceSnapshot:
    """The reports, decisions, templates and queue at one instant."""

    taken_at: float
    """Seconds since the epoch."""
    snapshots: Sequence[NodeSnapshot] = ()
    decisions: Sequence[SessionDecision] = ()
    templates: Mapping[str, Template] = field(default_factory=dict)
    pending: Sequence[HubServer] | None = None
    """The servers that the hub is starting; None: unknown."""
    waiting: Sequence[WaitingSpawn] | None = None
    """The waiting spawns; None: unknown."""
    quotas: Quotas | None = None
    servers: Sequence[HubServer] = ()
    """The hub's servers that count in the quotas."""
    budgets: Sequence[BudgetState] = ()
    """The state of each budget."""
    notes: Sequence[str] = ()
    """Sentences for callers that see all sessions."""
    version: int = 0
    """Version number, which increases with each change."""
    orders: dict[str, list[SessionDecision]] = field(default_factory=dict)
    """Cache of `api.reading`: the rows in each requested order."""

    @cached_property
    def reports(self) -> list[KnownReport]:
        """The reports of the agents that answered."""
        return answered(self.snapshots)

    @cached_property
    def by_id(self) -> Mapping[str, SessionDecision]:
        """The sessions by id. Of two sessions with the same id, the younger."""
        return {row.session.id: row for row in sorted(self.decisions, key=lambda row: row.session.opened_at)}

    @cached_property
    def by_user(self) -> Mapping[str, list[SessionDecision]]:
        """The sessions of each user."""
        rows_by_user: dict[str, list[SessionDecision]] = {}
        for row in self.decisions:
            rows_by_user.setdefault(row.session.user, []).append(row)
        return rows_by_user

    @cached_property
    def to_own(self) -> UnitsToOwn:
        """Units for restart offers; none while spawns wait.

        A restarted session would wait behind those spawns, and free units may be held for one of them.
        """
        return UnitsToOwn(self.reports if not self.waiting else ())

    @cached_property
    def usage(self) -> QuotaUsage | None:
        """The use of the quotas; None if there are no quotas."""
        if self.quotas is None:
            return None
        return quota_use(self.quotas, self.reports, self.templates, self.servers)

    @cached_property
    def bars(self) -> Mapping[tuple[str, str], list[Segment]]:
        """The units of each GPU, by node and UUID."""
        return {(report.node, gpu.uuid): gpu_bar(gpu, on) for report, gpu, on in self._gpus()}

    @cached_property
    def units(self) -> Counter[Kind]:
        """The units of all GPUs, by kind."""
        total: Counter[Kind] = Counter()
        for report, gpu in self.counted_gpus:
            for kind in KINDS:
                total[kind] += units_of(self.bars[report.node, gpu.uuid], kind)
        return total

    @cached_property
    def counted_gpus(self) -> list[tuple[KnownReport, GpuReport]]:
        """Each GPU once, with its node's report. A GPU that several nodes report counts for its owner node."""
        node_of = {uuid: nodes[0] for uuid, nodes in doubled_gpus(self.reports).items()}
        return [
            (report, gpu)
            for report in self.reports
            for gpu in report.gpus
            if node_of.get(gpu.uuid, report.node) == report.node
        ]

    @cached_property
    def available_units(self) -> int:
        """The lent and free units of the GPUs that accept new sessions."""
        return sum(
            units_of(self.bars[report.node, gpu.uuid], kind)
            for report, gpu in self.counted_gpus
            if gpu.healthy and report.cordon() is None and report.cordon(gpu.uuid) is None
            for kind in AVAILABLE
        )

    def _gpus(self) -> Iterator[tuple[KnownReport, GpuReport, list[SessionReport]]]:
        for report in self.reports:
            on: dict[str, list[SessionReport]] = {}
            for session in report.allocated_to:
                for uuid in session.gpus:
                    on.setdefault(uuid, []).append(session)
            for gpu in report.gpus:
                yield report, gpu, on.get(gpu.uuid, [])


def _cannot_stop(reports: Sequence[KnownReport], templates: Mapping[str, Template]) -> Iterator[str]:
    """Yield a sentence for each agent that cannot stop processes although a template says so."""
    names = sorted(
        name
        for name, template in templates.items()
        if template.gpu is not None and template.gpu.bypass.action == "stop"
    )
    for report in reports if names else ():
        if report.stop_trouble is not None:
            yield cannot_stop(report.node, report.stop_trouble, names)


@dataclass(frozen=True)
class DashboardSources:
    """The sources of the pages and the API."""

    context: ActionContext
    reports: RecentReports
    decide: Callable[[Sequence[NodeSnapshot], Mapping[str, Template], float], list[SessionDecision]]
    """Function that returns the culler's decisions on the sessions of these reports at an instant."""
    notes: Callable[[], Sequence[str]] = lambda: ()
    """Function that returns sentences for admins: missing scopes, templates with errors."""
    progress: QueueProgressOf = progress_unknown
    budgets: Callable[[], Sequence[BudgetState]] = lambda: ()
    """Function that returns the state of each budget."""

    async def take(self, with_progress: bool = True) -> ServiceSnapshot:
        """Return a snapshot of all current data.

        ``with_progress``: whether to also request the progress that the hub shows to waiting spawns' users. Without any
        report, it is unknown which spawns wait.
        """
        context, snapshots = self.context, await self.reports.snapshots()
        reports, templates, instant = answered(snapshots), context.templates(), context.clock()
        decisions = self.decide(snapshots, templates, instant)
        pending = await context.pending()
        waiting: Sequence[WaitingSpawn] | None = None
        if pending is not None and reports:
            waiting = waiting_spawns(pending, reports, templates)
            if waiting and with_progress:
                waiting = in_order(waiting, await self.progress([spawn.server for spawn in waiting]))
        quotas, servers = context.quotas(), tuple(context.servers())
        notes = (*self.notes(), *_cannot_stop(reports, templates))
        return ServiceSnapshot(
            instant, snapshots, decisions, templates, pending, waiting, quotas, servers, self.budgets(), notes
        )
