"""Joins what agents, hub and templates say about each session, and decides on the session's tier."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gpushare_spawner.idle import Claim, Decision, DryRun, Observation, RecentUse, decide
from gpushare_spawner.model.layers import LAYERS, IdleReach
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.template import Idle, Template
from gpushare_spawner.service.culler.settings import CullerSettings
from gpushare_spawner.service.hub.client import HubServer, HubUser
from gpushare_spawner.service.reports import Agent, NodeSnapshot
from gpushare_spawner.service.session_templates import SessionTemplates

OLD = 60.0
"""Seconds. Ours: with a report that is older all GPU work counts as use. A node's clock can differ by some seconds."""


@dataclass(frozen=True)
class HubSnapshot:
    """The hub's users, and their servers by (user, server name)."""

    users: tuple[HubUser, ...] = ()

    @property
    def servers(self) -> Mapping[tuple[str, str], HubServer]:
        return {(server.user, server.name): server for user in self.users for server in user.servers}


@dataclass(frozen=True)
class SessionDecision:
    """One session, what is known about it, and its decision."""

    agent: Agent
    node: str
    session: SessionReport
    server: HubServer | None
    template: Template | None
    decision: Decision
    decided_at: float
    """Seconds since the epoch."""
    observation: Observation
    """What the decision was made on; in a dry run with the tier and notice that the session would have."""
    dry_run: bool = False
    """The decision is not carried out."""
    claim: Claim | None = None
    """What spawns in quota that wait need of it."""

    @property
    def kept_by_short_work(self) -> bool:
        """Whether GPU work that is too short to count as use would have kept the share."""
        work, after = self.observation.short_work, self.template.idle.first_after if self.template is not None else None
        if work is None or after is None:
            return False
        return work.kept(after, self.decided_at - self.observation.gpu_idle_since)

    @property
    def name(self) -> str:
        """For logs: user, and server where it has a name."""
        return self.session.user + (f"/{self.session.server}" if self.session.server else "")


def decide_sessions(
    snapshots: Sequence[NodeSnapshot],
    hub: HubSnapshot | None,
    templates: Mapping[str, Template],
    now: float,
    settings: CullerSettings,
    claims: Mapping[str, Claim] | None = None,
    dry_run: DryRun | None = None,
    use: RecentUse | None = None,
    needed: Mapping[str, int] | None = None,
) -> list[SessionDecision]:
    """Decide on all sessions of all agents that answered. ``hub`` is None where the hub did not answer.

    ``claims``: what spawns in quota need, by session. ``dry_run``: the state of sessions whose actions are not carried
    out. ``use``: which GPU work counted as use; None: all. ``needed``: the idle sessions whose units a waiting spawn
    needs, with the units that it leaves them.
    """
    servers = hub.servers if hub is not None else {}
    claims = claims or {}

    def server_of(session: SessionReport) -> HubServer | None:
        return servers.get((session.user, session.server))

    return [
        decide_session(
            node.agent,
            node.report,
            session,
            server_of(session),
            templates,
            now,
            settings,
            claims.get(session.id),
            dry_run,
            use,
            (needed or {}).get(session.id),
        )
        for node in snapshots
        if node.report is not None
        for session in node.report.sessions
    ]


def within_reach(idle: Idle, reach: Collection[IdleReach]) -> Idle:
    """Return the idle actions that the session's sharing layer can carry out. A server can always be stopped."""
    left_out: dict[str, None] = {}
    if IdleReach.DOWNGRADE not in reach:
        left_out |= {"downgrade_after": None, "downgrade_to": None}
    if IdleReach.RELEASE not in reach:
        left_out |= {"release_after": None, "release_resources": None}
    return idle.model_copy(update=left_out) if left_out else idle


def take_note(
    use: RecentUse,
    snapshots: Sequence[NodeSnapshot],
    templates: Mapping[str, Template],
    now: float,
    settings: CullerSettings,
) -> None:
    """Add what new reports say of the sessions' GPU work. An old report adds nothing, and nothing is known then."""
    present, each = set(), SessionTemplates.of(templates)
    for snapshot in snapshots:
        report = snapshot.report
        if report is None or now - report.published_at > OLD:
            continue
        for session in report.sessions:
            template = each.of_user(session.template, session.user)
            if template is not None:
                rule = settings.use_rule(template.idle)
                use.update(session.id, Observation.of(session), report.published_at, rule)
                present.add(session.id)
    use.keep(present)


def decide_session(
    agent: Agent,
    report: Report,
    session: SessionReport,
    server: HubServer | None,
    templates: Mapping[str, Template],
    now: float,
    settings: CullerSettings,
    claim: Claim | None = None,
    dry_run: DryRun | None = None,
    use: RecentUse | None = None,
    leaves: int | None = None,
) -> SessionDecision:
    """Decide on one session. A stop that the settings forbid is neither decided nor announced.

    ``leaves``: the units that a spawn which waits leaves it; None: no spawn needs them.
    """
    each = SessionTemplates.of(templates)
    template = each.of_user(session.template, session.user)
    idle, max_age = template.idle if template is not None else None, settings.max_age
    if idle is not None:
        idle = within_reach(idle, LAYERS[session.layer].reach)
    if idle is not None and not settings.may_stop(session.server):
        idle, max_age = idle.model_copy(update={"stop_after": None}), 0.0
    if claim is not None and not settings.may_stop(session.server):
        claim = Claim(claim.units, claim.rules.model_copy(update={"stop_after": None}))
    observation = Observation.of(session, server.seen if server is not None else None)
    if use is not None:
        observation = use.observe(session.id, observation)
    dry = settings.dry_run or (idle is not None and idle.dry_run)
    if dry and dry_run is not None:
        observation = dry_run.observe(session.id, observation)
    waits_for_need = idle is not None and settings.only_under_pressure(idle)
    leaves = leaves if waits_for_need else None
    held = waits_for_need and leaves is None
    decision = decide(idle, observation, now, max_age, claim, held, each.quiet_until, leaves)
    return SessionDecision(
        agent, report.node, session, server, template, decision, now, observation, dry_run=dry, claim=claim
    )
