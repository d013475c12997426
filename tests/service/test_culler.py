"""The culler against a scripted agent and hub, with a clock that the tests move."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from gpushare_spawner.model.control import NoticeRequest, Request, TierRequest
from gpushare_spawner.model.controls import Exemption, Keep
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext, Counters
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings, HubWatch
from gpushare_spawner.service.history.store import Action
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.service.reports import MachineAgent
from gpushare_spawner.wording.amounts import utc
from tests.present import present
from tests.service.conftest import HOUR, MINUTE, Clock
from tests.service.fake_agent import FakeAgent, Refuse
from tests.service.fake_hub import FakeHub

# asks the hub in every round
EAGER = CullerSettings(cull_every=1e-9)
MakeCuller = Callable[..., Culler]


@pytest.fixture
def culler(agent: FakeAgent, hub: Hub, templates: dict[str, Template], clock: Clock) -> MakeCuller:
    """Makes a new culler: as after a restart of the service, it knows nothing."""

    def make(**settings: Any) -> Culler:
        return Culler(
            ActionContext([MachineAgent(agent.path)], hub, lambda: templates, clock=clock), replace(EAGER, **settings)
        )

    return make


async def test_the_way_down_each_action_told_before(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    ann = agent.add("ann")
    hub_server.add("ann", last_activity=clock())
    one = culler()
    log = []
    for _ in range(9 * 60):
        await one.round()
        log += [(request.op, request.tier.value, (clock() - 1_000_000) / MINUTE) for request in agent.asked]
        agent.asked.clear()
        clock.forward(MINUTE)
        if hub_server.deleted:
            break
    assert log == [
        ("notice", "downgraded", 10),
        ("tier", "downgraded", 15),
        ("notice", "released", 40),
        ("tier", "released", 45),
        ("notice", "stopped", 475),
    ]
    assert hub_server.deleted == ["/users/ann/server"]
    assert clock() - 1_000_000 == 481 * MINUTE
    assert agent.sessions[ann].tier is Tier.RELEASED
    assert dict(one.counters.actions) == {Tier.DOWNGRADED: 1, Tier.RELEASED: 1, Tier.STOPPED: 1}


async def test_session_of_another_layer_is_only_stopped_after_its_gpu_and_kernels_were_idle(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    ann = agent.add("ann", layer=LayerName.MPS)
    hub_server.add("ann", last_activity=clock())
    one, began, log = culler(), clock(), []
    while not hub_server.deleted:
        await one.round()
        log += [(*told, (clock() - began) / HOUR) for told in agent.told]
        agent.asked.clear()
        clock.forward(15 * MINUTE)
        if clock() - began <= 3 * HOUR:
            agent.work(ann)
        if clock() - began == 5 * HOUR:
            agent.change(ann, last_kernel_activity=clock())
        # one burst that lasts, with nothing else to be seen
        agent.change(ann, gpu_busy=10 * HOUR <= clock() - began < 20 * HOUR)
        if clock() - began == 20 * HOUR:
            agent.work(ann)
        assert clock() - began < 48 * HOUR
    assert log == [("notice", ann, "stopped", 28.0)]
    assert hub_server.deleted == ["/users/ann/server"]
    assert agent.sessions[ann].tier is Tier.ACTIVE
    assert dict(one.counters.actions) == {Tier.STOPPED: 1}


async def test_notices_say_when_what_is_left_and_why(culler: MakeCuller, agent: FakeAgent, clock: Clock) -> None:
    agent.add("ann")
    clock.forward(10 * MINUTE)
    again = await culler().round()
    (request,) = agent.asked
    assert request.at == 1_000_000 + 15 * MINUTE
    assert request.effective_units == 10
    assert "is downgraded from 0.25 GPU to 0.10 GPU" in request.reason
    assert again == request.at  # the next pass is just then


async def test_work_takes_the_notice_back(culler: MakeCuller, agent: FakeAgent, clock: Clock) -> None:
    ann = agent.add("ann")
    clock.forward(10 * MINUTE)
    await culler().round()
    agent.change(ann, last_gpu_activity=clock() + 1)
    clock.forward(MINUTE)
    await culler().round()
    assert agent.told[-1] == ("notice", ann, None)
    assert agent.sessions[ann].notice is None


async def test_killed_between_decision_and_action(culler: MakeCuller, agent: FakeAgent, clock: Clock) -> None:
    """All that counts is in the agent's report: every round here is made by a culler that knows of no other."""
    ann = agent.add("ann")
    clock.forward(10 * MINUTE)
    await culler().round()
    clock.forward(5 * MINUTE)

    def die(request: Request) -> None:
        if isinstance(request, TierRequest):
            raise Refuse("the service is dead before the request is out")

    agent.before = die
    await culler().round()
    assert agent.sessions[ann].tier is Tier.ACTIVE
    assert agent.sessions[ann].notice is not None
    agent.before = lambda request: None
    clock.forward(30)
    await culler().round()
    assert agent.sessions[ann].tier is Tier.DOWNGRADED
    assert agent.told.count(("notice", ann, "downgraded")) == 1  # told once, not again


async def test_killed_in_the_middle_of_a_round(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpushare_spawner.service.culler.culler.AT_ONCE", 1)
    names = [agent.add(f"user-{number}") for number in range(5)]
    clock.forward(10 * MINUTE)
    await culler().round()
    clock.forward(5 * MINUTE)
    done = asyncio.Event()

    def count(request: Request) -> None:
        if isinstance(request, TierRequest) and len(agent.told) == 7:
            done.set()

    agent.before = count
    round_ = asyncio.create_task(culler().round())
    await done.wait()
    round_.cancel()
    with pytest.raises(asyncio.CancelledError):
        await round_
    assert {agent.sessions[name].tier for name in names} == {Tier.ACTIVE, Tier.DOWNGRADED}
    await culler().round()
    assert {agent.sessions[name].tier for name in names} == {Tier.DOWNGRADED}


async def test_work_between_report_and_action_is_respected(culler: MakeCuller, agent: FakeAgent, clock: Clock) -> None:
    ann = agent.add("ann")
    clock.forward(10 * MINUTE)
    await culler().round()
    clock.forward(5 * MINUTE)

    def work_first(request: Request) -> None:
        if isinstance(request, TierRequest):
            agent.work(ann)

    agent.before = work_first
    await culler().round()
    assert agent.told[-1] == ("tier", ann, "downgraded")  # asked, and refused
    assert agent.sessions[ann].tier is Tier.ACTIVE


def released(agent: FakeAgent, hub_server: FakeHub, clock: Clock, **changes: Any) -> str:
    """A session at the end of its eight hours, announced; the hub saw it last when it was opened."""
    opened = clock()
    ann = agent.add("ann", tier=Tier.RELEASED, effective_units=0, guaranteed_units=0, **changes)
    hub_server.add("ann", last_activity=opened)
    clock.forward(8 * HOUR)
    agent.change(ann, notice=Notice(tier=Tier.STOPPED, at=clock(), reason="told"))
    return ann


async def test_stop_deletes_through_the_hub_whose_pages_then_say_why(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    released(agent, hub_server, clock)
    await culler().round()
    assert hub_server.deleted == ["/users/ann/server"]
    assert await hub_server.noted() == {
        "/users/ann/server": f"{utc(clock())}: The server was stopped: for 8 h there was no GPU work, no busy kernel "
        "and no other activity. Files stay. Variables in kernels are lost."
    }


async def test_a_service_that_cannot_tell_why_has_stopped_the_server_all_the_same(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    released(agent, hub_server, clock)
    one = culler()
    hub_server.faults = [None, None, None, 403]  # the list, the server, the stop, and the question whether it stopped
    await one.round()
    await asyncio.gather(*one._context.notes._under_way)
    assert not hub_server.notes
    assert hub_server.deleted == ["/users/ann/server"]
    assert one.counters.actions == {Tier.STOPPED: 1}
    assert not one.counters.failures.total()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_a_busy_kernel_is_not_stopped(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    ann = released(agent, hub_server, clock, kernels_busy=1)
    await culler().round()
    assert hub_server.deleted == []
    assert agent.sessions[ann].notice is None  # it was taken back: nothing is going to happen


async def test_activity_that_the_hub_saw_a_moment_ago_saves_the_server(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    """The list of servers is older than what the hub says of the one server that is to stop."""
    released(agent, hub_server, clock)
    one = culler(cull_every=1000)
    await one._hub.refresh(1)
    hub_server.add("ann", last_activity=clock())
    await one.round()
    assert hub_server.deleted == []
    assert "/users/ann" in [path for _, path, _ in hub_server.asked]


async def test_a_kernel_that_went_to_work_a_moment_ago_saves_the_server(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    ann = released(agent, hub_server, clock)
    reports = []

    def start_a_cell(request: Request) -> None:
        reports.append(request)
        if len(reports) == 2:  # the second pass
            agent.change(ann, kernels_busy=1)

    agent.before = start_a_cell
    await culler().round()
    assert hub_server.deleted == []


@pytest.mark.parametrize("state", [{"pending": "stop"}, {"ready": False}])
async def test_pending_servers_are_left_alone(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock, state: dict[str, Any]
) -> None:
    released(agent, hub_server, clock)
    hub_server.add("ann", last_activity=1_000_000.0, **state)
    hub_server.add("ann", "other", last_activity=clock())  # so that ann is among the users with ready servers
    await culler().round()
    assert hub_server.deleted == []
    assert agent.asked == []


async def test_a_session_that_is_still_starting_is_left_alone(
    culler: MakeCuller, agent: FakeAgent, clock: Clock
) -> None:
    agent.add("ann", confirmed=False)
    clock.forward(HOUR)
    await culler().round()
    assert agent.asked == []


async def test_the_gpu_actions_need_no_hub(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ann = agent.add("ann")
    hub_server.faults = [500] * 100
    clock.forward(10 * MINUTE)
    one = culler()
    await one.round()
    clock.forward(5 * MINUTE)
    await one.round()
    assert agent.sessions[ann].tier is Tier.DOWNGRADED
    assert one.counters.failures["hub"] == 2
    said = [record for record in caplog.records if "No server is stopped until" in record.message]
    assert len(said) == 1  # not in every round


async def test_a_changed_reason_of_the_hubs_failure_is_logged_again(
    hub: Hub, hub_server: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    watch = HubWatch(hub, 0.0, all_users=False, counters=Counters())
    hub_server.faults = [b"not JSON", b"not JSON", 403, 403]
    for _ in range(4):
        await watch.refresh(20)
    said = [record.message for record in caplog.records if "No server is stopped until" in record.message]
    assert len(said) == 2
    assert "cannot be read" in said[0]
    assert "403" in said[1]


async def test_a_hub_that_hangs_holds_up_no_gpu_action(
    agent: FakeAgent, hub: Hub, hub_server: FakeHub, templates: dict[str, Template], clock: Clock
) -> None:
    ann = agent.add("ann")
    hub_server.faults = ["hang"] * 100
    one = Culler(ActionContext([MachineAgent(agent.path)], hub, lambda: templates, clock=clock), EAGER, patience=0.01)
    clock.forward(10 * MINUTE)
    await one.round()
    clock.forward(5 * MINUTE)
    await one.round()
    assert agent.sessions[ann].tier is Tier.DOWNGRADED
    assert len(hub_server.asked) <= 1  # it waits for that answer, and asks no second question
    one._hub.close()


async def test_a_stop_that_hangs_holds_up_no_gpu_action(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    released(agent, hub_server, clock)
    one = culler(cull_every=1000)
    one._patience = 0.1
    await one._hub.refresh(1)
    hub_server.faults = ["hang"] * 100
    await one.round()
    bob = agent.add("bob")
    clock.forward(10 * MINUTE)
    await one.round()
    assert agent.sessions[bob].notice is not None
    assert list(one._under_way) == ["server ann"]
    one._under_way["server ann"].cancel()


async def test_a_deletion_that_the_hub_turns_away_is_decided_anew(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    """Not sent again as it was: the user may be back."""
    ann = released(agent, hub_server, clock)
    one = culler(cull_every=1000)
    await one._hub.refresh(1)
    hub_server.faults = [None, 503]
    await one.round()
    assert hub_server.deleted == ["/users/ann/server"]
    assert hub_server.users["ann"]["servers"]
    agent.change(ann, kernels_busy=1)
    await one.round()
    assert hub_server.deleted == ["/users/ann/server"]
    agent.change(ann, kernels_busy=0, notice=Notice(tier=Tier.STOPPED, at=clock(), reason="told"))
    await one.round()
    assert hub_server.users["ann"]["servers"] == {}


async def test_without_the_hubs_word_nobody_is_stopped(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    released(agent, hub_server, clock)
    hub_server.faults = [500] * 100
    await culler().round()
    assert hub_server.deleted == []


async def test_one_bad_session_does_not_hold_up_the_others(culler: MakeCuller, agent: FakeAgent, clock: Clock) -> None:
    for number in range(20):
        agent.add(f"user-{number}")

    def refuse_one(request: Request) -> None:
        if getattr(request, "id", "") == "user-7":
            raise Refuse("out of luck")

    agent.before = refuse_one
    clock.forward(10 * MINUTE)
    one = culler()
    await one.round()
    told = [name for name, session in agent.sessions.items() if session.notice]
    assert len(told) == 19
    assert one.counters.failures["agent"] == 1


async def test_a_silent_agent_does_not_hold_up_another(
    agent: FakeAgent,
    hub: Hub,
    templates: dict[str, Template],
    clock: Clock,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ann = agent.add("ann")
    clock.forward(10 * MINUTE)
    agents = [MachineAgent(tmp_path / "nobody.sock"), MachineAgent(agent.path)]
    one = Culler(ActionContext(agents, hub, lambda: templates, clock=clock), EAGER)
    await one.round()
    await one.round()
    assert agent.sessions[ann].notice is not None
    assert sum("nobody.sock" in record.message for record in caplog.records) == 1


async def test_a_template_that_is_gone(
    culler: MakeCuller, agent: FakeAgent, templates: dict[str, Template], clock: Clock
) -> None:
    agent.add("ann")
    templates.clear()
    clock.forward(99 * HOUR)
    await culler().round()
    assert agent.asked == []


async def test_rounds_go_on_after_one_that_failed(
    agent: FakeAgent, hub: Hub, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def broken() -> NoReturn:
        calls.append(1)
        raise RuntimeError("templates are on fire")

    one = Culler(ActionContext([MachineAgent(agent.path)], hub, broken, clock=clock), replace(EAGER, cull_every=0.01))
    task = asyncio.create_task(one.run())
    while len(calls) < 3:
        await asyncio.sleep(0.01)
    task.cancel()
    assert one.counters.failures["round"] >= 2


# -- servers without a share, and users --------------------------------------------------------------------------------


async def test_servers_without_a_template_follow_the_options(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    hub_server.add("old", last_activity=clock() - 3601)
    hub_server.add("new", last_activity=clock() - 3599)
    hub_server.add("busy", last_activity=clock() - 9999, pending="spawn")
    await culler().round()
    assert hub_server.deleted == []  # --timeout is 0: never
    await culler(timeout=3600).round()
    assert hub_server.deleted == ["/users/old/server"]
    assert list(await hub_server.noted()) == ["/users/old/server"]
    hub_server.add("old", "named", last_activity=clock() - 3601)
    one = culler(timeout=3600, remove_named_servers=True)
    await one.round()
    assert hub_server.asked[-1] == ("DELETE", "/users/old/servers/named", {"remove": True})
    assert not one._context.notes._under_way, "a note would make the server again"
    assert list(hub_server.users["new"]["servers"]) == [""]


async def test_a_cpu_template_says_when_to_stop(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    hub_server.add("ann", last_activity=clock() - 2 * HOUR - 1, user_options={"profile": "cpu"})
    hub_server.add("bob", last_activity=clock() - 2 * HOUR + 60, user_options={"profile": "cpu"})
    await culler(timeout=60).round()
    assert hub_server.deleted == ["/users/ann/server"]


async def test_a_gpu_server_that_no_agent_knows_is_left_alone_and_it_is_said(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    hub_server.add("ann", last_activity=clock() - 99 * HOUR, user_options={"profile": "quarter"})
    one = culler(timeout=60, max_age=60)
    await one.round()
    await one.round()
    assert hub_server.deleted == []
    assert [r.message for r in caplog.records if "ann" in r.message] == [
        "ann: not stopped: its template has a GPU share, and no agent reports the session"
    ]


async def test_while_an_agent_is_silent_servers_of_unknown_kind_are_left_alone(
    hub: Hub, hub_server: FakeHub, templates: dict[str, Template], clock: Clock, tmp_path: Path
) -> None:
    hub_server.add("ann", last_activity=clock() - 99 * HOUR)
    hub_server.add("bob", last_activity=clock() - 99 * HOUR, user_options={"profile": "cpu"})
    silent = Culler(
        ActionContext([MachineAgent(tmp_path / "nobody.sock")], hub, lambda: templates, clock=clock),
        replace(EAGER, timeout=60),
    )
    await silent.round()
    assert hub_server.deleted == ["/users/bob/server"]


async def test_max_age_of_a_session_is_announced_first(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    ann = agent.add("ann", gpu_busy=True)
    hub_server.add("ann")
    clock.forward(2 * HOUR - 5 * MINUTE)
    one = culler(max_age=2 * HOUR)
    await one.round()
    assert present(agent.sessions[ann].notice).tier is Tier.STOPPED
    assert hub_server.deleted == []
    clock.forward(5 * MINUTE)
    await one.round()
    assert hub_server.deleted == ["/users/ann/server"]
    said = (await hub_server.noted())["/users/ann/server"]
    assert "The server was stopped: servers run for at most 2 h here. Files stay." in said


async def test_a_busy_user_is_told_that_the_server_is_too_old(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    ann = agent.add("ann", gpu_busy=True)
    hub_server.add("ann")
    clock.forward(2 * HOUR - 5 * MINUTE)
    await culler(max_age=2 * HOUR).round()
    told = present(agent.sessions[ann].notice)
    assert (told.cause, told.after_seconds) == (IdleCause.MAX_AGE, 2 * HOUR)


async def test_an_older_agent_that_forgets_the_cause_is_told_once(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    def without_cause(request: NoticeRequest) -> Notice | None:
        notice = request.notice
        return notice and notice.model_copy(update={"cause": None, "after_seconds": 0.0})

    agent.kept = without_cause
    agent.add("ann", gpu_busy=True)
    hub_server.add("ann")
    clock.forward(2 * HOUR - 5 * MINUTE)
    one = culler(max_age=2 * HOUR)
    await one.round()
    clock.forward(MINUTE)
    await one.round()
    assert sum(isinstance(request, NoticeRequest) for request in agent.asked) == 1
    clock.forward(4 * MINUTE)
    await one.round()
    assert hub_server.deleted == ["/users/ann/server"]


async def test_users_are_deleted_only_when_asked_for(
    culler: MakeCuller, agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    hub_server.add("gone", None, last_activity=clock() - 3601, admin=False)
    hub_server.add("boss", None, last_activity=clock() - 3601, admin=True)
    hub_server.add("unclear", None, last_activity=clock() - 3601)
    hub_server.add("here", None, last_activity=clock(), admin=False)
    hub_server.add("running", None, last_activity=clock() - 3601, admin=False)
    hub_server.add("running", last_activity=clock())
    await culler(timeout=3600).round()
    assert hub_server.deleted == []
    await culler(timeout=3600, cull_users=True, cull_admin_users=False).round()
    assert hub_server.deleted == ["/users/gone"]
    await culler(timeout=3600, cull_users=True).round()
    assert sorted(hub_server.users) == ["here", "running"]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gpushare.service")


async def heartbeat(one: Culler, agent: FakeAgent, session: str, clock: Clock, until: float) -> None:
    """A memset of one byte every 20 s, and a round of the culler every 10 s."""
    while clock() < until:
        for work in (True, False):
            clock.forward(10)
            if work:
                agent.work(session, seconds=0.004)
            await one.round()


async def test_a_heartbeat_keeps_no_share_and_is_named_once(
    culler: MakeCuller, agent: FakeAgent, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ann, one, opened = agent.add("ann"), culler(), clock()
    await one.round()
    with caplog.at_level(logging.WARNING, "gpushare"):
        await heartbeat(one, agent, ann, clock, opened + 46 * MINUTE)
    assert one.counters.actions[Tier.DOWNGRADED] == 1
    assert one.counters.actions[Tier.RELEASED] == 1
    named = [record.getMessage() for record in caplog.records if "Short GPU work" in record.getMessage()]
    assert named == [
        "session ann: Short GPU work recurs and would keep the share if it counted as use. Use is GPU "
        "work of at least 15 s at a time or within 15 min."
    ]
    released = next(request for request in agent.asked if request.op == "tier" and request.tier is Tier.RELEASED)
    assert released.reason.startswith(
        "After 45 min without GPU work of at least 15 s at a time or within 15 min, this share"
    )


async def test_a_heartbeat_keeps_the_share_where_all_work_counts(
    culler: MakeCuller, agent: FakeAgent, clock: Clock, templates: dict[str, Template]
) -> None:
    idle = templates["quarter"].idle.model_copy(update={"min_use": 0.0})
    templates["quarter"] = templates["quarter"].model_copy(update={"idle": idle})
    one, ann, opened = culler(), agent.add("ann"), clock()
    await one.round()
    await heartbeat(one, agent, ann, clock, opened + 20 * MINUTE)
    assert agent.told == []


async def test_a_cell_of_some_seconds_now_and_then_keeps_the_share(
    culler: MakeCuller, agent: FakeAgent, clock: Clock
) -> None:
    ann, one = agent.add("ann"), culler()
    for _ in range(20):
        agent.work(ann, seconds=15.0)
        await one.round()
        clock.forward(9 * MINUTE)
    assert agent.told == []


async def test_an_old_report_counts_all_work_as_use(
    culler: MakeCuller, agent: FakeAgent, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, one = agent.add("ann"), culler()
    made = agent.report
    monkeypatch.setattr(agent, "report", lambda: made().model_copy(update={"published_at": clock() - 61}))
    for _ in range(100):
        agent.work(ann, seconds=0.004)
        await one.round()
        clock.forward(20)
    assert agent.told == []


# -- keeps and exemptions ----------------------------------------------------------------------------------------------


@pytest.fixture
def keeping(agent: FakeAgent, hub: Hub, templates: dict[str, Template], clock: Clock) -> tuple[Culler, list[Action]]:
    """A culler that ends what is over, and what the history gets."""
    client, recorded = MachineAgent(agent.path), list[Action]()
    actions = ActionContext([client], hub, lambda: templates, record=recorded.append, clock=clock)
    return Culler(actions, EAGER), recorded


async def test_a_keep_holds_until_its_end_which_is_entered_and_then_actions_come_with_a_notice(
    keeping: tuple[Culler, list[Action]], agent: FakeAgent, clock: Clock
) -> None:
    one, recorded = keeping
    agent.add("ann")
    began = clock()
    clock.forward(12 * MINUTE)
    await one.round()
    assert agent.told == [("notice", "ann", "downgraded")]
    agent.change("ann", keep=Keep(until=began + 3 * HOUR, since=clock(), by="ann"))
    again = await one.round()
    assert agent.told[1:] == [("notice", "ann", None)]
    assert again == began + 3 * HOUR
    while clock() < began + 3 * HOUR:
        await one.round()
        clock.forward(MINUTE)
    assert len(agent.told) == 2
    assert agent.sessions["ann"].tier is Tier.ACTIVE
    while agent.sessions["ann"].tier is Tier.ACTIVE:
        await one.round()
        clock.forward(MINUTE)
    assert (clock() - began) / MINUTE == 3 * 60 + 6
    assert agent.sessions["ann"].keep is None
    assert [action.action for action in recorded] == ["keep-ended", "downgraded"]
    assert {action.actor for action in recorded} == {"culler"}


async def test_a_clock_that_is_set_back_does_not_bring_back_a_keep_nor_make_one_last(
    keeping: tuple[Culler, list[Action]], agent: FakeAgent, clock: Clock
) -> None:
    one, _ = keeping
    agent.add("ann")
    agent.change("ann", keep=Keep(until=clock() + HOUR, since=clock(), by="ann"))
    clock.forward(2 * HOUR)
    await one.round()
    clock.forward(-24 * HOUR)
    await one.round()
    assert agent.sessions["ann"].keep is None
    agent.change("ann", keep=Keep(until=clock() + 25 * HOUR, since=clock() + 24 * HOUR, by="ann"))
    await one.round()
    assert present(agent.sessions["ann"].keep).until == clock() + HOUR


async def test_an_exempt_session_is_left_alone_by_everything(
    keeping: tuple[Culler, list[Action]], agent: FakeAgent, hub_server: FakeHub, clock: Clock
) -> None:
    one, _ = keeping
    agent.add("ann", exemption=Exemption(by="root"))
    hub_server.add("ann", last_activity=clock())
    for _ in range(12):
        clock.forward(HOUR)
        await one.round()
    assert not agent.asked
    assert not hub_server.deleted


async def test_a_keep_that_cannot_be_removed_delays_no_idle_action(
    keeping: tuple[Culler, list[Action]], agent: FakeAgent, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    one, recorded = keeping
    agent.add("ann", keep=Keep(until=clock() + 1, since=clock(), by="ann"))
    agent.older = True
    for _ in range(20):
        clock.forward(MINUTE)
        await one.round()
    assert agent.sessions["ann"].tier is Tier.DOWNGRADED
    assert [action.action for action in recorded] == ["downgraded"]
    assert "ann: cannot remove an expired keep or exemption" in caplog.text
