"""Restart with a template: what is checked before the stop, and what becomes of the server where something fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare_spawner.model.controls import Cordon
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.service.actions import restart
from gpushare_spawner.service.actions.context import ActionOutcome, Actor, RefusalCode
from gpushare_spawner.service.history.recorder import History, HistorySources
from gpushare_spawner.service.history.store import BegunRestart, HistoryStore
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.service.reports import MachineAgent, NodeSnapshot
from gpushare_spawner.wording import actions as words
from tests.service.actions.conftest import ANN, ROOT, Acting
from tests.service.actions.test_other_actions import refusal_of
from tests.service.conftest import Clock
from tests.service.fake_agent import FakeAgent
from tests.service.fake_hub import FakeHub

OPTIONS = {"profile": "quarter", "quota": "ml", "image": "new"}


@pytest.fixture
def templates() -> dict[str, Template]:
    def template(name: str, fraction: float, **more: object) -> Template:
        return Template(name=name, display_name=f"{fraction:.2f} GPU", gpu={"fraction": fraction}, **more)

    found = (
        template("quarter", 0.25),
        template("half", 0.5, limits={"per_user": 1}),
        template("course", 0.5, access={"groups": ["ml"]}),
        Template(name="cpu", display_name="CPU only"),
        Template(name="a100", display_name="A100", gpu={"fraction": 0.5, "models": ["*A100*"]}),
        Template(name="several", display_name="3 GPUs", gpu={"count": 3}),
    )
    return {one.name: one for one in found}


@pytest.fixture
def running(hub_server: FakeHub) -> FakeHub:
    """Ann's server runs."""
    hub_server.add("ann", "", user_options=OPTIONS)
    return hub_server


def chosen(hub_server: FakeHub, server: str = "") -> Mapping[str, object] | None:
    """The options that the server was started with; None: it does not run."""
    servers = hub_server.users["ann"]["servers"]
    options: Mapping[str, object] | None = servers[server]["user_options"] if server in servers else None
    return options


async def test_a_server_restarts_with_the_options_of_the_template(acting: Acting, running: FakeHub) -> None:
    outcome = await restart.restart(acting.actions, acting.seen(), ANN, "half")
    assert outcome == ActionOutcome(True, words.restarts("0.50 GPU"))
    assert chosen(running) == {"profile": "half"}
    assert acting.history == [("restart", "ann", "ann")]
    assert acting.recorded[0].reason == "ann restarted the server with the template 0.50 GPU."


async def test_with_its_own_template_it_keeps_all_that_was_chosen(acting: Acting, running: FakeHub) -> None:
    assert (await restart.restart(acting.actions, acting.seen(), ANN, "quarter")).changed
    assert chosen(running) == OPTIONS


@pytest.mark.parametrize(
    ("template", "actor", "code", "said"),
    [
        (
            "gold",
            ANN,
            RefusalCode.BAD_REQUEST,
            "There is no template 'gold'. You may use: 0.25 GPU (quarter), 0.50 GPU (half), CPU only (cpu), "
            "A100 (a100), 3 GPUs (several).",
        ),
        ("course", ANN, RefusalCode.LIMIT, "You may not use the template 0.50 GPU (course)."),
        ("course", ROOT, RefusalCode.LIMIT, "Nothing was done. The spawner would say to ann: You may not use"),
    ],
)
async def test_what_is_not_allowed_stops_nothing(
    acting: Acting, running: FakeHub, template: str, actor: Actor, code: RefusalCode, said: str
) -> None:
    running.users["ann"]["groups"] = ["physics"]
    refusal = await refusal_of(restart.restart(acting.actions, acting.seen(), actor, template))
    assert (refusal.code, refusal.text[: len(said)]) == (code, said)
    assert chosen(running) == OPTIONS
    assert not running.deleted
    assert not acting.recorded


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("several", "This needs 3 GPUs on one node, and no node has more than 2 of one model."),
        ("a100", "No GPU is of a model that the template asks for. Available models: Simulated GPU 16 GiB."),
    ],
)
async def test_a_template_that_no_node_can_take_stops_nothing(
    acting: Acting, running: FakeHub, template: str, said: str
) -> None:
    refusal = await refusal_of(restart.restart(acting.actions, acting.seen(), ANN, template))
    assert refusal.code is RefusalCode.CAPACITY
    assert refusal.text.startswith(said)
    assert (await refusal_of(restart.restart(acting.actions, acting.seen(), ROOT, template))).text.startswith(
        f"Nothing was done. The spawner would say to ann: {said}"
    )
    assert chosen(running) == OPTIONS
    assert not running.deleted
    assert not acting.recorded
    # a node that could take it is added later
    acting.actions.nodes_are_added = True
    assert (await restart.restart(acting.actions, acting.seen(), ANN, template)).changed


async def test_an_error_in_placement_refuses_no_restart(
    acting: Acting, running: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the index contradicts itself")

    monkeypatch.setattr(Ledger, "why_unplaceable", fails)
    assert (await restart.restart(acting.actions, acting.seen(), ANN, "a100")).changed
    assert "the index contradicts itself" in caplog.text


async def test_while_an_agent_is_silent_its_node_may_take_any_template(
    acting: Acting, running: FakeHub, tmp_path: Path
) -> None:
    acting.agents.append(MachineAgent(tmp_path / "silent.sock"))
    assert (await restart.restart(acting.actions, acting.seen(), ANN, "a100")).changed


async def test_a_full_or_cordoned_gpu_can_be_waited_for(acting: Acting, agent: FakeAgent, running: FakeHub) -> None:
    agent.cordons = (Cordon(by="root", since=0.0),)
    agent.add("bob", share_units=100, gpus=("GPU-0",))
    assert (await restart.restart(acting.actions, acting.seen(), ANN, "half")).changed


async def test_members_of_the_group_may(acting: Acting, running: FakeHub) -> None:
    running.users["ann"]["groups"] = ["ml"]
    assert (await restart.restart(acting.actions, acting.seen(), ANN, "course")).changed


async def test_where_groups_are_unknown_a_template_for_groups_is_refused(acting: Acting, running: FakeHub) -> None:
    refusal = await refusal_of(restart.restart(acting.actions, acting.seen(), ANN, "course"))
    assert (refusal.code, refusal.text) == (RefusalCode.HUB_UNAVAILABLE, words.GROUPS_UNKNOWN)
    assert not running.deleted


async def test_other_servers_count_for_the_limit_of_a_template(acting: Acting, running: FakeHub) -> None:
    running.add("ann", "second", user_options={"profile": "half"})
    refusal = await refusal_of(restart.restart(acting.actions, acting.seen(), ANN, "half"))
    assert refusal.code is RefusalCode.LIMIT
    assert "one server with 0.50 GPU at a time" in refusal.text
    assert not running.deleted


async def test_a_quota_refuses_before_the_stop_and_the_old_share_does_not_count(
    acting: Acting, agent: FakeAgent, running: FakeHub, hub: Hub
) -> None:
    running.users["ann"]["groups"] = ["ml"]
    quotas = Quotas.model_validate({"groups": {"ml": {"maximum": 0.6}, "art": {"maximum": 9}}})
    agent.add("ann", quota="group:ml")
    agent.add("bob", quota="group:ml", share_units=10)
    acting.actions.quotas = lambda: quotas
    assert (await restart.restart(acting.actions, acting.seen(), ANN, "course")).changed
    assert chosen(running) == {"profile": "course", "quota": "ml"}
    agent.add("bob", quota="group:ml", share_units=25)
    running.users["ann"]["servers"][""]["ready"], running.users["ann"]["servers"][""]["pending"] = True, None
    refusal = await refusal_of(restart.restart(acting.actions, acting.seen(), ANN, "half"))
    assert refusal.code is RefusalCode.LIMIT
    assert "the quota of group ml is limited to 0.60 GPU" in refusal.text
    assert chosen(running) == {"profile": "course", "quota": "ml"}


async def test_a_start_that_the_hub_refuses_brings_the_old_server_back(acting: Acting, running: FakeHub) -> None:
    running.faults = [None, None, None, 400]  # look, stop, look, start
    refusal = await refusal_of(restart.restart(acting.actions, acting.seen(), ANN, "half"))
    assert refusal.text.startswith("The server could not start with the template 0.50 GPU. It restarts with")
    assert "no, 400" in refusal.text
    assert chosen(running) == OPTIONS
    assert "no, 400" in acting.recorded[0].reason


async def test_a_hub_that_starts_nothing_is_said(acting: Acting, running: FakeHub) -> None:
    running.faults = [None, None, None, 400, 400]
    refusal = await refusal_of(restart.restart(acting.actions, acting.seen(), ANN, "half"))
    assert refusal.text.startswith("The server was stopped, and could not start with the template 0.50 GPU.")
    assert refusal.text.endswith("Start it on the hub's home page.")
    assert chosen(running) is None


async def test_a_server_that_does_not_stop_is_not_started(
    acting: Acting, running: FakeHub, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def accepts(user: str, name: str) -> None: ...

    monkeypatch.setattr(hub, "stop", accepts)
    acting.actions.patience = 0.0
    refusal = await refusal_of(restart.restart(acting.actions, acting.seen(), ANN, "half"))
    assert refusal.text == words.STOP_TAKES_LONG
    assert chosen(running) == OPTIONS


async def test_a_server_that_starts_is_left_alone(acting: Acting, running: FakeHub) -> None:
    running.add("ann", "", ready=False, pending="spawn", user_options=OPTIONS)
    refusal = await refusal_of(restart.restart(acting.actions, acting.seen(), ANN, "half"))
    assert (refusal.code, refusal.text) == (RefusalCode.BUSY, words.NOT_SETTLED)


async def test_the_same_restart_twice_at_a_time_is_one(acting: Acting, running: FakeHub) -> None:
    one = acting.seen()
    first, second, other = await asyncio.gather(
        restart.restart(acting.actions, one, ANN, "half"),
        restart.restart(acting.actions, one, ANN, "half"),
        restart.restart(acting.actions, one, ANN, "cpu"),
        return_exceptions=True,
    )
    assert (first, second) == (
        ActionOutcome(True, words.restarts("0.50 GPU")),
        ActionOutcome(False, words.restarts("0.50 GPU")),
    )
    assert str(other) == words.RESTARTS_ALREADY
    assert running.deleted == ["/users/ann/server"]


async def test_a_client_that_goes_away_leaves_no_server_stopped(acting: Acting, running: FakeHub) -> None:
    asked = asyncio.create_task(restart.restart(acting.actions, acting.seen(), ANN, "half"))
    while not running.deleted:
        await asyncio.sleep(0)
    asked.cancel()
    async with asyncio.timeout(5):
        while chosen(running) != {"profile": "half"}:
            await asyncio.sleep(0.01)
    assert not acting.actions.restarts


# -- a service that is killed ------------------------------------------------------------------------------------------


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[History]:
    """The history of the service; a second one on the same database is that of the next service."""
    history = journal_in(tmp_path)
    yield history
    history._thread.shutdown()


def journal_in(folder: Path) -> History:
    async def nothing() -> list[NodeSnapshot]:
        return []

    async def no_spawns() -> None:
        pass

    return History(HistoryStore(f"sqlite:///{folder}/h.sqlite"), HistorySources(nothing, list, no_spawns, dict))


async def restart_killed_after(requests: int, acting: Acting, running: FakeHub) -> bool:
    """Kill the service once the hub has answered so many requests; return whether it has got that far."""
    asked = asyncio.create_task(restart.restart(acting.actions, acting.seen(), ANN, "half"))
    before = len(running.asked)
    while len(running.asked) - before < requests and not asked.done():
        await asyncio.sleep(0)
    killed = not asked.done()
    for one in list(acting.actions.restarts.values()):
        one.task.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    # requests that are on their way still reach the hub
    await asyncio.sleep(0.05)
    return killed


@pytest.mark.parametrize("requests", range(6))
async def test_a_service_that_is_killed_during_a_restart_leaves_no_server_stopped(
    agent: FakeAgent,
    hub: Hub,
    templates: dict[str, Template],
    clock: Clock,
    running: FakeHub,
    journal: History,
    tmp_path: Path,
    requests: int,
) -> None:
    killed = await restart_killed_after(requests, Acting(agent, hub, templates, clock, journal), running)
    clock.forward(120)
    following = Acting(agent, hub, templates, clock, journal_in(tmp_path))
    await restart.finish_restarts(following.actions)
    assert chosen(running) in (OPTIONS, {"profile": "half"})
    assert await journal.begun_restarts() == []
    if running.deleted:
        assert chosen(running) == {"profile": "half"}
    if following.recorded:
        assert killed
        assert following.history == [("restart", "ann", "ann")]
        assert following.recorded[0].reason.endswith("and finished the restart when it started again.")
    # and it is finished once
    await restart.finish_restarts(following.actions)
    assert len([path for method, path, _ in running.asked if method == "POST"]) <= 1


def begun(clock: Clock, **changes: object) -> BegunRestart:
    one = BegunRestart(clock(), "ann", "", "fake", "", "quarter", "half", "ann", {"profile": "half"}, OPTIONS)
    return replace(one, **changes)  # type: ignore[arg-type]


@pytest.fixture
def next_service(agent: FakeAgent, hub: Hub, templates: dict[str, Template], clock: Clock, journal: History) -> Acting:
    return Acting(agent, hub, templates, clock, journal)


@pytest.mark.parametrize("seconds", [601, -601])
async def test_a_restart_of_long_ago_is_not_finished_and_the_history_says_so(
    next_service: Acting, hub_server: FakeHub, journal: History, clock: Clock, seconds: float
) -> None:
    hub_server.add("ann", None)
    await journal.begin_restart(begun(clock, at=clock() - seconds))
    await restart.finish_restarts(next_service.actions)
    assert chosen(hub_server) is None
    (action,) = next_service.recorded
    assert action.reason == f"ann restarted the server with the template 0.50 GPU. {words.RESTART_TOO_LATE}"
    assert await journal.begun_restarts() == []


async def test_a_server_that_runs_again_is_left_alone(
    next_service: Acting, running: FakeHub, journal: History, clock: Clock
) -> None:
    await journal.begin_restart(begun(clock))
    await restart.finish_restarts(next_service.actions)
    assert chosen(running) == OPTIONS
    assert not next_service.recorded
    assert await journal.begun_restarts() == []


async def test_a_restart_is_finished_when_the_hub_answers_and_the_server_has_stopped(
    next_service: Acting, running: FakeHub, journal: History, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "RETRY_PAUSE", 0.01)
    await journal.begin_restart(begun(clock))
    running.faults = [400, 400]
    running.add("ann", "", ready=False, pending="stop", user_options=OPTIONS)
    finishing = asyncio.create_task(restart.finish_restarts(next_service.actions))
    async with asyncio.timeout(5):
        while len(running.asked) < 4:
            await asyncio.sleep(0.01)
        refusal = await refusal_of(restart.restart(next_service.actions, next_service.seen(), ANN, "cpu"))
        assert refusal.text == words.RESTARTS_ALREADY
        del running.users["ann"]["servers"][""]
        await finishing
    assert chosen(running) == {"profile": "half"}


async def test_a_finished_restart_that_the_hub_refuses_brings_the_old_server_back(
    next_service: Acting, hub_server: FakeHub, journal: History, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    hub_server.add("ann", None)
    hub_server.faults = [None, 400]
    await journal.begin_restart(begun(clock))
    await restart.finish_restarts(next_service.actions)
    assert chosen(hub_server) == OPTIONS
    assert "no, 400" in next_service.recorded[0].reason
    assert "The server could not start with the template 0.50 GPU." in caplog.text
    assert await journal.begun_restarts() == []


async def test_a_database_that_fails_keeps_nobody_from_restarting(
    agent: FakeAgent, hub: Hub, templates: dict[str, Template], clock: Clock, running: FakeHub, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    acting = Acting(agent, hub, templates, clock, journal_in(tmp_path / "missing"))
    assert (await restart.restart(acting.actions, acting.seen(), ANN, "half")).changed
    assert "A restart would not survive a kill of the service now." in caplog.text
    await restart.finish_restarts(acting.actions)
