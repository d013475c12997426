"""Joins what agents, hub and templates say about each session, and decides on the session's tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpushare_spawner.idle import Claim, Decision, DryRun, Observation, decide
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.culler.settings import CullerSettings
from gpushare_spawner.service.hub.client import HubServer, HubUser
from gpushare_spawner.service.reports import Agent, NodeSnapshot


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
) -> list[SessionDecision]:
    """Decide on all sessions of all agents that answered. ``hub`` is None where the hub did not answer.

    ``claims``: what spawns in quota need, by session. ``dry_run``: the state of sessions whose actions are not carried
    out.
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
        )
        for node in snapshots
        if node.report is not None
        for session in node.report.sessions
    ]


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
) -> SessionDecision:
    """Decide on one session. A stop that the settings forbid is neither decided nor announced."""
    template = templates.get(session.template)
    idle, max_age = template.idle if template is not None else None, settings.max_age
    if idle is not None and not settings.may_stop(session.server):
        idle, max_age = idle.model_copy(update={"stop_after": None}), 0.0
    if claim is not None and not settings.may_stop(session.server):
        claim = Claim(claim.units, claim.rules.model_copy(update={"stop_after": None}))
    observation = Observation.of(session, server.seen if server is not None else None)
    dry = settings.dry_run or (idle is not None and idle.dry_run)
    if dry and dry_run is not None:
        observation = dry_run.observe(session.id, observation)
    decision = decide(idle, observation, now, max_age, claim)
    return SessionDecision(
        agent, report.node, session, server, template, decision, now, observation, dry_run=dry, claim=claim
    )
