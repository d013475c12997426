"""Where pages and the API get what they show: agents, hub, templates, culler."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpushare_spawner.idle import DryRun, RecentUse, UnitsNeeded
from gpushare_spawner.model.control import QueueProgress
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.counters import Counters
from gpushare_spawner.service.culler.decisions import CullerSettings, HubSnapshot, SessionDecision, decide_sessions
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.service.reports import NodeSnapshot, RecentReports
from gpushare_spawner.service.waiting import WaitingSpawn, as_told, waiting_spawns


async def _unknown() -> None:
    """Nothing is known of pending spawns."""


async def _nothing_told(waiting: Sequence[HubServer]) -> Mapping[tuple[str, str], QueueProgress]:
    return {}


@dataclass(frozen=True)
class DashboardSources:
    """What the pages show, and where they get it."""

    reports: RecentReports
    templates: Callable[[], Mapping[str, Template]]
    hub_snapshot: Callable[[], HubSnapshot | None]
    counters: Counters
    notes: Callable[[], Sequence[str]] = lambda: ()
    """Sentences for admins: missing scopes, templates with errors."""
    pending: Callable[[], Awaitable[Sequence[HubServer] | None]] = _unknown
    """Returns the servers that the hub is starting; None: unknown."""
    told: Callable[[Sequence[HubServer]], Awaitable[Mapping[tuple[str, str], QueueProgress]]] = _nothing_told
    """Returns what the hub tells the users of these spawns, as far as it is known, by user and server name."""
    quotas: Callable[[], Quotas | None] = lambda: None
    """Returns those in force; None: there are none."""
    claims: Callable[[], Mapping[str, UnitsNeeded]] = lambda: {}
    """Returns what spawns in quota need of sessions over quota, by session."""
    needed: Callable[[], Mapping[str, int]] = lambda: {}
    """Returns the units that waiting spawns leave the idle sessions whose units they need."""
    settings: CullerSettings = field(default_factory=CullerSettings)
    dry_run: DryRun = field(default_factory=DryRun)
    """The culler's."""
    use: RecentUse = field(default_factory=RecentUse)
    """The culler's."""
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
        """Return the spawns that wait, of those that are ``pending``; None: unknown.

        Without any report it is unknown which of them wait.
        """
        if pending is None or not reports:
            return None
        waiting = waiting_spawns(pending, reports, templates)
        return as_told(waiting, await self.told([one.server for one in waiting])) if waiting else waiting
