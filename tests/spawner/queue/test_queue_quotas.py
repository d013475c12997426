"""Quotas in the queue: who is served first, who is refused, and what is known after a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.clocks import WallClock
from gpushare_spawner.model.quota import BudgetState, BudgetStates, Quotas, ResourceAmounts
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.node import Allocation, NodeResources
from gpushare_spawner.quota.order import Asking
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.queue import quotas
from gpushare_spawner.spawner.queue.queue import SpawnQueue
from gpushare_spawner.spawner.queue.quotas import QueueQuotas
from gpushare_spawner.spawner.queue.snapshot import SpawnRequest
from gpushare_spawner.templates.folder import Policy
from tests.placement.reports import gpu as gpu_report
from tests.spawner.fake_agent import FakeAgent
from tests.spawner.queue.running_queue import RunningQueue
from tests.spawner.running_hub import until

QUOTAS = Quotas.model_validate(
    {
        "groups": {
            "a": {"guarantee": 1},
            "b": {},
            "few": {"guarantee": 2, "per_user": {"servers": 1}},
            "little": {"maximum": 0.5},
        }
    }
)
CAPACITY = 400


def request(user: str, group: str, fraction: float = 0.5, template: str = "t") -> SpawnRequest:
    made = Template.model_validate({"name": template, "display_name": "T", "gpu": {"fraction": fraction}})
    return SpawnRequest(Tenant(user, quota=f"group:{group}"), made)


def allocation(session: str, group: str, units: int = 100, at: float = 0.0) -> Allocation:
    return Allocation(session, (f"GPU-{session}",), units, 0, units, at, user=session, quota=f"group:{group}")


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """A ledger and its quotas, which a test can change."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.ledger = Ledger()
        self.in_force: Quotas | None = QUOTAS
        self.templates: tuple[Template, ...] = ()
        self.quotas = self.restarted()

    def restarted(self) -> QueueQuotas:
        log = logging.getLogger("hub")
        return QueueQuotas(self.ledger, log, lambda: self.in_force, self.clock, templates=lambda: self.templates)

    async def served(self, *spawns: SpawnRequest) -> list[str]:
        queue = SpawnQueue(50)
        for number, spawn in enumerate(spawns):
            queue.join(spawn, number)
        queue.arrange(self.quotas.order(queue))
        return [ticket.request.session for ticket in queue]


@pytest.fixture
def desk() -> Desk:
    return Desk()


async def test_spawns_in_quota_are_served_before_earlier_ones_over_quota(desk: Desk) -> None:
    desk.quotas.bring_up_to_date(CAPACITY)
    spawns = (request("x", "b"), request("y", "a"), request("z", "a", 0.75))
    assert await desk.served(*spawns) == ["y", "x", "z"]


async def test_the_order_is_that_in_which_they_came_without_quotas_and_again_when_they_end(desk: Desk) -> None:
    spawns = (request("x", "b"), request("y", "a"))
    assert await desk.served(*spawns) == ["x", "y"]
    queue = SpawnQueue(50)
    for number, spawn in enumerate(spawns):
        queue.join(spawn, number)
    for in_force, expected in ((QUOTAS, ["y", "x"]), (None, ["x", "y"])):
        desk.in_force = in_force
        desk.quotas.bring_up_to_date(CAPACITY)
        queue.arrange(desk.quotas.order(queue))
        assert [ticket.request.session for ticket in queue] == expected


async def test_a_ticket_that_joins_meanwhile_stays_in_the_queue() -> None:
    queue = SpawnQueue(50)
    first, second = (queue.join(request(name, "a"), 0.0) for name in "xy")
    gone = queue.join(request("z", "a"), 0.0)
    queue.leave(gone)
    queue.arrange([second, gone])
    assert list(queue) == [second, first]


async def test_what_the_ledger_has_counts_and_what_leaves_it_no_longer(desk: Desk) -> None:
    desk.quotas.bring_up_to_date(CAPACITY)
    desk.ledger.add(allocation("s", "a"))
    assert await desk.served(request("x", "b"), request("y", "a")) == ["x", "y"]
    desk.ledger.replace(allocation("s", "a", 50))
    assert await desk.served(request("x", "b"), request("y", "a")) == ["y", "x"]
    desk.ledger.remove("s")
    assert desk.quotas.usage is not None
    assert len(desk.quotas.usage) == 0


def test_accounts_are_entitled_to_units_in_use_on_a_cordoned_gpu_and_not_to_its_free_units(desk: Desk) -> None:
    desk.in_force = Quotas.model_validate({"groups": {"a": {}, "b": {}}})
    held = [Allocation(name, ("g0",), 30, effective_units=30, quota=f"group:{name}") for name in ("a", "b")]
    desk.ledger.change([*held, Allocation("big", ("g1",), 60, effective_units=60, quota="group:b")])
    for cordoned, entitled in ((False, 110), (True, 80), (False, 110), (True, 80)):
        desk.ledger.put_node("n", [gpu_report("g0", 0), gpu_report("g1", 1, cordoned=cordoned)])
        desk.quotas.bring_up_to_date(200)
        assert desk.quotas.usage is not None
        wants = Asking[Any](None, desk.quotas.usage.accounts.find("group:a", ""), ResourceAmounts(100))
        assert desk.quotas._excess([wants]) == {"group:a": 30 - entitled, "group:b": 90 - (90 if entitled > 80 else 80)}
    desk.ledger.make_anew({"n": [gpu_report("g0", 0)]}, held)
    desk.quotas.bring_up_to_date(100)
    assert not desk.quotas._closed, "the GPU is gone"


async def test_changed_quotas_count_what_runs_already(desk: Desk) -> None:
    desk.ledger.add(allocation("s", "a"))
    desk.quotas.bring_up_to_date(CAPACITY)
    desk.in_force = Quotas.model_validate({"groups": {"a": {"guarantee": 2}}})
    desk.quotas.bring_up_to_date(CAPACITY)
    assert await desk.served(request("x", "b"), request("y", "a")) == ["y", "x"]


async def test_use_over_quota_of_late_decides_between_those_over_quota(desk: Desk) -> None:
    desk.ledger.add(allocation("s", "b", at=desk.clock.now))
    desk.quotas.bring_up_to_date(CAPACITY)
    desk.clock.now += 3600
    desk.ledger.remove("s")
    desk.quotas.bring_up_to_date(CAPACITY)
    assert await desk.served(request("x", "b"), request("y", "little")) == ["y", "x"]


@pytest.mark.parametrize("step", [86400.0, -86400.0])
async def test_a_clock_that_is_set_is_no_use_over_quota_and_forgets_none(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    steady = Clock()
    monkeypatch.setattr(quotas, "WallClock", lambda: WallClock(desk.clock, steady))
    desk.quotas = QueueQuotas(desk.ledger, logging.getLogger("hub"), lambda: desk.in_force)

    def passes(seconds: float) -> float:
        desk.clock.now += seconds
        steady.now += seconds
        desk.quotas.bring_up_to_date(CAPACITY)
        assert desk.quotas._fair is not None
        return desk.quotas._fair.used("group:b")

    desk.ledger.add(allocation("s", "b", at=desk.clock.now))
    passes(1.0)
    before = passes(3600)
    desk.clock.now += step
    assert passes(1.0) == pytest.approx(before, rel=0.01)
    hour_later = passes(3600)
    assert before < hour_later < 2.1 * before, "it counts on as before"


async def test_a_restarted_hub_counts_what_sessions_that_run_have_used_over_quota(desk: Desk) -> None:
    desk.ledger.add(allocation("s", "b", at=desk.clock.now))
    desk.quotas.bring_up_to_date(CAPACITY)
    desk.clock.now += 3600
    desk.quotas.bring_up_to_date(CAPACITY)
    before = desk.quotas._fair
    again = desk.restarted()
    again.bring_up_to_date(CAPACITY)
    assert before is not None
    assert again._fair is not None
    assert before.used("group:b") > 0
    assert again._fair.used("group:b") == pytest.approx(before.used("group:b"))


async def test_a_spawn_that_was_placed_over_quota_pays_at_once(desk: Desk) -> None:
    desk.quotas.bring_up_to_date(CAPACITY)
    admission = desk.quotas.admission(Tenant("x", quota="group:b"), request("x", "b").template)
    assert admission is not None
    desk.quotas.admitted(admission)
    assert await desk.served(request("x", "b"), request("y", "little")) == ["y", "x"]


async def test_without_quotas_nothing_is_admitted_or_refused(desk: Desk) -> None:
    desk.in_force = None
    desk.quotas.bring_up_to_date(CAPACITY)
    assert desk.quotas.admission(Tenant("x"), request("x", "b").template) is None
    assert not desk.quotas.anything_over_quota


async def test_guarantees_beyond_the_gpus_are_logged_once(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    for capacity in (0, CAPACITY, 200, 200, CAPACITY):
        desk.quotas.bring_up_to_date(capacity)
    assert [record.getMessage() for record in caplog.records] == [
        "Quotas: the guarantees add up to 3 GPUs, and there are 2 GPUs: lower some guarantees"
    ]


# -- through the real queue --


@pytest.fixture
async def hub(agent: FakeAgent) -> AsyncIterator[RunningQueue]:
    async with RunningQueue(agent, policy=lambda: Policy(quotas=QUOTAS)) as made:
        yield made


async def test_a_spawn_in_quota_gets_the_units_that_come_free_before_earlier_ones(
    hub: RunningQueue, agent: FakeAgent
) -> None:
    for gpu in (0, 1):
        agent.occupy(f"there-{gpu}", 100, gpu)
    over = hub.start(request("x", "b"))
    await until(lambda: "x" in hub.tickets and hub.tickets["x"].status is not None)
    assert hub.tickets["x"].hint.endswith("Your spawn is over quota: spawns in quota come first.")
    assert "priority" not in hub.tickets["x"].hint
    inside = hub.start(request("y", "a"))
    await until(lambda: hub.tickets["x"].ahead == 1)
    assert "over quota" not in hub.tickets["y"].hint
    low = request("z", "b")
    later = hub.start(replace(low, template=low.template.model_copy(update={"priority": "low"})))
    await until(lambda: "z" in hub.tickets and hub.tickets["z"].status is not None)
    assert "This template has a low priority in the queue." in hub.tickets["z"].hint
    later.cancel()
    agent.occupy("there-1", 50, 1)
    assert (await inside).gpus[0].uuid == "GPU-1"
    assert not over.done()
    assert agent.sessions["y"].quota == "group:a"
    del agent.sessions["there-1"]
    await over


async def test_a_spawn_beyond_the_maximum_is_refused_with_the_quota_named(hub: RunningQueue) -> None:
    await hub.start(request("x", "little", 0.25))
    with pytest.raises(SpawnRefused) as refused:
        await hub.start(request("y", "little", 0.5))
    assert refused.value.status_code == 409
    assert refused.value.jupyterhub_message == (
        "This needs 0.50 GPU, and the quota of group little is limited to 0.50 GPU, of which 0.25 GPU is in use. "
        "Choose a smaller share, or try again when a server of this quota has stopped."
    )


async def test_servers_of_a_user_count_over_all_templates(hub: RunningQueue) -> None:
    await hub.start(request("x", "few", 0.25, "one"))
    spawn = request("x", "few", 0.1, "two")
    with pytest.raises(SpawnRefused, match="allows 1 for each user") as refused:
        await hub.start(SpawnRequest(Tenant("x", "second", quota="group:few"), spawn.template))
    assert refused.value.status_code == 409
    await hub.start(request("z", "few", 0.25, "one"))


async def test_of_two_spawns_at_once_only_one_gets_what_a_maximum_leaves(hub: RunningQueue) -> None:
    results = await asyncio.gather(*(hub.start(request(name, "little", 0.5)) for name in "xy"), return_exceptions=True)
    assert sorted(isinstance(result, SpawnRefused) for result in results) == [False, True]


async def test_a_hub_that_is_restarted_knows_the_quota_of_what_runs(hub: RunningQueue, agent: FakeAgent) -> None:
    await hub.start(request("x", "little", 0.5))
    with pytest.raises(SpawnRefused):
        await RunningQueue(agent, policy=lambda: Policy(quotas=QUOTAS)).start(request("y", "little", 0.5))


async def test_a_waiting_spawn_says_which_guarantee_lacks_and_what_it_leaves(agent: FakeAgent) -> None:
    rules = Quotas.model_validate({"groups": {"a": {"guarantee": 1, "cpu": {"guarantee": 3}}}})
    made = Template.model_validate(
        {"name": "t", "display_name": "T", "gpu": {"fraction": 0.5}, "resources": {"cpu": {"guarantee": 2}}}
    )
    hub = RunningQueue(agent, policy=lambda: Policy((made,), quotas=rules))
    await hub.start(SpawnRequest(Tenant("x", quota="group:a"), made))
    for gpu in (0, 1):
        agent.occupy(f"there-{gpu}", 50 if agent.sessions["x"].gpus == (f"GPU-{gpu}",) else 100, gpu)
    waiting = hub.start(SpawnRequest(Tenant("y", quota="group:a"), made))
    await until(lambda: "y" in hub.tickets and hub.tickets["y"].status is not None)
    assert hub.tickets["y"].hint.endswith(
        "Your spawn is over quota: spawns in quota come first (in quota: at most 1 CPU core)."
    )
    waiting.cancel()


async def test_cpu_makes_a_dominant_share_where_quotas_count_it(desk: Desk) -> None:
    desk.in_force = Quotas.model_validate({"groups": {"a": {}, "b": {}}, "default": {"cpu": {"maximum": 100}}})
    desk.ledger.put_node("n", [gpu_report(f"GPU-{index}", index) for index in range(4)])
    desk.ledger.put_resources("n", NodeResources.of_empty_node(64_000, 2**38))
    cores = Template.model_validate(
        {"name": "cores", "display_name": "C", "gpu": {"fraction": 0.1}, "resources": {"cpu": {"guarantee": 32}}}
    )
    desk.templates = (cores, request("x", "b").template)
    desk.quotas.bring_up_to_date(CAPACITY)
    for group, template in (("a", cores), ("b", request("x", "b").template)):
        admission = desk.quotas.admission(Tenant("x", quota=f"group:{group}"), template)
        assert admission is not None
        desk.quotas.admitted(admission)
    # half of the cluster's CPU is more than an eighth of its GPUs
    assert await desk.served(request("x", "a"), request("y", "b")) == ["y", "x"]


async def test_spawns_of_a_higher_priority_come_first_with_and_without_quotas() -> None:
    queue = SpawnQueue(10)
    half = {"display_name": "T", "gpu": {"fraction": 0.5}}
    for number, (user, priority) in enumerate((("bob", "low"), ("eve", "normal"), ("zoe", "high"), ("ann", "normal"))):
        template = Template.model_validate({"name": priority, "priority": priority, **half})
        queue.join(SpawnRequest(Tenant(user, quota="group:a"), template), float(number))
    for rules in (None, QUOTAS):
        desk = QueueQuotas(Ledger(), logging.getLogger("t"), partial(dict.get, {0: rules}, 0), lambda: 0.0)
        desk.bring_up_to_date(CAPACITY)
        assert [one.request.tenant.user for one in desk.order(queue)] == ["zoe", "eve", "ann", "bob"]


async def test_a_running_server_that_is_not_reclaimable_is_in_quota_before_older_ones() -> None:
    templates = [
        Template.model_validate({"name": "kept", "display_name": "K", "gpu": {"count": 1}, "reclaimable": False})
    ]
    ledger = Ledger()
    desk = QueueQuotas(ledger, logging.getLogger("t"), lambda: QUOTAS, lambda: 0.0, templates=lambda: templates)
    ledger.add(allocation("old", "a"))
    ledger.add(replace(allocation("new", "a", at=1.0), template="kept"))
    desk.bring_up_to_date(CAPACITY)
    assert desk.usage is not None
    assert (desk.usage.in_quota("new"), desk.usage.in_quota("old")) == (True, False)
    templates.clear()
    desk.bring_up_to_date(CAPACITY)
    assert (desk.usage.in_quota("new"), desk.usage.in_quota("old")) == (False, True)


async def test_spawns_with_a_used_up_budget_come_last_in_quota_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk()
    desk.in_force = Quotas.model_validate(
        {"groups": {"a": {"guarantee": 2, "budget": {"hours": 1, "window": "day"}}, "b": {}}}
    )
    written = quotas.WrittenBudgets(tmp_path / "budgets.json", desk.clock)
    monkeypatch.setattr(quotas, "WRITTEN_BUDGETS", written)
    spawns = request("ann", "a"), request("bob", "b"), request("cat", "a")
    desk.quotas.bring_up_to_date(CAPACITY)
    assert await desk.served(*spawns) == ["ann", "cat", "bob"]
    used_up = BudgetState(account="group:a", hours=1, used=1, window=86400.0)
    states = BudgetStates(written_at=desk.clock(), budgets=(used_up,))
    (tmp_path / "budgets.json").write_text(states.model_dump_json())
    assert await desk.served(*spawns) == ["bob", "ann", "cat"]
