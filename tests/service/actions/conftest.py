"""Session actions against a scripted agent and hub."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gpushare_spawner.idle.keep import KeepRule
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext, Actor
from gpushare_spawner.service.history.recorder import History
from gpushare_spawner.service.history.store import Action
from gpushare_spawner.service.hub.client import Hub, HubServer
from gpushare_spawner.service.reports import MachineAgent
from tests.service.conftest import HOUR, Clock, with_keeps
from tests.service.fake_agent import FakeAgent

ANN = Actor("ann")
ROOT = Actor("root", is_admin=True)
RULE = KeepRule(longest=8 * HOUR, per_day=3, at_once=2)


@dataclass(frozen=True)
class Seen:
    """A session as a report had it."""

    agent: MachineAgent
    session: SessionReport
    node: str = "fake"


class Acting:
    """The actions, with what they entered in the history."""

    def __init__(
        self, agent: FakeAgent, hub: Hub, templates: dict[str, Template], clock: Clock, journal: History | None = None
    ) -> None:
        self.agent = agent
        self.recorded: list[Action] = []
        self.client = MachineAgent(agent.path)
        self.agents = [self.client]
        self.rule = RULE
        self.quotas: Quotas | None = None
        self.pending: list[HubServer] = []
        self.actions = ActionContext(
            self.agents,
            hub,
            lambda: with_keeps(templates, self.rule),
            self.recorded.append,
            clock,
            quotas=lambda: self.quotas,
            pending=self._pending,
            journal=journal,
        )

    def seen(self, user: str = "ann") -> Seen:
        """The session of a user, opened now where there is none."""
        if user not in self.agent.sessions:
            self.agent.add(user)
        return Seen(self.client, self.agent.sessions[user])

    async def _pending(self) -> list[HubServer]:
        return self.pending

    @property
    def history(self) -> list[tuple[str, str, str]]:
        """(action, actor, user) of what was entered."""
        return [(action.action, action.actor, action.user) for action in self.recorded]


@pytest.fixture
def acting(agent: FakeAgent, hub: Hub, templates: dict[str, Template], clock: Clock) -> Acting:
    return Acting(agent, hub, templates, clock)
