"""A used-up budget: sessions, new ones too, work in the background until hours are left or an admin grants some."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.model.control import TierRequest
from gpushare_spawner.model.controls import MessageCause
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.quota import BudgetStates, Quotas
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext, ActionRefused, Actor
from gpushare_spawner.service.budgets import Budgets
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.history.queries import Period, actions
from gpushare_spawner.service.history.recorder import History, HistorySources
from gpushare_spawner.service.history.store import HistoryStore
from gpushare_spawner.service.hub.client import Hub, HubServer
from gpushare_spawner.service.reports import MachineAgent, RecentReports
from tests.service.conftest import HOUR, MINUTE, Clock
from tests.service.fake_agent import FakeAgent

ADMIN = Actor("root", is_admin=True)
BUDGET = {"hours": 1, "window": "day"}
QUOTAS = {"groups": {"optics": {"guarantee": 1, "budget": BUDGET}}, "reclaim": {"notice": "1m"}}


class Service:
    """Culler, history and budgets of one service process."""

    def __init__(self, agent: FakeAgent, hub: Hub, clock: Clock, folder: Path, quotas: Quotas, **parts: Any) -> None:
        self.clock = clock
        templates: dict[str, Template] = parts["templates"]
        agents = [MachineAgent(agent.path)]
        self.context = ActionContext(
            agents, hub, lambda: templates, lambda action: self.history.record(action), clock=clock,
            quotas=lambda: self.quotas,
        )  # fmt: skip
        self.quotas = quotas
        sources = HistorySources(
            RecentReports(agents, 0.0).snapshots, lambda: (), self.context.pending, lambda: templates, clock, clock
        )
        self.history = History(HistoryStore(f"sqlite:///{folder}/history.sqlite"), sources)
        with_history = parts.get("with_history", True)
        self.file = folder / "budgets.json"
        self.budgets = Budgets(self.context, self.history if with_history else None, self.file)
        settings = CullerSettings(cull_every=1e-9, dry_run=parts.get("dry_run", False))
        self.culler = Culler(self.context, settings, used_up=self.budgets.used_up)

    async def minute(self, times: int = 1) -> None:
        for _ in range(times):
            await self.history.observe()
            await self.budgets.refresh()
            await self.culler.round()
            await self.history.store()
            self.clock.forward(MINUTE)


async def work(running: Service, agent: FakeAgent, minutes: int, *sessions: str) -> None:
    """Let sessions work for so long."""
    for _ in range(minutes):
        for session in sessions:
            agent.work(session)
        await running.minute()


MakeService = Callable[..., Service]


@pytest.fixture
def service(agent: FakeAgent, hub: Hub, clock: Clock, templates: dict[str, Template], tmp_path: Path) -> MakeService:
    """Makes a service: a second call is a restart after a kill."""
    never = {"idle": templates["quarter"].idle.model_copy(update={"downgrade_after": None, "downgrade_to": None})}
    lasting = {"quarter": templates["quarter"].model_copy(update=never)}

    def make(quotas: dict[str, Any] | None = None, **parts: Any) -> Service:
        given = Quotas.model_validate(QUOTAS if quotas is None else quotas)
        return Service(agent, hub, clock, tmp_path, given, templates=lasting, **parts)

    return make


def tiers(agent: FakeAgent) -> list[TierRequest]:
    return [request for request in agent.asked if isinstance(request, TierRequest)]


async def test_a_used_up_budget_takes_the_units_after_a_notice_and_no_kernel_ends(
    service: MakeService, agent: FakeAgent, clock: Clock
) -> None:
    ann, bob = agent.add("ann", quota="group:optics"), agent.add("bob", quota="group:other")
    running = service()
    # a quarter of a GPU has used a GPU-hour after four hours; ann works all the time
    for _ in range(4 * 60 - 2):
        agent.work(ann)
        agent.work(bob)
        await running.minute()
    assert agent.sessions[ann].tier is Tier.ACTIVE
    for _ in range(2):
        agent.work(ann)
        agent.work(bob)
        await running.minute()
    agent.work(ann)
    await running.minute()
    notice = agent.sessions[ann].notice
    assert notice is not None
    assert (notice.cause, notice.tier) == (IdleCause.BUDGET, Tier.RELEASED)
    agent.work(ann)
    await running.minute(2)
    session = agent.sessions[ann]
    assert (session.tier, session.effective_units, session.background, session.yields) == (Tier.RELEASED, 0, True, True)
    assert agent.sessions[bob].tier is Tier.ACTIVE
    assert [request.background for request in tiers(agent)] == [True]
    # it stays without units, while work goes on and beyond the agent's reservation
    for _ in range(60):
        agent.work(ann)
        await running.minute()
    assert agent.sessions[ann].background
    assert len(tiers(agent)) > 5
    [state] = running.budgets.states()
    assert state.used == pytest.approx(1, abs=0.03)


async def test_units_come_back_when_use_has_left_the_window(
    service: MakeService, agent: FakeAgent, clock: Clock
) -> None:
    ann = agent.add("ann", quota="group:optics")
    running = service()
    await work(running, agent, 5 * 60, ann)
    assert agent.sessions[ann].background
    clock.forward(20 * HOUR)
    for _ in range(3):
        agent.work(ann)
        agent.change(ann, gpu_busy=True)
        await running.minute()
    session = agent.sessions[ann]
    assert (session.tier, session.effective_units, session.background) == (Tier.ACTIVE, 25, False)


async def test_a_session_opened_after_that_has_no_units_at_once(
    service: MakeService, agent: FakeAgent, clock: Clock
) -> None:
    ann = agent.add("ann", quota="group:optics")
    running = service()
    await work(running, agent, 5 * 60, ann)
    eve = agent.add("eve", quota="group:optics")
    agent.work(eve)
    await running.culler.round()
    await running.culler.round()
    assert agent.sessions[eve].background
    assert clock() == agent.sessions[eve].tier_since


async def test_a_share_that_an_idle_action_has_released_does_not_come_back_by_work(
    service: MakeService, agent: FakeAgent
) -> None:
    ann = agent.add("ann", quota="group:optics")
    running = service()
    agent.change(ann, gpu_seconds=1.0, last_gpu_activity=agent.clock())
    await running.minute(50)
    assert (agent.sessions[ann].tier, agent.sessions[ann].background) == (Tier.RELEASED, False)
    running.quotas = Quotas.model_validate({"groups": {"optics": {"budget": {"hours": 0.1, "window": "day"}}}})
    await running.minute(2)
    assert (agent.sessions[ann].tier, agent.sessions[ann].background) == (Tier.RELEASED, True)
    agent.work(ann, 60)
    assert agent.sessions[ann].effective_units == 0


async def test_a_killed_service_goes_on_with_what_was_used_and_granted(
    service: MakeService, agent: FakeAgent, clock: Clock
) -> None:
    ann = agent.add("ann", quota="group:optics")
    running = service()
    await work(running, agent, 2 * 60, ann)
    await running.budgets.grant(("group:optics", ""), ADMIN, 2.0, clock() + 10 * HOUR, "Paper deadline")
    [before] = running.budgets.states()
    again = service()
    await again.history.store()
    await again.budgets.refresh()
    [after] = again.budgets.states()
    assert [after.used, after.granted] == pytest.approx([before.used, 2.0])
    clock.forward(10 * MINUTE)
    await again.minute()
    [later] = again.budgets.states()
    assert later.used == pytest.approx(
        before.used + 0.25 * (clock() - MINUTE - 1_000_000 - 119 * MINUTE) / HOUR, rel=1e-3
    )


async def test_a_grant_gives_the_units_back_for_its_time_and_is_in_the_log_of_actions(
    service: MakeService, agent: FakeAgent, clock: Clock
) -> None:
    ann = agent.add("ann", quota="group:optics")
    running = service()
    await work(running, agent, 5 * 60, ann)
    outcome = await running.budgets.grant(("group:optics", ""), ADMIN, 3.0, clock() + 2 * HOUR, "Paper deadline")
    assert outcome.changed
    agent.change(ann, gpu_busy=True)
    await running.minute(2)
    assert agent.sessions[ann].tier is Tier.ACTIVE
    [logged] = [
        action
        for _, action in await running.history.ask(lambda c: actions(c, Period(0, 1e12), 50))
        if action.action == "grant"
    ]
    assert (logged.actor, logged.group) == ("root", "optics")
    assert "3.00 GPU-hours more" in logged.reason
    assert "Paper deadline" in logged.reason
    await running.minute(130)
    assert agent.sessions[ann].background
    assert not (await running.budgets.end_grant(("group:optics", ""), ADMIN)).changed


async def test_grants_that_cannot_be_are_refused(service: MakeService, clock: Clock) -> None:
    running = service()
    await running.budgets.refresh()
    for owner, until in ((("group:other", ""), clock() + 1), (("group:optics", "ann"), clock() + 1)):
        with pytest.raises(ActionRefused, match="GET quotas lists all budgets"):
            await running.budgets.grant(owner, ADMIN, 1.0, until)
    running.quotas = Quotas.model_validate({"default": {"budget": BUDGET, "per_user": {"budget": BUDGET}}} | QUOTAS)
    await running.budgets.refresh()
    for owner in (("optics", ""), ("grop:optics", "ann"), ("default:", ""), ("default:eve", "ann")):
        with pytest.raises(ActionRefused, match="GET quotas lists all budgets"):
            await running.budgets.grant(owner, ADMIN, 1.0, clock() + 1)
    assert (await running.budgets.grant(("default:eve", "eve"), ADMIN, 1.0, clock() + 1)).changed
    with pytest.raises(ActionRefused, match="give a time in the future"):
        await running.budgets.grant(("group:optics", ""), ADMIN, 1.0, clock())


async def test_users_are_told_what_is_left(service: MakeService, agent: FakeAgent, clock: Clock) -> None:
    ann, bob = agent.add("ann", quota="group:optics"), agent.add("bob", quota="group:other")
    running = service()
    await work(running, agent, 60, ann)
    await running.budgets.notify()
    [message] = agent.sessions[ann].messages
    assert (message.cause, message.text) == (MessageCause.BUDGET, "0.75 of 1.00 GPU-hours left in 24 h (group optics)")
    assert agent.sessions[bob].messages == ()
    agent.asked.clear()
    await running.minute()
    await running.budgets.notify()
    assert not [request for request in agent.asked if request.op == "message"], "the text changes in steps of 5 %"
    written = BudgetStates.model_validate_json(running.file.read_bytes())
    [state] = written.budgets
    assert (state.account, state.hours) == ("group:optics", 1)
    assert oct(running.file.stat().st_mode & 0o777) == "0o600"
    running.quotas = Quotas()
    await running.budgets.refresh()
    await running.budgets.notify()
    assert agent.sessions[ann].messages == ()
    assert json.loads(running.file.read_text())["written_at"] == clock()


async def test_without_a_history_budgets_are_not_in_force_and_admins_read_why(
    service: MakeService, agent: FakeAgent
) -> None:
    agent.add("ann", quota="group:optics")
    running = service({"groups": {"optics": {"budget": {"hours": 0, "window": "day"}}}}, with_history=False)
    await running.budgets.refresh()
    await running.culler.round()
    assert running.budgets.states() == []
    assert "need the history" in running.budgets.problem
    assert tiers(agent) == []


async def test_an_older_agent_gives_the_session_the_lowest_weight(service: MakeService, agent: FakeAgent) -> None:
    agent.older = True
    ann = agent.add("ann", quota="group:optics")
    running = service({"groups": {"optics": {"budget": {"hours": 0, "window": "day"}}}})
    await running.minute(3)
    session = agent.sessions[ann]
    assert (session.tier, session.yields, session.background) == (Tier.RELEASED, True, False)
    sent = len(tiers(agent))
    await running.minute(2)
    assert len(tiers(agent)) == sent, "not in every round"


async def test_a_dry_run_takes_nothing(service: MakeService, agent: FakeAgent) -> None:
    ann = agent.add("ann", quota="group:optics")
    running = service({"groups": {"optics": {"budget": {"hours": 0, "window": "day"}}}}, dry_run=True)
    await running.minute(5)
    assert (agent.sessions[ann].tier, tiers(agent)) == (Tier.ACTIVE, [])


async def test_no_session_makes_way_for_a_spawn_with_a_used_up_budget(service: MakeService, agent: FakeAgent) -> None:
    running = service({"groups": {"optics": {"budget": {"hours": 0, "window": "day"}}, "other": {}}})
    await running.budgets.refresh()
    waiting = [HubServer(user, "", ready=False, pending="spawn", quota=quota) for user, quota in
               (("ann", "optics"), ("bob", "other"))]  # fmt: skip

    async def pending() -> list[HubServer]:
        return waiting

    assert await running.budgets.within(pending)() == waiting[1:]


async def test_a_service_that_has_not_read_the_use_yet_leaves_sessions_as_they_are(
    service: MakeService, agent: FakeAgent
) -> None:
    ann = agent.add("ann", quota="group:optics")
    running = service({"groups": {"optics": {"budget": {"hours": 0, "window": "day"}}}})
    await running.minute(3)
    assert agent.sessions[ann].background
    agent.asked.clear()
    again = service({"groups": {"optics": {"budget": {"hours": 0, "window": "day"}}}})
    await again.culler.round()
    assert tiers(agent) == []
    await again.minute()
    assert agent.sessions[ann].background
    again.quotas = Quotas()
    await again.minute(2)
    assert not agent.sessions[ann].background, "budgets were removed from the file"


async def test_a_clock_that_was_ahead_for_a_while_gives_no_hours_back(
    service: MakeService, agent: FakeAgent, clock: Clock
) -> None:
    ann = agent.add("ann", quota="group:optics")
    running = service()
    await work(running, agent, 3 * 60, ann)
    [before] = running.budgets.states()
    clock.forward(48 * HOUR)
    await running.budgets.refresh()
    assert running.budgets.states()[0].used == 0
    clock.forward(-48 * HOUR)
    await running.budgets.refresh()
    assert running.budgets.states()[0].used == pytest.approx(before.used, rel=0.05)


async def test_a_group_counts_use_whose_users_the_history_has_forgotten(
    service: MakeService, agent: FakeAgent, clock: Clock
) -> None:
    budget = {"hours": 1, "window": "week"}
    quotas = {"groups": {"optics": {"budget": budget, "per_user": {"budget": budget}}}}
    ann = agent.add("ann", quota="group:optics")
    running = service(quotas)
    await work(running, agent, 3 * 60, ann)
    used = {(state.account, state.user): state.used for state in running.budgets.states()}
    agent.sessions.clear()
    clock.forward(3 * 24 * HOUR)
    HistoryStore(f"sqlite:///{running.file.parent}/history.sqlite").thin(clock(), detail=0, names=24 * HOUR, keep=0)
    again = service(quotas)
    await again.budgets.refresh()
    [state] = again.budgets.states()
    assert (state.account, state.user) == ("group:optics", "")
    assert state.used == pytest.approx(used["group:optics", ""], rel=0.05)


async def test_sessions_on_another_layer_have_no_tiers_and_keep_their_units(
    service: MakeService, agent: FakeAgent
) -> None:
    running = service({"groups": {"optics": {"budget": {"hours": 0, "window": "day"}}}})
    await running.budgets.refresh()
    ann, bob = agent.add("ann", quota="group:optics"), agent.add("bob", quota="group:optics")
    agent.change(bob, layer=LayerName.MPS)
    assert set(running.budgets.used_up(agent.sessions.values()) or ()) == {ann}
