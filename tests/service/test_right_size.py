"""Advice on the size of shares: from reports over the history to the one who may read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, event

from gpushare_spawner.arbiter.right_size import FEWEST_BURSTS
from gpushare_spawner.model.report import Burst
from gpushare_spawner.model.share import ADVICE_PERIOD
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext, ActionRefused
from gpushare_spawner.service.history.recorder import History, HistorySources
from gpushare_spawner.service.history.store import (
    DAY,
    HOUR,
    AdviceRecord,
    BurstRecord,
    GpuTimeAmounts,
    HistoryStore,
    Subject,
)
from gpushare_spawner.service.hub.client import Hub, HubServer
from gpushare_spawner.service.reports import MachineAgent, RecentReports
from gpushare_spawner.service.right_size import (
    AGAIN_AFTER,
    SOON_AFTER,
    ShareAdvisor,
    advice_for,
    advice_of,
    evidence,
    sums_of,
)
from gpushare_spawner.wording.service import advice as sentence
from tests.service.conftest import Clock
from tests.service.fake_agent import FakeAgent
from tests.service.fake_hub import FakeHub
from tests.service.history.test_metering import BEGIN
from tests.service.history.test_metering import session as session_of_history
from tests.service.history.test_recorder import World

GIB = 2**30
NOW = 20_000 * DAY
ANN = Subject("ann", "", "half", "ml", "n1", "GPU-0", "A100")
BOB = replace(ANN, user="bob", template="quarter")
SIZES = {("n1", "GPU-0"): 40 * GIB}


def record(ended_at: float, units: int = 50, **changes: Any) -> BurstRecord:
    return replace(BurstRecord(ended_at, 5.0, 4.0, 0.5, 1.0, 2 * GIB, units), **changes)


def advised(user: str = "ann", **changes: Any) -> AdviceRecord:
    values: dict[str, Any] = {
        "units": 50, "advised_units": 25, "since": NOW - 6.5 * DAY, "until": float(NOW), "bursts": 412,
        "gpu_seconds": 9000.0, "waited_seconds": 300.0, "later": 3, "later_seconds": 1.2, "freed_gpu_seconds": 7200.0,
        "user": user, "template": "half", "group": "ml", "computed_at": float(NOW),
    }  # fmt: skip
    return AdviceRecord(**values | changes)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    store = HistoryStore(f"sqlite:///{tmp_path}/history.sqlite")
    store.upgrade()
    yield store
    store.close()


# -- words -------------------------------------------------------------------------------------------------------------


def test_advice_says_which_share_would_have_been_enough_and_at_what_price() -> None:
    assert sentence(advised()) == (
        "0.25 GPU would have been enough: 3 of 412 bursts of GPU work would have ended later, by 400 ms on average."
    )
    assert sentence(advised(later=0, later_seconds=0.0)) == (
        "0.25 GPU would have been enough: none of 412 bursts of GPU work would have ended later."
    )


def test_advice_says_how_much_waiting_a_larger_share_would_have_saved() -> None:
    larger = advised(units=25, advised_units=50, saved_seconds=2400.0)
    assert sentence(larger) == "0.50 GPU would have saved 40 min of waiting within 7 days."
    assert sentence(replace(larger, since=NOW - 600.0)).endswith("within a day.")


def test_share_that_is_right_has_no_sentence() -> None:
    assert sentence(advised(advised_units=50)) == ""


# -- the database ------------------------------------------------------------------------------------------------------


def test_evidence_has_the_users_bursts_with_the_share_and_the_neighbours_on_the_gpu(store: HistoryStore) -> None:
    own = [record(NOW - 100.0 * number) for number in range(3)]
    elsewhere, smaller, old = record(NOW - 50.0), record(NOW - 5000.0, units=25), record(NOW - ADVICE_PERIOD - 10.0)
    near, far = record(NOW - 30.0, units=25), record(NOW - 9000.0, units=25)
    bursts = [(ANN, burst) for burst in (*own, smaller, old)] + [(BOB, near), (BOB, far)]
    bursts.append((replace(ANN, node="n2"), elsewhere))
    bursts.append((replace(BOB, gpu="GPU-1"), near))
    # half a GPU for two hours
    used = {(NOW - HOUR, ANN): GpuTimeAmounts(reserved=3600.0), (NOW - 9 * DAY, ANN): GpuTimeAmounts(reserved=1e6)}
    store.add(used, [], [], bursts=bursts)
    found = store.read(lambda connection: evidence(connection, "ann", "half", 50, SIZES, NOW))
    (recording,) = found.recordings
    assert recording.own.bursts == tuple(burst.burst for burst in reversed(own))
    assert [(one.units, one.bursts) for one in recording.neighbours] == [(25, (near.burst,))]
    assert recording.gpu_bytes == 40 * GIB
    assert found.held_seconds == 7200.0


def test_two_servers_of_a_user_are_each_others_neighbours(store: HistoryStore) -> None:
    second = replace(ANN, server="two")
    store.add({}, [], [], bursts=[(ANN, record(NOW)), (second, record(NOW - 1.0))])
    found = store.read(lambda connection: evidence(connection, "ann", "half", 50, SIZES, NOW))
    assert [len(recording.own.bursts) for recording in found.recordings] == [1, 1]
    assert [len(recording.neighbours) for recording in found.recordings] == [1, 1]


def test_evidence_reads_no_bursts_of_other_gpus(store: HistoryStore) -> None:
    others = [(replace(BOB, user=f"user{number}", gpu=f"GPU-{number}"), record(NOW - 5.0)) for number in range(1, 50)]
    store.add({}, [], [], bursts=[(ANN, record(NOW)), (BOB, record(NOW - 1.0)), *others])

    def plans(connection: Connection) -> list[str]:
        statements: list[tuple[str, Any]] = []
        event.listen(connection, "before_cursor_execute", lambda *seen: statements.append((seen[2], seen[3])))
        evidence(connection, "ann", "half", 50, SIZES, NOW)
        return [
            step[3]
            for statement, values in statements[:]
            for step in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values)
            if "burst" in step[3]
        ]

    steps = store.read(plans)
    assert len(steps) == 2
    assert all(step.startswith("SEARCH") and "subject=? AND ended_at>?" in step for step in steps), steps


def test_old_bursts_and_advice_are_deleted_and_so_are_their_names(store: HistoryStore) -> None:
    store.add({}, [], [], bursts=[(ANN, record(NOW - 9 * DAY)), (BOB, record(NOW - 1.0))])
    store.set_advice(advised(computed_at=NOW - 31.0 * DAY))
    store.set_advice(advised("bob"))
    store.set_advice(advised("bob", bursts=7))
    store.thin(NOW, 0, 0, 0)
    assert [(row.user, row.bursts) for row in store.read(lambda connection: advice_of(connection, None))] == [
        ("bob", 7)
    ]
    read = store.read(lambda connection: evidence(connection, "bob", "quarter", 50, SIZES, NOW))
    assert len(read.recordings) == 1
    gone = store.read(lambda connection: evidence(connection, "ann", "half", 50, SIZES, NOW))
    assert gone.recordings == ()
    store.thin(NOW + 10, 0, 5, 0)
    assert store.read(lambda connection: advice_of(connection, "bob")) == []


def test_sums_count_users_with_advice_by_template_and_group() -> None:
    records = [advised(), advised("bob", freed_gpu_seconds=1.0), advised("eve", advised_units=50)]
    records.append(advised("zoe", until=NOW - ADVICE_PERIOD - 1.0))
    records.append(advised("dan", group="", freed_gpu_seconds=0.0, saved_seconds=600.0))
    sums = [
        (one.template, one.group, one.users, one.freed_gpu_seconds, one.saved_seconds) for one in sums_of(records, NOW)
    ]
    assert sums == [("half", "ml", 2, 7201.0, 0.0), ("half", "", 1, 0.0, 600.0)]


# -- recording ---------------------------------------------------------------------------------------------------------


async def test_reported_bursts_are_stored_once_also_over_a_restart_of_the_service(tmp_path: Path) -> None:
    world, url = World(), f"sqlite:///{tmp_path}/history.sqlite"
    first, second, third = (Burst(BEGIN + 10.0 * number, 4.0, 3.0, 0.5, 1.0, GIB) for number in (1, 2, 3))
    history = History(HistoryStore(url), world.sources())
    await history.store()
    await world.see(history, BEGIN + 25, session_of_history(bursts=(first, second)))
    await history.store()
    history = History(HistoryStore(url), world.sources())
    await history.store()
    await world.see(history, BEGIN + 35, session_of_history(bursts=(first, second, third)))
    found = await history.ask(
        lambda connection: evidence(connection, "ann", "quarter", 25, {("n", "GPU-0"): GIB}, BEGIN + 40)
    )
    assert found.recordings[0].own.bursts == (first, second, third)


async def test_burst_is_within_its_session_whatever_its_node_reports(tmp_path: Path) -> None:
    world = World()
    history = History(HistoryStore(f"sqlite:///{tmp_path}/history.sqlite"), world.sources())
    await history.store()
    forged = Burst(BEGIN + 10.0, 1e6, 1e6, 1e6, 1e6, GIB)
    coming = Burst(BEGIN + 1e6, 1.0, 1.0, 0.0, 0.0, GIB)
    await world.see(history, BEGIN + 20, session_of_history(bursts=(forged, coming)))
    found = await history.ask(
        lambda connection: evidence(connection, "ann", "quarter", 25, {("n", "GPU-0"): GIB}, BEGIN + 20)
    )
    assert found.recordings[0].own.bursts == (Burst(BEGIN + 10.0, 10.0, 10.0, 0.0, 10.0, GIB),)
    later = Burst(BEGIN + 30.0, 1.0, 1.0, 0.0, 0.0, GIB)
    await world.see(history, BEGIN + 40, session_of_history(bursts=(later,)))
    found = await history.ask(
        lambda connection: evidence(connection, "ann", "quarter", 25, {("n", "GPU-0"): GIB}, BEGIN + 40)
    )
    assert found.recordings[0].own.bursts[-1] == later, "a burst of the future does not hide later ones"


# -- computing ---------------------------------------------------------------------------------------------------------

SHARES = {
    name: Template(name=name, display_name=name, gpu={"fraction": fraction}, access=access)
    for name, fraction, access in (
        ("tenth", 0.1, {}), ("quarter", 0.25, {}), ("half", 0.5, {}), ("twentieth", 0.05, {"users": ["bob"]}),
    )
}  # fmt: skip


class Service:
    """A history and an advisor beside an agent with one session of half a GPU."""

    def __init__(self, folder: Path, agent: FakeAgent, hub: Hub, clock: Clock) -> None:
        self.agent, self.clock = agent, clock
        agent.add("ann", template="half", share_units=50, effective_units=50, opened_at=clock() - 3600)
        self.context = ActionContext([MachineAgent(agent.path)], hub, lambda: SHARES, clock=clock)
        sources = HistorySources(
            RecentReports(self.context.agents, 0.0).snapshots, tuple, self._pending, lambda: SHARES, clock, clock
        )
        self.store = HistoryStore(f"sqlite:///{folder}/history.sqlite")
        self.history = self.context.journal = History(self.store, sources)
        self.advisor = ShareAdvisor(self.history, self.context)

    @staticmethod
    async def _pending() -> tuple[HubServer, ...]:
        return ()

    async def work(self, bursts: int) -> None:
        """Work for 2 s every 100 s, all of it before now."""
        self.store.upgrade()
        subject = Subject("ann", "", "half", "", self.agent.node, "GPU-0", "simulated")
        now = self.clock()
        recorded = [BurstRecord(now - 100.0 * number, 2.0, 2.0, 0.0, 0.0, GIB, 50) for number in range(bursts)]
        used = {(int(now // HOUR) * HOUR - HOUR, subject): GpuTimeAmounts(reserved=20 * HOUR)}
        self.store.add(used, [], [], bursts=[(subject, burst) for burst in recorded])

    async def advice(self) -> list[AdviceRecord]:
        return await self.history.ask(lambda connection: advice_of(connection, "ann"))


@pytest.fixture
def service(tmp_path: Path, agent: FakeAgent, hub: Hub, hub_server: FakeHub, clock: Clock) -> Service:
    hub_server.add("ann")
    return Service(tmp_path, agent, hub, clock)


async def test_advisor_advises_the_smallest_of_the_users_templates_that_is_enough(service: Service) -> None:
    await service.work(FEWEST_BURSTS)
    await service.advisor.step()
    (record,) = await service.advice()
    assert (record.units, record.advised_units, record.bursts, record.later) == (50, 10, FEWEST_BURSTS, 0)
    assert record.freed_gpu_seconds == pytest.approx(0.4 * 40 * HOUR)


async def test_advice_is_computed_again_after_hours_and_remembered_over_a_restart(service: Service) -> None:
    await service.work(FEWEST_BURSTS)
    await service.advisor.step()
    computed_at = (await service.advice())[0].computed_at
    for advisor in (service.advisor, ShareAdvisor(service.history, service.context)):
        service.clock.forward(10.0)
        await advisor.step()
        assert (await service.advice())[0].computed_at == computed_at
    service.clock.forward(AGAIN_AFTER)
    await service.advisor.step()
    assert (await service.advice())[0].computed_at == service.clock()


async def test_session_that_has_just_begun_is_tried_again_within_the_hour(service: Service) -> None:
    service.store.upgrade()
    await service.advisor.step()
    await service.work(FEWEST_BURSTS)
    await service.advisor.step()
    assert await service.advice() == []
    service.clock.forward(SOON_AFTER)
    await service.advisor.step()
    assert len(await service.advice()) == 1


async def test_session_whose_templates_cannot_be_read_does_not_delay_the_others(
    service: Service, hub_server: FakeHub
) -> None:
    await service.work(FEWEST_BURSTS)
    subject = Subject("bob", "", "half", "", service.agent.node, "GPU-0", "simulated")
    recorded = [
        BurstRecord(service.clock() - 100.0 * number, 2.0, 2.0, 0.0, 0.0, GIB, 50) for number in range(FEWEST_BURSTS)
    ]
    service.store.add({}, [], [], bursts=[(subject, burst) for burst in recorded])
    service.agent.add("bob", template="half", share_units=50, effective_units=50, opened_at=service.clock() - 3600)
    hub_server.add("bob")
    hub_server.faults = [403]
    with pytest.raises(ActionRefused):
        await service.advisor.step()
    await service.advisor.step()
    assert {record.user for record in await service.history.ask(lambda read: advice_of(read, None))} == {"bob"}


async def test_session_without_bursts_or_with_several_gpus_gets_no_advice(service: Service) -> None:
    service.store.upgrade()
    service.agent.change("ann", gpus=("GPU-0", "GPU-1"))
    await service.advisor.step()
    service.agent.change("ann", gpus=("GPU-0",))
    await service.advisor.step()
    assert await service.advice() == []


async def test_notebook_server_is_told_advice_that_its_user_can_follow_now(service: Service) -> None:
    await service.work(FEWEST_BURSTS)
    await service.advisor.step()
    asking = SimpleNamespace(agent=MachineAgent(service.agent.path), node="fake", session=service.agent.sessions["ann"])
    told: Any = await advice_for(service.context, asking)
    assert told == {"units": 10, "text": sentence((await service.advice())[0])}
    service.agent.change("ann", share_units=25, effective_units=25)
    assert await advice_for(service.context, asking) is None, "it has changed its share"
    service.agent.change("ann", share_units=50, effective_units=50)
    service.context.templates = lambda: {name: SHARES[name] for name in ("half", "quarter")}
    assert await advice_for(service.context, asking) is None, "the template is gone"
    service.context.journal = None
    assert await advice_for(service.context, asking) is None
