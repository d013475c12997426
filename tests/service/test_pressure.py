"""Sessions over quota make way for spawns in quota that wait: through culler, hub and agent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.idle.use import Observation, RecentUse
from gpushare_spawner.model.control import QueueProgress, TierRequest
from gpushare_spawner.model.controls import Exemption, Keep
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.quota import Quotas, Reclaim
from gpushare_spawner.model.share import IdleCause, NeighbourRules, Tier, UseRule
from gpushare_spawner.model.template import Template, TemplatePlacement
from gpushare_spawner.placement.feed import LedgerFeed
from gpushare_spawner.quota.entitlement import MINIMUM_RUN
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.culler import pressure as pressure_module
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.culler.pressure import Pressure, may_matter, pressure
from gpushare_spawner.service.hub.client import Hub, HubServer
from gpushare_spawner.service.reports import MachineAgent
from gpushare_spawner.service.waiting import quota_use
from tests.service.conftest import HOUR, MINUTE, Clock
from tests.service.fake_agent import FakeAgent, Refuse, fake_agent
from tests.service.fake_hub import FakeHub

EAGER = CullerSettings(cull_every=1e-9)
HALF = Template.model_validate({"name": "half", "display_name": "H", "gpu": {"fraction": 0.5}})
WHOLE = Template.model_validate({"name": "whole", "display_name": "W", "gpu": {"fraction": 1}})
TENTH = Template.model_validate({"name": "tenth", "display_name": "T", "gpu": {"fraction": 0.1}})
PAIR = Template.model_validate({"name": "pair", "display_name": "P", "gpu": {"count": 2}})
OTHER = Template.model_validate({"name": "other", "display_name": "O", "gpu": {"fraction": 0.5, "models": ["H100*"]}})
TEMPLATES = {one.name: one for one in (HALF, WHOLE, TENTH, PAIR, OTHER)}


def quotas(**reclaim: object) -> Quotas:
    return Quotas.model_validate(
        {"groups": {"ml": {"guarantee": 1}, "hep": {"guarantee": 1}, "guests": {}}, "reclaim": reclaim}
    )


QUOTAS = quotas()
WITHOUT_WEIGHT = Quotas.model_validate(
    {"groups": {"ml": {"guarantee": 1, "weight": 0}, "hep": {"guarantee": 1}, "guests": {}}, "default": {"weight": 0}}
)
"""With weight 0, ml is entitled to its guarantee only."""


def waits(user: str, template: str = "half", quota: str = "ml", since: float = 0.0, **changes: Any) -> HubServer:
    one = HubServer(user, "", ready=False, pending="spawn", started=since, profile=template, quota=quota)
    return replace(one, **changes)


def share(agent: FakeAgent, user: str, units: int = 50, gpu: int = 0, **changes: Any) -> str:
    values: dict[str, Any] = {
        "template": "half", "share_units": units, "effective_units": units, "guaranteed_units": units,
        "gpus": (f"GPU-{gpu}",), "quota": "group:guests",
    }  # fmt: skip
    return agent.add(user, **(values | changes))


@pytest.fixture
def full(agent: FakeAgent) -> FakeAgent:
    """Two GPUs, full of guests' halves."""
    for number in range(4):
        share(agent, f"guest{number}", gpu=number // 2)
    return agent


def now_needed(agent: FakeAgent, pending: Sequence[HubServer], now: float, rules: Quotas | None = QUOTAS) -> Pressure:
    return pressure(rules, [agent.report()], pending, TEMPLATES, now)


def kept(found: Pressure) -> dict[str, int]:
    return {session.split("/")[0]: claim.units for session, claim in found.reclaimed.items()}


def test_the_longest_idle_session_over_quota_makes_way(full: FakeAgent, clock: Clock) -> None:
    full.change("guest2", last_gpu_activity=clock() + 5)
    full.change("guest1", last_gpu_activity=clock() + HOUR)
    full.change("guest0", last_gpu_activity=clock() + 10)
    full.change("guest3", last_gpu_activity=clock() + 20)
    assert kept(now_needed(full, [waits("eve")], clock() + HOUR)) == {"guest2": 0}


def test_an_exempt_session_does_not_make_way_and_gets_back_what_it_yields(full: FakeAgent, clock: Clock) -> None:
    now = clock() + HOUR
    exempt = Exemption(until=now + 1, by="root")
    full.change("guest0", exemption=exempt)
    assert kept(now_needed(full, [waits("eve")], now)) == {"guest1": 0}
    full.change("guest0", effective_units=0, guaranteed_units=0, tier=Tier.RELEASED, yields=True)
    found = now_needed(full, [waits("eve")], now)
    assert found.free_again == frozenset({"guest0"})
    assert "guest0" not in found.kept_on
    # the exemption is over: the units stay with the spawn that waits
    assert now_needed(full, [waits("eve")], now + 1).free_again == frozenset()


def test_a_session_whose_layer_can_only_stop_it_does_not_make_way(full: FakeAgent, clock: Clock) -> None:
    now = clock() + HOUR
    full.change("guest0", layer=LayerName.MPS)
    full.change("guest1", layer=LayerName.MPS)
    assert kept(now_needed(full, [waits("eve")], now)) == {"guest2": 0}


def test_a_kept_session_makes_way_all_the_same(full: FakeAgent, clock: Clock) -> None:
    now = clock() + HOUR
    full.change("guest0", keep=Keep(until=now + HOUR, since=now, by="guest0"))
    assert kept(now_needed(full, [waits("eve")], now)) == {"guest0": 0}


def test_a_session_with_short_work_only_counts_as_idle(full: FakeAgent, clock: Clock) -> None:
    use, rule, opened = RecentUse(), UseRule(min_use=0.2), clock()

    def noted() -> None:
        for name, session in full.sessions.items():
            use.update(name, Observation.of(session), clock(), rule)

    noted()
    for name in full.sessions:
        full.work(name)
    noted()
    for _ in range(180):
        clock.forward(20)
        for name in full.sessions:
            full.work(name, seconds=0.004 if name == "guest2" or name.startswith("guest2/") else 1.0)
        noted()
    assert clock() == opened + HOUR
    found = pressure(quotas(active_share=0.4), [full.report()], [waits("eve")], TEMPLATES, clock(), use)
    assert kept(found) == {"guest2": 0}
    active = pressure(quotas(active_share=0.4), [full.report()], [waits("eve")], TEMPLATES, clock())
    assert kept(active) == {}, "all work counts where nothing is known of its length"


CPU_QUOTAS = Quotas.model_validate(
    {
        "groups": {
            "physics": {
                "guarantee": 1,
                "cpu": {"guarantee": 4},
                "teams": {"ml": {"guarantee": 1}, "guests": {"cpu": {"guarantee": 2}}},
            },
            "hep": {"guarantee": 1, "cpu": {"guarantee": 4}},
        }
    }
)
CORES = TEMPLATES | {
    "half": Template.model_validate(
        {"name": "half", "display_name": "H", "gpu": {"fraction": 0.5}, "resources": {"cpu": {"guarantee": 2}}}
    ),
    "cores": Template.model_validate({"name": "cores", "display_name": "C", "resources": {"cpu": {"guarantee": 2}}}),
}


def test_cpu_beyond_its_guarantee_makes_a_session_over_quota_also_that_of_servers_without_a_gpu(
    agent: FakeAgent, clock: Clock
) -> None:
    now = clock() + HOUR
    for number, quota in enumerate(("ml", "ml", "other", "other")):
        share(agent, f"guest{number}", gpu=number // 2, quota=f"group:{quota}")
        agent.change(f"guest{number}", last_gpu_activity=clock() + (0 if quota == "ml" else 60))

    def found(*servers: HubServer) -> dict[str, int]:
        waiting = [waits("eve", quota="hep")]
        usage = quota_use(CPU_QUOTAS, [agent.report()], CORES, servers)
        return kept(pressure(CPU_QUOTAS, [agent.report()], waiting, CORES, now, usage=usage))

    assert found() == {"guest1": 0}, "physics has CPU for one server of ml, and guests keep their own"
    without_gpu = HubServer("ann", "", profile="cores", quota="ml", started=1.0)
    assert found(without_gpu) == {"guest0": 0}, "an older server has that CPU"
    of_hep = replace(without_gpu, quota="hep")
    assert found(of_hep) == {"guest1": 0}
    units = found(of_hep, replace(of_hep, name="two"))
    assert units == {"guest2": 0}, "the spawn is over quota with its CPU, and hep lacks units that it is entitled to"


def test_nobody_makes_way_for_a_spawn_over_quota_or_without_a_known_quota(full: FakeAgent, clock: Clock) -> None:
    now = clock() + HOUR
    share(full, "ann", units=100, gpu=1, quota="group:ml")  # ml has used its guarantee
    assert kept(now_needed(full, [waits("eve")], now, WITHOUT_WEIGHT)) == {}
    assert kept(now_needed(full, [waits("eve", quota="guests")], now)) == {}
    assert kept(now_needed(full, [waits("eve", quota="")], now)) == {}
    assert kept(now_needed(full, [waits("eve", quota="", groups=("hep",))], now)) == {"guest0": 0}
    assert kept(now_needed(full, [waits("eve", quota="", groups=())], now, WITHOUT_WEIGHT)) == {}
    assert kept(now_needed(full, [waits("eve", quota="hep", groups=("ml",))], now)) == {}


def test_a_session_in_quota_never_makes_way(agent: FakeAgent, clock: Clock) -> None:
    for number in range(2):
        share(agent, f"member{number}", gpu=0, quota="group:hep")
        share(agent, f"guest{number}", gpu=1)
    agent.change("guest0", gpu_busy=True)
    found = now_needed(agent, [waits("eve"), waits("bob")], clock() + HOUR)
    assert kept(found) == {"guest1": 0, "guest0": 0}


def test_only_gpus_that_suit_the_spawn_count(full: FakeAgent, clock: Clock) -> None:
    assert kept(now_needed(full, [waits("eve", "other")], clock() + HOUR)) == {}


def test_whole_gpus_take_all_that_lies_on_them(full: FakeAgent, clock: Clock) -> None:
    now = clock() + HOUR
    assert kept(now_needed(full, [waits("eve", "whole")], now)) == {"guest0": 0, "guest1": 0}
    both = Quotas.model_validate({"groups": {"ml": {"guarantee": 2}}})
    assert kept(now_needed(full, [waits("eve", "pair")], now, both)) == {f"guest{n}": 0 for n in range(4)}


def test_what_is_free_is_used_first_and_spawns_do_not_count_on_the_same(full: FakeAgent, clock: Clock) -> None:
    now = clock() + HOUR
    del full.sessions["guest3"]
    assert kept(now_needed(full, [waits("eve")], now)) == {}
    assert kept(now_needed(full, [waits("eve"), waits("bob")], now)) == {"guest0": 0}


def test_active_sessions_yield_as_much_as_is_needed(full: FakeAgent, clock: Clock) -> None:
    del full.sessions["guest3"]
    share(full, "newest", units=30, gpu=1, opened_at=clock() + MINUTE)
    full.change("guest2", opened_at=clock() + 1)
    for name in list(full.sessions):
        full.change(name, gpu_busy=True)
    # 20 units of GPU 1 are free
    now = clock() + HOUR
    assert kept(now_needed(full, [waits("eve")], now)) == {"newest": 0}
    assert kept(now_needed(full, [waits("eve")], now, quotas(active_share=0.1))) == {"guest2": 20}
    assert kept(now_needed(full, [waits("eve")], now, quotas(active_share=0.4))) == {}


def test_sessions_of_lost_gpus_and_of_two_nodes_are_left_alone(full: FakeAgent, clock: Clock) -> None:
    now = clock() + HOUR
    share(full, "gone", gpu=7)
    full.change("gone", last_gpu_activity=1.0)
    assert kept(now_needed(full, [waits("eve")], now)) == {"guest0": 0}
    one = full.report()
    # a node that was replaced, with the report of the lost one still there
    gpus = tuple(gpu.model_copy(update={"uuid": f"{gpu.uuid}-b"}) for gpu in one.gpus)
    sessions = tuple(
        session.model_copy(update={"gpus": tuple(f"{uuid}-b" for uuid in session.gpus)}) for session in one.sessions
    )
    other = one.model_copy(update={"node": "other", "gpus": gpus, "sessions": sessions})
    found = pressure(QUOTAS, [one, other], [waits("eve", "other"), waits("bob")], TEMPLATES, now)
    assert len(found.reclaimed) <= 1


def test_no_session_makes_way_on_a_gpu_that_the_spawn_s_template_excludes(full: FakeAgent, clock: Clock) -> None:
    here, elsewhere, alone = (
        HALF.model_copy(update={"name": name, "placement": placement})
        for name, placement in (
            ("here", TemplatePlacement(nodes=["fake"])),
            ("elsewhere", TemplatePlacement(nodes=["other"])),
            ("alone", TemplatePlacement(alone=True)),
        )
    )
    for template, expected in ((here, {"guest0": 0}), (elsewhere, {}), (alone, {})):
        pending = [waits("eve", template.name)]
        found = pressure(QUOTAS, [full.report()], pending, {**TEMPLATES, template.name: template}, clock() + HOUR)
        assert kept(found) == expected


def test_a_gpu_with_a_session_that_is_alone_helps_no_spawn(full: FakeAgent, clock: Clock) -> None:
    for name in ("guest0", "guest1"):
        del full.sessions[name]
    lone = NeighbourRules(alone=True)
    share(full, "ann", units=20, quota="group:hep", neighbours=lone)
    assert kept(now_needed(full, [waits("eve")], clock() + HOUR)) == {"guest2": 0}, "80 units are unused, not free"
    assert kept(now_needed(full, [waits("eve", "pair")], clock() + HOUR)) == {}
    # its own units do not help either: the spawn would still wait
    full.change("ann", quota="group:guests", last_gpu_activity=1.0, share_units=100, effective_units=100)
    assert kept(now_needed(full, [waits("eve")], clock() + HOUR)) == {"guest2": 0}


def test_others_make_way_for_sessions_in_a_dry_run(full: FakeAgent, clock: Clock) -> None:
    dry = HALF.model_copy(update={"name": "dry", "idle": HALF.idle.model_copy(update={"dry_run": True})})
    full.change("guest0", template="dry", last_gpu_activity=1.0)
    found = pressure(QUOTAS, [full.report()], [waits("eve")], TEMPLATES | {"dry": dry}, clock() + HOUR)
    assert kept(found) == {"guest1": 0}


def test_reclaim_can_be_switched_off(full: FakeAgent, clock: Clock) -> None:
    full.change("guest0", yields=True, tier=Tier.RELEASED, effective_units=0)
    found = now_needed(full, [waits("eve")], clock() + HOUR, quotas(enabled=False))
    assert found == Pressure(free_again=frozenset({"guest0"}))
    assert now_needed(full, [waits("eve")], clock() + HOUR, None) == found


Round = Callable[[], Awaitable[float | None]]


class Stage:
    """A culler with a list of pending spawns that the test changes."""

    def __init__(self, agent: FakeAgent, hub: Hub, clock: Clock) -> None:
        self.pending: list[HubServer] | None = []
        self.nodes: Sequence[str] | None = None
        """The nodes that the hub names for all waiting spawns."""
        self.quotas: Quotas | None = QUOTAS
        self.asked = 0
        self.culler = Culler(
            ActionContext([MachineAgent(agent.path)], hub, lambda: TEMPLATES, clock=clock, quotas=lambda: self.quotas),
            EAGER,
            pending=self._pending,
            progress=self._progress,
        )

    async def _progress(self, waiting: Sequence[HubServer]) -> Mapping[tuple[str, str], QueueProgress]:
        nodes = None if self.nodes is None else tuple(self.nodes)
        return {(one.user, one.name): QueueProgress(queue_position=1, nodes=nodes) for one in waiting}

    async def _pending(self) -> Sequence[HubServer] | None:
        self.asked += 1
        return self.pending


@pytest.fixture
def stage(full: FakeAgent, hub: Hub, clock: Clock) -> Stage:
    clock.forward(HOUR)
    return Stage(full, hub, clock)


async def test_a_session_is_told_makes_way_and_gets_its_units_back(
    stage: Stage, full: FakeAgent, clock: Clock, hub_server: FakeHub
) -> None:
    stage.pending = [waits("eve")]
    await stage.culler.round()
    notice = full.sessions["guest0"].notice
    assert notice is not None
    assert (notice.tier, notice.at, notice.cause) == (Tier.RELEASED, clock() + MINUTE, IdleCause.RECLAIM)
    assert "Others are entitled to units of this session by their quotas" in notice.reason
    full.work("guest0")  # too late: no work averts it
    clock.forward(MINUTE)
    full.asked.clear()
    stage.pending = [waits("eve")]
    await stage.culler.round()
    told = [one for one in full.sessions.values() if one.notice is not None]
    # it works now, and others are idle: the notice is not passed on to them, else the spawn would wait without end
    assert told == []
    (request,) = [one for one in full.asked if isinstance(one, TierRequest)]
    assert (request.id, request.tier, request.if_idle_since) == ("guest0", Tier.RELEASED, None)
    assert request.yields_until == clock() + 600
    assert full.sessions["guest0"].yields
    full.asked.clear()
    await stage.culler.round()
    assert full.asked == []
    stage.pending = []
    await stage.culler.round()
    assert full.told == [("tier", "guest0", "released")]
    assert not full.sessions["guest0"].yields
    assert hub_server.deleted == []


async def test_a_session_that_works_again_is_active_again_when_nobody_waits(
    stage: Stage, full: FakeAgent, clock: Clock
) -> None:
    full.change("guest0", yields=True, tier=Tier.RELEASED, effective_units=0, guaranteed_units=0, gpu_busy=True)
    await stage.culler.round()
    assert full.told == [("tier", "guest0", "active")]


async def test_units_are_kept_for_a_server_that_is_starting(stage: Stage, full: FakeAgent, clock: Clock) -> None:
    full.change("guest0", yields=True, tier=Tier.RELEASED, effective_units=0, guaranteed_units=0)
    share(full, "eve", quota="group:ml", confirmed=False)
    await stage.culler.round()
    assert full.told == [("tier", "guest0", "released")]
    full.asked.clear()
    await stage.culler.round()
    assert full.asked == []
    full.change("eve", confirmed=True)
    await stage.culler.round()
    assert full.told == [("tier", "guest0", "released")]


async def test_units_are_kept_for_as_long_as_the_spawn_waits_or_starts(
    stage: Stage, full: FakeAgent, clock: Clock
) -> None:
    stage.pending = [waits("eve")]
    await stage.culler.round()
    clock.forward(MINUTE)
    await stage.culler.round()
    assert full.sessions["guest0"].yields
    for starts in (False, True):
        if starts:
            stage.pending = []
            share(full, "eve", quota="group:ml", confirmed=False)
        full.asked.clear()
        clock.forward(4 * MINUTE)
        await stage.culler.round()
        assert full.asked == []
        clock.forward(MINUTE)
        await stage.culler.round()
        (request,) = [one for one in full.asked if isinstance(one, TierRequest)]
        assert (request.id, request.tier, request.effective_units) == ("guest0", Tier.RELEASED, 0)
        assert request.yields_until == clock() + 600


async def test_units_are_kept_after_a_restart_of_the_service_too(stage: Stage, full: FakeAgent, clock: Clock) -> None:
    full.change("guest0", yields=True, tier=Tier.RELEASED, effective_units=0, guaranteed_units=0)
    stage.pending = [waits("eve", "whole")]
    await stage.culler.round()
    requests = [one for one in full.asked if isinstance(one, TierRequest)]
    assert [(one.id, one.yields_until) for one in requests] == [("guest0", clock() + 600)]


async def test_what_an_older_agent_refuses_in_each_round_is_logged_once(
    stage: Stage, full: FakeAgent, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(request: object) -> None:
        if isinstance(request, TierRequest):
            raise Refuse("unknown field yields_until")

    stage.pending = [waits("eve")]
    await stage.culler.round()
    full.before = refuse
    clock.forward(MINUTE)
    for _ in range(3):
        await stage.culler.round()
    # the level of the service's logger is that of an earlier test of this process
    said = [one for one in caplog.records if one.getMessage().startswith("guest0: ") and one.levelname != "INFO"]
    assert [one.levelname for one in said] == ["WARNING"]
    assert stage.culler.counters.failures["agent"] == 3


async def test_an_error_in_placement_keeps_no_idle_action_from_being_taken(
    stage: Stage, full: FakeAgent, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the index contradicts itself")

    monkeypatch.setattr(LedgerFeed, "follow", fails)
    stage.pending = [waits("eve")]
    await stage.culler.round()
    assert "The units that waiting spawns need are unknown" in caplog.text
    assert stage.culler.counters.failures["agent"] == 0
    assert all(one.notice is None for one in full.sessions.values())


@pytest.mark.parametrize("silence", ["hub", "agent"])
async def test_nobody_makes_way_while_hub_or_agent_are_silent(
    stage: Stage, full: FakeAgent, clock: Clock, silence: str
) -> None:
    stage.pending = [waits("eve")]
    await stage.culler.round()
    assert full.sessions["guest0"].notice is not None
    clock.forward(MINUTE)
    if silence == "hub":
        stage.pending = None
    else:
        stage.culler._context.agents = [*stage.culler._context.agents, MachineAgent(full.path.with_name("nobody"))]
    await stage.culler.round()
    assert all(one.tier is Tier.ACTIVE and one.notice is None for one in full.sessions.values())


async def test_a_gpu_that_two_nodes_report_is_logged_once(
    stage: Stage, full: FakeAgent, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_agent(tmp_path / "second.sock", clock) as second:
        second.node = "second"
        stage.culler._context.agents = [*stage.culler._context.agents, MachineAgent(second.path)]
        for _ in range(2):
            await stage.culler.round()
        told = [one.message for one in caplog.records if "is reported by the nodes fake and second" in one.message]
        assert len(told) == len(set(told)) == len(full.gpus)


async def test_sessions_of_an_agent_that_falls_silent_count_and_do_not_make_way(
    stage: Stage, full: FakeAgent, clock: Clock, tmp_path: Path
) -> None:
    async with fake_agent(tmp_path / "second.sock", clock) as second:
        for number in range(4):
            share(second, f"visitor{number}", gpu=number // 2)
        share(second, "ann", units=50, quota="group:ml")
        stage.culler._context.agents = [*stage.culler._context.agents, MachineAgent(second.path)]
        stage.pending, stage.quotas = [waits("eve"), waits("bob")], WITHOUT_WEIGHT
        await stage.culler.round()
    full.asked.clear()
    clock.forward(MINUTE)
    await stage.culler.round()
    # ml is guaranteed one GPU, and ann has half of it on the node that is silent
    assert [one.id for one in full.sessions.values() if one.tier is not Tier.ACTIVE or one.notice] == ["guest0"]


async def test_the_hub_is_not_asked_while_all_sessions_are_in_quota(stage: Stage, full: FakeAgent) -> None:
    full.sessions = {"ann": full.sessions["guest0"].model_copy(update={"id": "ann", "quota": "group:ml"})}
    await stage.culler.round()
    assert stage.asked == 0


async def test_a_server_is_stopped_only_if_the_quotas_say_so(
    stage: Stage, full: FakeAgent, clock: Clock, hub_server: FakeHub
) -> None:
    for name in list(full.sessions):
        full.change(name, yields=True, tier=Tier.RELEASED, effective_units=0, guaranteed_units=0)
        hub_server.add(name, last_activity=clock() - HOUR)
    # for example for lack of CPU
    stage.pending = [waits("eve")]
    stage.quotas = quotas(stop_after="30m", stop_notice="2m")
    await stage.culler.round()
    notice = full.sessions["guest0"].notice
    assert notice is not None
    assert (notice.tier, notice.at, notice.cause) == (Tier.STOPPED, clock() + 2 * MINUTE, IdleCause.RECLAIM)
    full.work("guest1")
    clock.forward(2 * MINUTE)
    await stage.culler.round()
    assert sorted(hub_server.deleted) == [f"/users/guest{n}/server" for n in (0, 2, 3)]
    stage.quotas = QUOTAS
    await stage.culler.round()
    assert full.sessions["guest1"].notice is None


def made_way(agent: FakeAgent) -> dict[str, tuple[Tier, int]]:
    """The tier and the units of each session that has made way."""
    return {name: (one.tier, one.effective_units) for name, one in agent.sessions.items() if one.yields}


async def after_the_notice(stage: Stage, clock: Clock) -> None:
    await stage.culler.round()
    clock.forward(MINUTE)
    await stage.culler.round()


async def test_one_idle_gpu_is_released_rather_than_ten_tenths_that_are_idle_a_second_longer(
    agent: FakeAgent, hub: Hub, clock: Clock, hub_server: FakeHub
) -> None:
    for number in range(10):
        share(agent, f"tenth{number}", units=10, template="tenth", last_gpu_activity=clock() + 1)
    share(agent, "whole", units=100, gpu=1, template="whole", last_gpu_activity=clock() + 2)
    clock.forward(HOUR)
    stage = Stage(agent, hub, clock)
    stage.pending = [waits("eve", "whole")]
    await after_the_notice(stage, clock)
    assert made_way(agent) == {"whole": (Tier.RELEASED, 0)}
    assert hub_server.deleted == []


async def test_a_tenth_takes_a_tenth_of_an_idle_gpu(
    agent: FakeAgent, hub: Hub, clock: Clock, hub_server: FakeHub
) -> None:
    for gpu in range(2):
        share(agent, f"guest{gpu}", units=100, gpu=gpu, template="whole", last_gpu_activity=clock() + 2 - gpu)
    clock.forward(HOUR)
    stage = Stage(agent, hub, clock)
    stage.pending = [waits("eve", "tenth")]
    await stage.culler.round()
    notice = agent.sessions["guest1"].notice
    assert notice is not None
    assert (notice.tier, notice.effective_units, notice.cause) == (Tier.DOWNGRADED, 90, IdleCause.RECLAIM)
    clock.forward(MINUTE)
    await stage.culler.round()
    assert made_way(agent) == {"guest1": (Tier.DOWNGRADED, 90)}
    await after_the_notice(stage, clock)
    assert made_way(agent) == {"guest1": (Tier.DOWNGRADED, 90)}, "the spawn fits now"
    # its spawn is over: the rest comes back with the next GPU work
    stage.pending = []
    agent.change("guest1", gpu_busy=True)
    await stage.culler.round()
    assert (agent.sessions["guest1"].tier, agent.sessions["guest1"].effective_units) == (Tier.ACTIVE, 100)
    assert hub_server.deleted == []


async def test_only_sessions_of_a_node_with_cpu_for_the_spawn_make_way(
    stage: Stage, full: FakeAgent, clock: Clock, tmp_path: Path
) -> None:
    async with fake_agent(tmp_path / "second.sock", clock) as second:
        second.node = "second"
        first, last = (gpu.model_copy(update={"uuid": f"{gpu.uuid}-b"}) for gpu in second.gpus)
        second.gpus = (first, last)
        for number in range(4):
            share(second, f"visitor{number}", gpus=(f"GPU-{number // 2}-b",), last_gpu_activity=clock() - 10 * MINUTE)
        stage.culler._context.agents = [*stage.culler._context.agents, MachineAgent(second.path)]
        stage.pending = [waits("eve")]
        stage.nodes = ["second"]
        for _ in range(3):
            await after_the_notice(stage, clock)
        assert (made_way(full), made_way(second)) == ({}, {"visitor0": (Tier.RELEASED, 0)})
        # the CPU is used up there and free here: the session there gets its units back, another makes way here
        stage.nodes = ["fake"]
        await after_the_notice(stage, clock)
        assert (made_way(full), made_way(second)) == ({"guest0": (Tier.RELEASED, 0)}, {})


async def test_no_session_makes_way_while_no_node_has_cpu_unless_it_may_be_stopped(
    stage: Stage, full: FakeAgent, clock: Clock
) -> None:
    stage.pending, stage.nodes = [waits("eve")], []
    await after_the_notice(stage, clock)
    assert made_way(full) == {}
    stage.quotas = quotas(stop_after="30m")
    await after_the_notice(stage, clock)
    assert made_way(full) == {"guest0": (Tier.RELEASED, 0)}


def test_sessions_elsewhere_make_way_to_be_stopped_if_none_can_on_a_node_with_cpu(
    agent: FakeAgent, clock: Clock
) -> None:
    share(agent, "guest", units=100)
    crowded = agent.report()
    here, there = (crowded.gpus[0].model_copy(update={"uuid": uuid}) for uuid in ("GPU-0", "GPU-b"))
    (guest,) = crowded.sessions
    other = guest.model_copy(update={"id": "other", "gpus": ("GPU-b",), "last_gpu_activity": clock() + 1})
    with_cpu = crowded.model_copy(update={"node": "second", "gpus": (there,), "sessions": (other,)})
    progress = {("eve", ""): QueueProgress(queue_position=1, nodes=("second",))}

    def found(rules: Quotas) -> Pressure:
        reports = [agent.report().model_copy(update={"gpus": (here,)}), with_cpu]
        return pressure(rules, reports, [waits("eve")], TEMPLATES, clock() + HOUR, progress=progress)

    stops = quotas(stop_after="30m")
    assert kept(found(stops)) == {"other": 50}, "it helps, however long others have been idle"
    with_cpu = with_cpu.model_copy(update={"sessions": (other.model_copy(update={"quota": "group:hep"}),)})
    assert kept(found(QUOTAS)) == {}
    assert kept(found(stops)) == {"guest": 50}
    # it goes on yielding until it is stopped, or until a session on the other node can make way
    agent.change("guest", yields=True, tier=Tier.DOWNGRADED, effective_units=50, guaranteed_units=50)
    assert kept(found(stops)) == {"guest": 50}
    assert found(QUOTAS).free_again == frozenset({"guest"})
    with_cpu = with_cpu.model_copy(update={"sessions": (other,)})
    assert kept(found(stops)) == {"other": 50}
    assert found(stops).free_again == frozenset({"guest"})


WEIGHTS = Quotas.model_validate({"groups": {"ml": {"weight": 3}, "guests": {"weight": 1}}})


def two_groups(agent: FakeAgent) -> None:
    """Two GPUs: guests have three halves, and ml one, of which guests took 20 units earlier."""
    for number in range(3):
        share(agent, f"guest{number}", gpu=number // 2, gpu_busy=True)
    share(agent, "mia", gpu=1, quota="group:ml", gpu_busy=True)


def test_a_spawn_over_quota_makes_sessions_of_an_account_beyond_its_entitlement_yield(
    agent: FakeAgent, clock: Clock
) -> None:
    two_groups(agent)
    found = now_needed(agent, [waits("eve")], clock() + HOUR, WEIGHTS)
    assert kept(found) in ({"guest0": 0}, {"guest1": 0}, {"guest2": 0})
    (claim,) = found.reclaimed.values()
    assert claim.rules.stop_after is None
    # guests are entitled to 50 units, ml to 150: the spawn of a whole GPU would leave guests nothing
    assert kept(now_needed(agent, [waits("eve", "whole")], clock() + HOUR, WEIGHTS)) == {"guest0": 0, "guest1": 0}
    assert kept(now_needed(agent, [waits("eve")], clock() + MINIMUM_RUN - 1, WEIGHTS)) == {}


def test_the_units_for_spawns_over_quota_are_planned_for_a_bounded_number_in_one_round(
    agent: FakeAgent, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pressure_module, "MOST_BY_WEIGHT", 1)
    two_groups(agent)
    # no GPU has two wholes: equal spawns are tried once, and later ones are served
    useless = [waits(f"u{number}", "pair", since=float(number)) for number in range(3)]
    spawns = [*useless, waits("eve", "half", since=5.0), waits("bob", "half", since=6.0)]
    agent.gpus = agent.gpus[:1]
    agent.sessions.pop("mia")
    found = now_needed(agent, spawns, clock() + HOUR, WEIGHTS)
    assert len(kept(found)) == 1


def test_a_server_is_never_stopped_for_a_spawn_over_quota(agent: FakeAgent, clock: Clock) -> None:
    two_groups(agent)
    rules = WEIGHTS.model_copy(update={"reclaim": Reclaim(stop_after=60.0)})
    (claim,) = now_needed(agent, [waits("eve")], clock() + HOUR, rules).reclaimed.values()
    assert claim.rules.stop_after is None


def test_running_sessions_exchange_units_until_each_account_has_what_it_is_entitled_to(
    agent: FakeAgent, clock: Clock
) -> None:
    share(agent, "guest", units=100, guaranteed_units=70, borrowed_units=30, gpu_busy=True)
    share(agent, "mia", units=100, guaranteed_units=30, borrowed_units=70, quota="group:ml", gpu_busy=True)
    found = now_needed(agent, [], clock() + HOUR, Quotas.model_validate({"groups": {"ml": {}, "guests": {}}}))
    assert kept(found) == {}
    agent.gpus = agent.gpus[:1]
    found = now_needed(agent, [], clock() + HOUR, Quotas.model_validate({"groups": {"ml": {}, "guests": {}}}))
    assert kept(found) == {"guest": 50}
    found = now_needed(agent, [], clock() + HOUR, WEIGHTS)
    assert kept(found) == {"guest": 25}
    assert kept(now_needed(agent, [], clock() + MINIMUM_RUN - 1, WEIGHTS)) == {}


def test_a_session_gets_back_what_its_account_is_entitled_to_and_no_more(agent: FakeAgent, clock: Clock) -> None:
    agent.gpus = agent.gpus[:1]
    limited: dict[str, Any] = {"tier": Tier.DOWNGRADED, "effective_units": 20, "borrowed_units": 80, "yields": True}
    share(agent, "guest", units=100, guaranteed_units=20, gpu_busy=True, opened_at=1.0, **limited)
    share(agent, "mia", units=100, guaranteed_units=80, borrowed_units=20, quota="group:ml", gpu_busy=True)
    equal = Quotas.model_validate({"groups": {"ml": {}, "guests": {}}})
    found = now_needed(agent, [], clock() + HOUR, equal)
    assert (kept(found), found.free_again) == ({"mia": 50}, frozenset({"guest"})), "mia's limit is enough"
    assert kept(now_needed(agent, [], clock() + HOUR, WEIGHTS)) == {"mia": 75}
    agent.change("mia", guaranteed_units=50, **{**limited, "effective_units": 50, "borrowed_units": 80})
    found = now_needed(agent, [], clock() + HOUR, equal)
    assert kept(found) == {"guest": 50}
    assert (found.kept_on, found.free_again) == (frozenset({"guest"}), frozenset({"mia"}))
    agent.sessions.pop("mia")
    assert now_needed(agent, [], clock() + HOUR, equal).free_again == frozenset({"guest"})


EQUAL = Quotas.model_validate({"groups": {"ml": {}, "guests": {}}})
ON_BOTH: dict[str, Any] = {"gpus": ("GPU-0", "GPU-1"), "template": "pair", "gpu_busy": True}
LIMITED: dict[str, Any] = {"tier": Tier.DOWNGRADED, "yields": True}


def test_a_session_on_two_gpus_gives_units_on_each_down_to_its_guarantee(agent: FakeAgent, clock: Clock) -> None:
    share(agent, "guest", units=80, **ON_BOTH)
    for gpu in range(2):
        borrows = {"guaranteed_units": 20, "borrowed_units": 60, "quota": "group:ml", "gpu_busy": True}
        share(agent, f"mia{gpu}", units=80, gpu=gpu, **borrows)
    assert kept(now_needed(agent, [], clock() + MINIMUM_RUN - 1, EQUAL)) == {}
    found = now_needed(agent, [], clock() + HOUR, EQUAL)
    assert kept(found) == {"guest": 50}
    assert found.reclaimed["guest"].rules.stop_after is None, "the kernel keeps running"
    assert kept(now_needed(agent, [], clock() + HOUR, WEIGHTS)) == {"guest": 25}
    owners = Quotas.model_validate({"groups": {"ml": {}, "guests": {"guarantee": 1.6}}})
    assert kept(now_needed(agent, [], clock() + HOUR, owners)) == {}


def test_a_session_on_two_gpus_gets_the_units_of_one_session_on_each(agent: FakeAgent, clock: Clock) -> None:
    limited = {**ON_BOTH, **LIMITED, "effective_units": 20, "borrowed_units": 80}
    share(agent, "mia", units=100, guaranteed_units=20, quota="group:ml", opened_at=1.0, **limited)
    for gpu in range(2):
        share(agent, f"guest{gpu}", units=80, gpu=gpu, gpu_busy=True, opened_at=2.0)
    found = now_needed(agent, [], clock() + HOUR, EQUAL)
    assert kept(found) == {"guest0": 50, "guest1": 50}
    assert found.free_again == frozenset({"mia"}), "the limits of the others are enough"


def test_a_session_on_two_gpus_keeps_its_limit_while_a_server_starts_on_one(agent: FakeAgent, clock: Clock) -> None:
    limited = {**ON_BOTH, **LIMITED, "effective_units": 20, "borrowed_units": 80}
    share(agent, "guest", units=100, guaranteed_units=20, **limited)
    share(agent, "mia", units=80, quota="group:ml", gpu_busy=True)
    share(agent, "zoe", units=80, gpu=1, quota="group:ml", confirmed=False)
    found = now_needed(agent, [], clock() + HOUR, EQUAL)
    assert (kept(found), found.free_again) == ({"guest": 20}, frozenset())


def test_the_exchange_of_sessions_on_several_gpus_reaches_the_entitlements_and_ends(
    agent: FakeAgent, clock: Clock
) -> None:
    share(agent, "pair", units=60, guaranteed_units=60, **ON_BOTH)
    share(agent, "mia", units=90, guaranteed_units=40, borrowed_units=50, quota="group:ml", gpu_busy=True)
    share(agent, "zoe", units=90, gpu=1, guaranteed_units=40, borrowed_units=50, quota="group:ml", gpu_busy=True)
    rules = Quotas.model_validate({"groups": {"ml": {"weight": 4}, "guests": {}}})
    before: dict[str, int] | None = None
    for number in range(1, 6):
        now = clock() + number * HOUR
        found = now_needed(agent, [], now, rules)
        for name, claim in found.reclaimed.items():
            borrowed = agent.sessions[name].share_units - claim.units
            changes = {"effective_units": claim.units, "borrowed_units": borrowed, "tier_since": now, **LIMITED}
            agent.change(name, **changes)
        ledger = LedgerFeed().follow([agent.report()])
        for name in agent.sessions:
            agent.change(name, guaranteed_units=ledger.guaranteed(name))
        got = {name: session.guaranteed_units for name, session in agent.sessions.items()}
        assert before in (None, got)
        before = got
    assert before == {"pair": 20, "mia": 80, "zoe": 80}


def test_a_limit_ends_if_an_older_session_owns_units_of_this_gpu_though_not_of_its_other(
    agent: FakeAgent, clock: Clock
) -> None:
    share(agent, "mia", units=50, borrowed_units=50, quota="group:ml", opened_at=1.0, **ON_BOTH)
    share(agent, "guest", units=75, gpu_busy=True, opened_at=2.0)
    agent.change("guest", effective_units=50, guaranteed_units=50, borrowed_units=75, **LIMITED)
    share(agent, "owner", units=50, gpu=1, gpu_busy=True)
    lent = {"effective_units": 0, "guaranteed_units": 0, "tier": Tier.RELEASED}
    share(agent, "idle", units=50, gpu=1, **lent)
    found = now_needed(agent, [], clock() + HOUR, EQUAL)
    assert (kept(found), found.free_again) == ({}, frozenset({"guest"}))


@pytest.mark.parametrize(("there", "limit"), [(100, 25), (30, 35), (0, 50)])
@pytest.mark.parametrize("closed", ["cordoned", "unhealthy"])
def test_units_in_use_on_a_gpu_that_is_closed_to_new_sessions_are_divided_and_free_ones_are_not(
    agent: FakeAgent, clock: Clock, closed: str, there: int, limit: int
) -> None:
    """Beside 25 and 75 units, guests have 100, 30 or none there, so group ml is entitled to 100, 65 or 50."""
    share(agent, "guest", units=75, gpu_busy=True)
    share(agent, "mia", units=75, borrowed_units=50, guaranteed_units=25, quota="group:ml", gpu_busy=True)
    if there:
        share(agent, "other", units=there, gpu=1, exemption=Exemption(until=clock() + 2 * HOUR, by="root"))
    change: dict[str, Any] = {"cordoned": True} if closed == "cordoned" else {"healthy": False}
    agent.gpus = (agent.gpus[0], agent.gpus[1].model_copy(update=change))
    assert kept(now_needed(agent, [], clock() + HOUR, EQUAL)) == {"guest": limit}


def test_a_session_that_lacks_units_of_one_gpu_gives_those_of_the_other(agent: FakeAgent, clock: Clock) -> None:
    """Its owner has reclaimed 30 of the half; the guests have 200 of 300 units, and each group is entitled to 150."""
    share(agent, "big", units=100, last_units=50, **ON_BOTH)
    uneven = {"borrowed_units": 80, "borrowed_each": (0, 30), "guaranteed_units": 20, "guaranteed_each": (100, 20)}
    agent.change("big", **uneven, opened_at=1.0)
    share(agent, "owner", units=80, gpu=1, gpu_busy=True)
    lent: dict[str, Any] = {"effective_units": 50, "guaranteed_units": 0, "opened_at": 5.0}
    share(agent, "mia", borrowed_units=50, quota="group:ml", gpu_busy=True, **lent)
    assert kept(now_needed(agent, [], clock() + HOUR, EQUAL)) == {"big": 50}


def test_an_account_passes_no_units_on_if_an_older_session_without_limit_would_get_those_given_to_it(
    agent: FakeAgent, clock: Clock
) -> None:
    exempt: dict[str, Any] = {"exemption": Exemption(until=clock() + 2 * HOUR, by="root"), "gpu_busy": True}
    borrows: dict[str, Any] = {"guaranteed_units": 0, "gpu_busy": True, "opened_at": 5.0}
    share(agent, "old", units=100, borrowed_units=80, **exempt)
    agent.change("old", guaranteed_units=20)
    share(agent, "guest", units=80, gpu_busy=True, opened_at=3.0)
    share(agent, "mid0", units=60, borrowed_units=60, quota="group:hep", **borrows)
    share(agent, "mid1", units=66, gpu=1, quota="group:hep", gpu_busy=True)
    share(agent, "other", units=34, gpu=1, **exempt)
    share(agent, "mia", units=100, gpu=1, borrowed_units=100, quota="group:ml", **borrows)
    rules = Quotas.model_validate({"groups": {"ml": {}, "hep": {}, "guests": {}}})
    agent.change("old", opened_at=9.0)
    assert kept(now_needed(agent, [], clock() + HOUR, rules)) == {"guest": 20, "mid1": 6}
    agent.change("old", opened_at=1.0)
    assert kept(now_needed(agent, [], clock() + HOUR, rules)) == {}


def test_a_session_in_quota_gets_its_units_from_one_in_quota_of_an_account_with_more_than_its_entitlement(
    agent: FakeAgent, clock: Clock
) -> None:
    share(agent, "mia", units=100, guaranteed_units=0, borrowed_units=100, quota="group:ml", gpu_busy=True)
    share(agent, "guest", units=100, gpu_busy=True, opened_at=1.0)
    share(agent, "second", units=100, gpu=1, gpu_busy=True, opened_at=2.0)
    rules = Quotas.model_validate({"groups": {"ml": {"guarantee": 1}, "guests": {"guarantee": 1}}})
    exempt = Exemption(until=clock() + 2 * HOUR, by="root")
    agent.change("guest", exemption=exempt)
    assert kept(now_needed(agent, [], clock() + HOUR, rules)) == {}
    agent.change("guest", exemption=None)
    # guests keep their guarantee: that is on the other GPU
    assert kept(now_needed(agent, [], clock() + HOUR, rules)) == {"guest": 0}
    agent.change("guest", effective_units=0, guaranteed_units=0, borrowed_units=100, **LIMITED)
    agent.change("mia", guaranteed_units=100)
    assert kept(now_needed(agent, [], clock() + HOUR, rules)) == {"guest": 0}
    agent.sessions.pop("second")
    found = now_needed(agent, [], clock() + HOUR, rules)
    assert (kept(found), found.free_again) == ({}, frozenset({"guest"}))


def test_units_may_be_needed_although_all_sessions_are_in_quota(agent: FakeAgent, clock: Clock) -> None:
    rules = Quotas.model_validate({"groups": {"ml": {"guarantee": 2}, "guests": {"guarantee": 2}}})
    for gpu in (0, 1):
        share(agent, f"guest{gpu}", units=100, gpu=gpu, gpu_busy=True, opened_at=1.0)
    assert not may_matter([agent.report()], quota_use(rules, [agent.report()]))
    for gpu in (0, 1):
        borrowed = {"guaranteed_units": 0, "borrowed_units": 100, "quota": "group:ml"}
        share(agent, f"ml{gpu}", units=100, gpu=gpu, gpu_busy=True, opened_at=2.0, **borrowed)
    use = quota_use(rules, [agent.report()])
    assert not list(use.over_quota_sessions())
    # the guarantees exceed the two GPUs: each quota is entitled to one
    assert list(kept(now_needed(agent, [], clock() + HOUR, rules)).values()) == [0]
    assert may_matter([agent.report()], use)


async def test_units_that_nobody_else_needs_are_given_back_while_the_session_still_yields(
    stage: Stage, agent: FakeAgent, clock: Clock
) -> None:
    agent.sessions.clear()
    agent.gpus, stage.quotas = agent.gpus[:1], Quotas.model_validate({"groups": {"ml": {}, "guests": {}}})
    limited: dict[str, Any] = {"tier": Tier.DOWNGRADED, "yields": True, "effective_units": 20, "borrowed_units": 80}
    share(agent, "guest", units=100, guaranteed_units=20, gpu_busy=True, **limited)
    limited["effective_units"] = 50
    share(agent, "mia", units=100, guaranteed_units=50, quota="group:ml", gpu_busy=True, **limited)
    clock.forward(HOUR)
    await stage.culler.round()
    request = next(one for one in agent.asked if isinstance(one, TierRequest))
    assert (request.id, request.tier, request.effective_units) == ("guest", Tier.DOWNGRADED, 50)
    assert request.yields_until == clock() + 600


def with_priorities(agent: FakeAgent) -> dict[str, Template]:
    """Two GPUs full of halves: one of a template of low priority works, the others are idle."""
    for number in range(4):
        share(agent, f"guest{number}", gpu=number // 2, last_gpu_activity=1.0)
    agent.change("guest1", template="low", gpu_busy=True)
    low = HALF.model_copy(update={"name": "low", "priority": "low"})
    return TEMPLATES | {"low": low, "kept": HALF.model_copy(update={"name": "kept", "reclaimable": False})}


def test_sessions_of_a_low_priority_make_way_first_even_while_they_work(agent: FakeAgent, clock: Clock) -> None:
    templates = with_priorities(agent)
    one = pressure(QUOTAS, [agent.report()], [waits("eve")], templates, clock() + HOUR)
    assert kept(one) == {"guest1": 0}
    # no GPU has a whole GPU of low priority only
    whole = pressure(QUOTAS, [agent.report()], [waits("eve", "whole")], templates, clock() + HOUR)
    assert kept(whole) == {"guest2": 0, "guest3": 0}


def test_a_session_that_is_not_reclaimable_never_makes_way(agent: FakeAgent, clock: Clock) -> None:
    templates = with_priorities(agent)
    for name in ("guest0", "guest1", "guest2"):
        agent.change(name, template="kept")
    found = pressure(QUOTAS, [agent.report()], [waits("eve"), waits("bob")], templates, clock() + HOUR)
    assert kept(found) == {"guest3": 0}


def test_a_spawn_of_a_high_priority_is_served_first(agent: FakeAgent, clock: Clock) -> None:
    templates = with_priorities(agent)
    rules = Quotas.model_validate({"groups": {"ml": {"guarantee": 0.5, "weight": 0}, "guests": {}}})
    pending = [waits("eve"), waits("zoe", "tenth", since=9.0)]
    assert kept(pressure(rules, [agent.report()], pending, templates, clock() + HOUR)) == {"guest1": 0}
    # a tenth of the guarantee is for zoe, and the rest is too little for eve
    templates["tenth"] = TENTH.model_copy(update={"priority": "high"})
    assert kept(pressure(rules, [agent.report()], pending, templates, clock() + HOUR))["guest1"] == 40
