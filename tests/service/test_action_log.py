"""Each idle action is one line of the log, and an entry of the history."""

from __future__ import annotations

import logging
import shlex
from typing import Any

import pytest

from gpushare_spawner.model.control import AgentUnreachable
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext, line
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.history.store import Action
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.service.reports import KnownReport, MachineAgent
from tests.service.conftest import MINUTE, Clock, direct_hub
from tests.service.fake_agent import FakeAgent
from tests.service.fake_hub import FakeHub

hub = direct_hub


def pairs(text: str) -> dict[str, str]:
    """Read a line of ``name=value`` pairs as a log collector does."""
    return dict(pair.split("=", 1) for pair in shlex.split(text))


async def test_each_action_is_logged_with_its_figures_and_recorded(
    agent: FakeAgent,
    hub: Hub,
    hub_server: FakeHub,
    templates: dict[str, Template],
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent.add("ann", quota="group:optics")
    hub_server.add("ann", last_activity=clock())
    recorded: list[Action] = []
    settings = CullerSettings(cull_every=1e-9)
    one = Culler(
        ActionContext([MachineAgent(agent.path)], hub, lambda: templates, record=recorded.append, clock=clock), settings
    )
    caplog.set_level(logging.INFO, "gpushare.service.actions")
    for _ in range(9 * 60):
        await one.round()
        clock.forward(MINUTE)
        if hub_server.deleted:
            break
    assert [(action.action, action.units, action.cause) for action in recorded] == [
        ("downgraded", 10, "idle"),
        ("released", 0, "idle"),
        ("stopped", 0, "idle"),
    ]
    assert {(action.user, action.group, action.template, action.actor) for action in recorded} == {
        ("ann", "optics", "quarter", "culler")
    }
    lines = [pairs(record.getMessage()) for record in caplog.records if record.name == "gpushare.service.actions"]
    assert [one["action"] for one in lines] == ["downgraded", "released", "stopped"]
    assert lines[0]["units"] == "10"
    assert "15 min without GPU work" in lines[0]["reason"]
    assert lines[0].items() >= {"user": "ann", "template": "quarter", "node": "fake", "cause": "idle"}.items()


async def test_a_server_without_a_share_is_recorded_too(
    hub: Hub, hub_server: FakeHub, templates: dict[str, Template], clock: Clock
) -> None:
    hub_server.add("zoe", last_activity=clock() - 7200)
    recorded: list[Action] = []
    settings = CullerSettings(cull_every=1e-9, timeout=3600)
    await Culler(ActionContext([], hub, lambda: templates, record=recorded.append, clock=clock), settings).round()
    assert [(action.action, action.user, action.node) for action in recorded] == [("stopped", "zoe", "")]


@pytest.mark.parametrize("whole_service", [True, False])
async def test_a_dry_run_logs_each_action_once_and_does_nothing(
    agent: FakeAgent, hub: Hub, hub_server: FakeHub, templates: dict[str, Template], clock: Clock, whole_service: bool
) -> None:
    agent.add("ann")
    hub_server.add("ann", last_activity=clock())
    hub_server.add("zoe", last_activity=clock() - 7200)
    recorded: list[Action] = []
    if not whole_service:
        quarter = templates["quarter"]
        templates["quarter"] = quarter.model_copy(update={"idle": quarter.idle.model_copy(update={"dry_run": True})})
    settings = CullerSettings(cull_every=1e-9, timeout=3600 if whole_service else 0, dry_run=whole_service)
    one = Culler(
        ActionContext([MachineAgent(agent.path)], hub, lambda: templates, record=recorded.append, clock=clock), settings
    )
    for _ in range(9 * 60):
        await one.round()
        clock.forward(MINUTE)
    assert not [request for request in agent.asked if request.op != "report"]
    assert not hub_server.deleted
    assert all(action.dry_run for action in recorded)
    actions = [(action.user, action.action, action.units) for action in recorded]
    assert [action for action in actions if action[0] == "ann"] == [
        ("ann", "downgraded", 10),
        ("ann", "released", 0),
        ("ann", "stopped", 0),
    ]
    assert actions.count(("zoe", "stopped", 0)) == whole_service
    assert not one.counters.actions


class SometimesSilent:
    """An agent that does not answer while it is ``silent``."""

    def __init__(self, agent: MachineAgent) -> None:
        self._agent = agent
        self.silent = False
        self.send, self.carried_out, self.report_age = agent.send, agent.carried_out, agent.report_age

    async def report(self) -> KnownReport:
        if self.silent:
            raise AgentUnreachable("The agent is silent.")
        return await self._agent.report()


async def test_a_dry_run_says_nothing_again_after_an_agent_was_silent(
    agent: FakeAgent, hub: Hub, hub_server: FakeHub, templates: dict[str, Template], clock: Clock
) -> None:
    agent.add("ann")
    hub_server.add("ann", last_activity=clock())
    hub_server.add("zoe", last_activity=clock() - 7200)
    recorded: list[Action] = []
    settings = CullerSettings(cull_every=1e-9, timeout=3600, dry_run=True)
    node = SometimesSilent(MachineAgent(agent.path))
    one = Culler(ActionContext([node], hub, lambda: templates, record=recorded.append, clock=clock), settings)
    for silent in 20 * [False] + [True, False, False]:
        node.silent = silent
        await one.round()
        clock.forward(MINUTE)
    said = [(action.user, action.action) for action in recorded]
    assert sorted(said) == [("ann", "downgraded"), ("zoe", "stopped")]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"user": "ann"}, "user=ann"),
        ({"user": "a b=c"}, 'user="a b=c"'),
        ({"reason": 'said "no"\nand=left'}, r'reason="said \"no\"\nand=left"'),
        ({"dry_run": True}, "dry_run=true"),
    ],
)
def test_a_value_never_looks_like_another_pair_or_line(changes: dict[str, Any], expected: str) -> None:
    said = line(Action(1.0, "released", "culler", **changes))
    assert expected in said
    assert "\n" not in said
