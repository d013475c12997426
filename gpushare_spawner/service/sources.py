"""The sources of all data that pages and the API show: agents, hub, templates, culler."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpushare_spawner.idle.policy import UnitsNeeded
from gpushare_spawner.idle.use import DryRun, RecentUse
from gpushare_spawner.model.control import QueueProgress
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.counters import Counters
from gpushare_spawner.service.culler.decisions import CullerSettings, HubSnapshot, SessionDecision, decide_sessions
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.service.reports import NodeSnapshot, RecentReports
from gpushare_spawner.service.waiting import (
    PendingServers,
    WaitingSpawn,
    pending_unknown,
    waiting_spawns,
    with_progress,
)


async def _no_progress(waiting: Sequence[HubServer]) -> Mapping[tuple[str, str], QueueProgress]:
    return {}


@dataclass(frozen=True)
class DashboardSources:
    """The sources of the pages and the API."""

    reports: RecentReports
    templates: Callable[[], Mapping[str, Template]]
    hub_snapshot: Callable[[], HubSnapshot | None]
    counters: Counters
    notes: Callable[[], Sequence[str]] = lambda: ()
    """Sentences for admins: missing scopes, templates with errors."""
    pending: PendingServers = pending_unknown
    progress: Callable[[Sequence[HubServer]], Awaitable[Mapping[tuple[str, str], QueueProgress]]] = _no_progress
    """Returns the queue progress that the hub shows to the users of these spawns, by user and server name."""
    quotas: Callable[[], Quotas | None] = lambda: None
    """Returns the quotas in force; None if there are none."""
    claims: Callable[[], Mapping[str, UnitsNeeded]] = lambda: {}
    """Returns the units that spawns in quota need of sessions over quota, by session."""
    needed: Callable[[], Mapping[str, int]] = lambda: {}
    """Returns the units that waiting spawns leave to each idle session, if they need its units."""
    settings: CullerSettings = field(default_factory=CullerSettings)
    dry_run: DryRun = field(default_factory=DryRun)
    """The culler's record of a dry run."""
    use: RecentUse = field(default_factory=RecentUse)
    """The culler's record of recent use."""
    clock: Callable[[], float] = time.time

    async def now(self) -> tuple[list[NodeSnapshot], list[SessionDecision], Mapping[str, Template], float]:
        """Return the agents' snapshots, the decisions on their sessions, the templates, and the time of all these."""
        snapshots = await self.reports.snapshots()
        templates, instant = self.templates(), self.clock()
        decisions = decide_sessions(
            snapshots,
            self.hub_snapshot(),
            templates,
            instant,
            self.settings,
            self.claims(),
            self.dry_run,
            self.use,
            self.needed(),
        )
        return snapshots, decisions, templates, instant

    async def waiting(
        self, pending: Sequence[HubServer] | None, reports: Sequence[Report], templates: Mapping[str, Template]
    ) -> Sequence[WaitingSpawn] | None:
        """Return the ``pending`` spawns that wait; None: unknown.

        Without any report, it is unknown which spawns wait.
        """
        if pending is None or not reports:
            return None
        waiting = waiting_spawns(pending, reports, templates)
        return with_progress(waiting, await self.progress([spawn.server for spawn in waiting])) if waiting else waiting
