"""Idle shares that are taken only while a spawn waits: through culler, hub and agent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpushare_spawner.idle.policy import NoAction
from gpushare_spawner.idle.use import RecentUse
from gpushare_spawner.model.controls import Exemption, Keep
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import LayersFile
from gpushare_spawner.model.share import NeighbourRules, Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings, decide_sessions
from gpushare_spawner.service.culler.pressure import candidates, needed
from gpushare_spawner.service.hub.client import Hub, HubServer
from gpushare_spawner.service.reports import KnownReport, MachineAgent, NodeSnapshot
from gpushare_spawner.service.templates import SessionTemplates
from tests.service.conftest import HOUR, MINUTE, Clock
from tests.service.dashboards import NO_AGENT
from tests.service.fake_agent import FakeAgent
from tests.service.fake_hub import FakeHub

EAGER = CullerSettings(cull_every=1e-9)
IDLE = {"when": "pressure", "release_after": "10m", "warn_before": "1m", "stop_after": "8h"}
HALF = Template.model_validate({"name": "half", "display_name": "H", "gpu": {"fraction": 0.5}, "idle": IDLE})
STEPS = Template.model_validate(
    {
        "name": "steps", "display_name": "S", "gpu": {"fraction": 0.5},
        "idle": {**IDLE, "downgrade_after": "5m", "downgrade_to": 0.1},
    }
)  # fmt: skip
H100 = Template.model_validate({"name": "h100", "display_name": "O", "gpu": {"fraction": 0.5, "models": ["H100*"]}})
SMALL = Template.model_validate({"name": "small", "display_name": "T", "gpu": {"fraction": 0.3}})
ALWAYS = Template.model_validate(
    {"name": "always", "display_name": "A", "gpu": {"fraction": 0.5}, "idle": {**IDLE, "when": "always"}}
)
HALVES = Template.model_validate({"name": "halves", "display_name": "2", "gpu": {"count": 2, "fraction": 0.5}})
MORE = Template.model_validate({"name": "more", "display_name": "1.5", "gpu": {"fraction": 1.5}})
TEMPLATES = {one.name: one for one in (HALF, STEPS, H100, SMALL, ALWAYS, HALVES, MORE)}


def waits(user: str, template: str = "half") -> HubServer:
    return HubServer(user, "", ready=False, pending="spawn", started=0.0, profile=template)


@pytest.fixture
def full(agent: FakeAgent, clock: Clock) -> FakeAgent:
    """Two GPUs, full of halves; ann has been idle for the longest time, then bob, cyd and dan."""
    for number, user in enumerate(("ann", "bob", "cyd", "dan")):
        half(agent, user, number // 2)
        clock.forward(MINUTE)
    return agent


def half(agent: FakeAgent, user: str, gpu: int, template: str = "half") -> str:
    return agent.add(
        user, template=template, share_units=50, effective_units=50, guaranteed_units=50, gpus=(f"GPU-{gpu}",)
    )


def now_needed(agent: FakeAgent, pending: Sequence[HubServer], now: float) -> list[str]:
    reports = [agent.report()]
    idle = candidates(reports, TEMPLATES, now, RecentUse())
    return sorted(session.split("/")[0] for session in needed(idle, reports, pending, TEMPLATES))


def names(agent: FakeAgent) -> dict[str, str]:
    return {session.user: name for name, session in agent.sessions.items()}


def test_nobody_is_needed_while_nobody_waits(full: FakeAgent, clock: Clock) -> None:
    clock.forward(HOUR)
    assert now_needed(full, [], clock()) == []


def test_the_longest_idle_session_is_needed_first_and_no_more_than_the_spawns_need(
    full: FakeAgent, clock: Clock
) -> None:
    clock.forward(HOUR)
    first, second = sorted(names(full).items(), key=lambda one: full.sessions[one[1]].opened_at)[:2]
    assert now_needed(full, [waits("eve")], clock()) == [first[1].split("/")[0]]
    assert now_needed(full, [waits("eve"), waits("fay")], clock()) == sorted(
        one[1].split("/")[0] for one in (first, second)
    )


def test_a_part_of_each_of_two_gpus_needs_no_more_than_that_on_each(full: FakeAgent, clock: Clock) -> None:
    clock.forward(HOUR)
    assert now_needed(full, [waits("eve", "halves")], clock()) == ["ann", "cyd"]
    assert now_needed(full, [waits("eve", "more")], clock()) == ["ann", "bob", "cyd"]
    full.change("bob", keep=Keep(until=clock() + 1, since=0, by="bob"))
    assert now_needed(full, [waits("eve", "more")], clock()) == ["ann", "cyd", "dan"], "the other GPU is the whole one"


def test_a_session_that_is_kept_or_exempt_is_passed_over_for_the_next_one(full: FakeAgent, clock: Clock) -> None:
    clock.forward(HOUR)
    full.change("ann", keep=Keep(until=clock() + 1, since=0, by="ann"))
    full.change("bob", exemption=Exemption(by="root"))
    assert now_needed(full, [waits("eve")], clock()) == ["cyd"]
    assert now_needed(full, [waits("eve")], clock() + 1) == ["ann"]


def test_a_spawn_that_fits_or_cannot_use_the_gpus_needs_nobody(full: FakeAgent, clock: Clock) -> None:
    clock.forward(HOUR)
    assert now_needed(full, [waits("eve", "h100")], clock()) == []
    del full.sessions[names(full)["dan"]]
    assert now_needed(full, [waits("eve")], clock()) == []


def test_a_spawn_that_another_layer_serves_needs_nobody(full: FakeAgent, clock: Clock) -> None:
    clock.forward(HOUR)
    kai = Template.model_validate({"name": "half", "display_name": "H", "gpu": {"fraction": 0.5, "layer": "kai"}})
    everywhere = LayersFile.model_validate({"rules": [{"layer": "hami"}]})
    reports = [full.report()]
    idle = candidates(reports, TEMPLATES, clock(), RecentUse())
    for templates in ({**TEMPLATES, "half": kai}, SessionTemplates(TEMPLATES, layers=everywhere)):
        assert needed(idle, reports, [waits("eve", "half")], templates) == {}
    some = LayersFile.model_validate({"rules": [{"models": ["*H100*"], "layer": "hami"}]})
    assert len(needed(idle, reports, [waits("eve")], SessionTemplates(TEMPLATES, layers=some))) == 1


def test_sessions_whose_layer_can_only_stop_them_are_not_needed(full: FakeAgent, clock: Clock) -> None:
    clock.forward(HOUR)
    for user in ("ann", "bob"):
        full.change(names(full)[user], layer=LayerName.MPS)
    assert now_needed(full, [waits("eve")], clock()) == ["cyd"]


def test_unused_units_beside_a_session_that_is_alone_are_not_free(full: FakeAgent, clock: Clock) -> None:
    clock.forward(HOUR)
    del full.sessions[names(full)["bob"]]
    full.change(names(full)["ann"], neighbours=NeighbourRules(alone=True), gpu_busy=True)
    assert now_needed(full, [waits("eve")], clock()) == ["cyd"]
    full.change(names(full)["ann"], gpu_busy=False)
    assert now_needed(full, [waits("eve")], clock()) == ["cyd"]


def test_sessions_that_work_or_were_idle_for_a_short_time_are_not_needed(full: FakeAgent, clock: Clock) -> None:
    assert now_needed(full, [waits("eve")], clock()) == []
    clock.forward(HOUR)
    for name in full.sessions:
        full.change(name, gpu_busy=True)
    assert now_needed(full, [waits("eve")], clock()) == []


def test_sessions_that_are_idle_for_a_downgrade_only_are_needed_for_what_that_frees(
    agent: FakeAgent, clock: Clock
) -> None:
    for gpu in (0, 0, 1, 1):
        half(agent, f"user{len(agent.sessions)}", gpu, "steps")
    clock.forward(6 * MINUTE)
    assert now_needed(agent, [waits("eve")], clock()) == ["user0", "user1"], "0.4 GPU of each"
    assert len(now_needed(agent, [waits("eve", "small")], clock())) == 1


def test_a_session_that_never_worked_is_a_candidate_when_its_longer_first_notice_is_due(
    agent: FakeAgent, clock: Clock
) -> None:
    short = HALF.model_copy(update={"idle": HALF.idle.model_copy(update={"release_after": 60.0, "warn_before": 20.0})})
    new, worked = half(agent, "ann", 0), half(agent, "bob", 1)
    agent.change(worked, last_gpu_activity=clock())

    def due() -> list[str]:
        return [one.session for one in candidates([agent.report()], {"half": short}, clock(), RecentUse())]

    clock.forward(MINUTE)
    assert due() == [worked]
    clock.forward(4 * MINUTE)
    assert sorted(due()) == sorted([new, worked])


def test_templates_that_ask_for_no_pressure_are_no_candidates(agent: FakeAgent, clock: Clock) -> None:
    half(agent, "ann", 0, "always")
    clock.forward(HOUR)
    assert candidates([agent.report()], TEMPLATES, clock(), RecentUse()) == []


async def test_a_share_is_released_after_a_notice_while_a_spawn_waits(
    full: FakeAgent, hub: Hub, hub_server: FakeHub, clock: Clock
) -> None:
    pending: list[HubServer] = []

    async def asked() -> list[HubServer]:
        return pending

    culler = Culler(ActionContext([MachineAgent(full.path)], hub, lambda: TEMPLATES, clock=clock), EAGER, pending=asked)
    clock.forward(HOUR)
    await culler.round()
    assert full.told == []
    pending.append(waits("eve"))
    await culler.round()
    ((what, session, tier),) = full.told
    assert (what, tier, full.asked[0].at) == ("notice", "released", clock() + MINUTE)
    clock.forward(MINUTE)
    await culler.round()
    assert [one.tier for one in full.sessions.values()].count(Tier.RELEASED) == 1
    assert full.sessions[session].tier is Tier.RELEASED
    await culler.round()
    assert len(full.told) == 2, "the spawn fits now"


async def test_the_notice_is_withdrawn_when_nobody_waits_any_longer(
    full: FakeAgent, hub: Hub, hub_server: FakeHub, clock: Clock
) -> None:
    pending = [waits("eve")]

    async def asked() -> list[HubServer]:
        return pending

    culler = Culler(ActionContext([MachineAgent(full.path)], hub, lambda: TEMPLATES, clock=clock), EAGER, pending=asked)
    clock.forward(HOUR)
    await culler.round()
    pending.clear()
    await culler.round()
    (_, session, _), (what, again, tier) = full.told
    assert (what, again, tier) == ("notice", session, None)


def test_a_held_session_is_stopped_at_its_time_and_says_why_nothing_comes_before(
    agent: FakeAgent, clock: Clock
) -> None:
    half(agent, "ann", 0)
    clock.forward(HOUR)
    report = agent.report()
    snapshots = [NodeSnapshot(NO_AGENT, KnownReport.of(report, report.sessions))]
    (one,) = decide_sessions(snapshots, None, TEMPLATES, clock(), EAGER)
    assert one.decision.no_action is NoAction.ACTIVITY_UNKNOWN
    endless = HALF.model_copy(update={"idle": HALF.idle.model_copy(update={"stop_after": None})})
    (one,) = decide_sessions(snapshots, None, {"half": endless}, clock(), EAGER)
    assert (one.decision.no_action, one.decision.upcoming) == (NoAction.NOT_NEEDED, None)
