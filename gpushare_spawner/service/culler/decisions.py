"""Brings together what the agents, the hub and the templates say of each session, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpushare_spawner.idle import Decision, Observation, decide
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.culler.settings import CullerSettings
from gpushare_spawner.service.hub.client import HubServer, HubUser
from gpushare_spawner.service.reports import Agent, NodeView


@dataclass(frozen=True)
class HubView:
    """The hub's users, and their servers by (user, server name)."""

    users: tuple[HubUser, ...] = ()

    @property
    def servers(self) -> Mapping[tuple[str, str], HubServer]:
        return {(server.user, server.name): server for user in self.users for server in user.servers}


@dataclass(frozen=True)
class Looked:
    """One session, and what should be so for it."""

    agent: Agent
    node: str
    session: SessionReport
    server: HubServer | None
    template: Template | None
    decision: Decision

    @property
    def name(self) -> str:
        """For logs: user, and server where it has a name."""
        return self.session.user + (f"/{self.session.server}" if self.session.server else "")


def look(
    views: Sequence[NodeView],
    hub: HubView | None,
    templates: Mapping[str, Template],
    now: float,
    settings: CullerSettings,
) -> list[Looked]:
    """All sessions of all agents that answered. ``hub`` is None where the hub did not."""
    servers = hub.servers if hub is not None else {}
    return [
        look_at(view.agent, view.report, session, servers.get((session.user, session.server)), templates, now, settings)
        for view in views
        if view.report is not None
        for session in view.report.sessions
    ]


def look_at(
    agent: Agent,
    report: Report,
    session: SessionReport,
    server: HubServer | None,
    templates: Mapping[str, Template],
    now: float,
    settings: CullerSettings,
) -> Looked:
    """One session. Where servers like its own may not be stopped, that step is neither decided nor announced."""
    template = templates.get(session.template)
    idle, max_age = template.idle if template is not None else None, settings.max_age
    if idle is not None and not settings.may_stop(session.server):
        idle, max_age = idle.model_copy(update={"stop_after": None}), 0.0
    observation = Observation.of(session, server.seen if server is not None else None)
    decision = decide(idle, observation, now, max_age)
    return Looked(agent, report.node, session, server, template, decision)
