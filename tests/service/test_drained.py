"""Sessions on drained GPUs: told once, stopped in time, and not by a dry run."""

from __future__ import annotations

import pytest

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.controls import Exemption
from gpushare_spawner.model.cordon import Cordon
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.session_actions import SessionActions
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.settings import CullerSettings
from gpushare_spawner.service.history.events import Action
from gpushare_spawner.service.hub.client import Hub
from tests.service.conftest import HOUR, MINUTE, Clock
from tests.service.fake_agent import FakeAgent
from tests.service.fake_hub import FakeHub


class Draining:
    """A culler, and a machine with ann on GPU 0 and bob on GPU 1, of which GPU 0 is drained for an hour."""

    def __init__(
        self, agent: FakeAgent, hub: Hub, hub_server: FakeHub, templates: dict[str, Template], clock: Clock
    ) -> None:
        self.agent, self.hub_server, self.clock = agent, hub_server, clock
        self.recorded: list[Action] = []
        for user, gpu in (("ann", "GPU-0"), ("bob", "GPU-1")):
            agent.add(user, gpus=(gpu,), gpu_busy=True)
            hub_server.add(user, last_activity=clock())
        now = clock()
        agent.cordons = (
            Cordon(gpu="GPU-0", by="boss", reason="Fan.", since=now, drain=True, stop_at=now + HOUR),
            Cordon(gpu="GPU-1", by="boss", since=now),
        )
        self._agents = [AgentClient(agent.path)]
        self._hub, self._templates = hub, templates
        self.culler = self.another()

    def another(self, dry_run: bool = False) -> Culler:
        actions = SessionActions(
            self._agents, self._hub, lambda: self._templates, record=self.recorded.append, clock=self.clock
        )
        settings = CullerSettings(cull_every=1e-9, dry_run=dry_run)
        return Culler(self._agents, self._hub, lambda: self._templates, settings, actions=actions, clock=self.clock)

    def message(self, user: str) -> str | None:
        message = self.agent.sessions[user].message
        return message.text if message is not None else None


@pytest.fixture
def draining(agent: FakeAgent, hub: Hub, hub_server: FakeHub, templates: dict[str, Template], clock: Clock) -> Draining:
    return Draining(agent, hub, hub_server, templates, clock)


async def test_users_on_a_drained_gpu_are_told_once_and_those_on_a_cordoned_one_are_not(draining: Draining) -> None:
    again = await draining.culler.round()
    assert draining.message("ann") == (
        "GPU 0 of node fake is being taken out of service. Fan. Your server will be stopped in 1 h. Save your work, "
        "and restart it before then: it then runs elsewhere."
    )
    assert draining.message("bob") is None
    assert again is not None
    assert again <= draining.clock() + HOUR
    draining.clock.forward(MINUTE)
    await draining.culler.round()
    await draining.another().round()  # after a restart of the service
    assert [(action.action, action.actor, action.user) for action in draining.recorded] == [("message", "boss", "ann")]
    assert not draining.hub_server.deleted


async def test_a_session_that_comes_late_is_told_too(draining: Draining) -> None:
    draining.agent.add("zoe", gpus=("GPU-0",))
    await draining.culler.round()
    assert draining.message("zoe") == draining.message("ann")


async def test_a_busy_server_that_stays_is_stopped_in_time_and_once(draining: Draining) -> None:
    await draining.culler.round()
    draining.clock.forward(HOUR - 1)
    await draining.culler.round()
    assert not draining.hub_server.deleted
    draining.clock.forward(1)
    await draining.culler.round()
    await draining.culler.round()
    assert draining.hub_server.deleted == ["/users/ann/server"]
    assert [action.action for action in draining.recorded] == ["message", "stopped"]


async def test_a_session_that_is_exempt_is_told_and_stays(draining: Draining) -> None:
    draining.agent.change("ann", exemption=Exemption(by="boss"))
    await draining.culler.round()
    draining.clock.forward(2 * HOUR)
    await draining.culler.round()
    assert draining.message("ann")
    assert not draining.hub_server.deleted


async def test_a_dry_run_tells_nobody_and_stops_nothing(draining: Draining) -> None:
    await draining.another(dry_run=True).round()
    draining.clock.forward(2 * HOUR)
    await draining.another(dry_run=True).round()
    assert draining.message("ann") is None
    assert not draining.hub_server.deleted
