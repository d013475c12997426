"""The history of a running service: what is recorded when agents, the hub, the database or the service fail."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.history.queries import By, Period, actions, gpu_time, waits
from gpushare_spawner.service.history.recorder import History, HistorySources
from gpushare_spawner.service.history.store import Action, HistoryFailed, HistoryStore, Wait, WaitOutcome
from gpushare_spawner.service.hub.client import HubServer, HubUser
from gpushare_spawner.service.reports import KnownReport, NodeSnapshot
from tests.service.history.test_metering import BEGIN, report, session

ALWAYS = Period(0, BEGIN + 10**7)


def in_groups(user: str, *groups: str) -> HubUser:
    return HubUser(user, servers=(HubServer(user, "", groups=groups),))


class World:
    """What agents and hub say."""

    def __init__(self) -> None:
        self.reports: list[KnownReport | None] = []
        self.users: Sequence[HubUser] = ()
        self.pending: Sequence[HubServer] | None = ()
        self.now = float(BEGIN)
        self.waited: list[Wait] = []

    async def snapshots(self) -> list[NodeSnapshot]:
        return [NodeSnapshot(None, one, "" if one else "silent") for one in self.reports]  # type: ignore[arg-type]

    async def pending_now(self) -> Sequence[HubServer] | None:
        return self.pending

    def sources(self) -> HistorySources:
        templates = {
            "quarter": Template(name="quarter", display_name="0.25 GPU", gpu={"fraction": 0.25}),
            "cpu": Template(name="cpu", display_name="CPU"),
        }
        return HistorySources(
            self.snapshots,
            lambda: self.users,
            self.pending_now,
            lambda: templates,
            lambda: self.now,
            lambda: self.now,
            waited=self.waited.append,
        )

    async def see(self, history: History, at: float, *sessions: SessionReport) -> None:
        self.now = at
        self.reports = [KnownReport.of(report(at), sessions)]
        await history.observe()


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/history.sqlite"


async def opened(world: World, url: str) -> History:
    history = History(HistoryStore(url), world.sources())
    await history.store()
    return history


async def reserved(history: History, *by: By) -> dict[tuple[str | int, ...], float]:
    return {one.key: one.amounts.reserved for one in await history.ask(lambda c: gpu_time(c, ALWAYS, by))}


async def test_a_question_counts_everything_until_now(world: World, url: str) -> None:
    history = await opened(world, url)
    await world.see(history, BEGIN + 100, session())
    assert await reserved(history, By.USER) == {("ann",): pytest.approx(25)}
    await world.see(history, BEGIN + 200, session())
    assert await reserved(history) == {(): pytest.approx(50)}


async def test_groups_come_from_the_quota_or_else_from_the_hub(world: World, url: str) -> None:
    history = await opened(world, url)
    world.users = [in_groups("ann", "z", "bio"), in_groups("bob", "bio")]
    other = {"id": "bob", "user": "bob"}
    await world.see(history, BEGIN + 100, session(), session(quota="group:optics", **other))
    assert set(await reserved(history, By.USER, By.GROUP)) == {("ann", "bio"), ("bob", "optics")}


async def test_groups_are_remembered_while_the_hub_does_not_answer(world: World, url: str) -> None:
    history = await opened(world, url)
    world.users = [in_groups("ann", "bio")]
    await world.see(history, BEGIN + 100, session())
    world.users = []
    await world.see(history, BEGIN + 200, session())
    assert await reserved(history, By.GROUP) == {("bio",): pytest.approx(50)}


async def test_a_service_that_was_killed_counts_what_it_missed(world: World, url: str) -> None:
    first = await opened(world, url)
    await world.see(first, BEGIN + 100, session())
    await first.store()
    await world.see(first, BEGIN + 150, session())  # and then it is killed
    second = await opened(world, url)
    await world.see(second, BEGIN + 400, session())
    assert await reserved(second) == {(): pytest.approx(100)}


async def test_time_survives_the_end_of_its_session(world: World, url: str) -> None:
    history = await opened(world, url)
    await world.see(history, BEGIN + 100, session())
    await world.see(history, BEGIN + 110)
    await history.store()
    assert HistoryStore(url).counters() == []
    assert await reserved(await opened(world, url)) == {(): pytest.approx(25)}


async def test_a_database_that_fails_loses_nothing_and_is_logged_once(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "later"
    history = History(HistoryStore(f"sqlite:///{folder}/h.sqlite"), world.sources())
    with caplog.at_level(logging.INFO):
        for at in (100, 200, 300):
            await world.see(history, BEGIN + at, session())
            history.record(Action(BEGIN + at, "keep", "ann", "ann"))
            await history.store()
        assert "unable to open database file" in history.problem
        with pytest.raises(HistoryFailed):
            await reserved(history)
        folder.mkdir()
        await history.store()
        await world.see(history, BEGIN + 400, session())
    assert history.problem == ""
    assert await reserved(history) == {(): pytest.approx(100)}
    assert len(await history.ask(lambda c: actions(c, ALWAYS, 10))) == 3
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "answers again" in caplog.text


async def test_amounts_that_could_not_be_written_come_later(world: World, url: str) -> None:
    history = await opened(world, url)
    store = history._store
    await world.see(history, BEGIN + 100, session())

    def fails(*_: object) -> None:
        raise HistoryFailed("The disk is full.")

    whole, store.add = store.add, fails  # type: ignore[method-assign,assignment]
    await history.store()
    store.add = whole  # type: ignore[method-assign]
    await world.see(history, BEGIN + 200, session())
    assert await reserved(history) == {(): pytest.approx(50)}


async def test_a_share_that_the_agent_restored_is_an_action(world: World, url: str) -> None:
    history = await opened(world, url)
    await world.see(history, BEGIN + 100, session(tier=Tier.RELEASED, effective_units=0, tier_since=BEGIN + 50))
    await world.see(history, BEGIN + 200, session(tier_since=BEGIN + 190))
    await world.see(history, BEGIN + 300, session(tier_since=BEGIN + 190))
    ((_, action),) = await history.ask(lambda c: actions(c, ALWAYS, 10))
    assert (action.action, action.actor, action.user, action.at, action.units) == (
        "restored", "agent", "ann", BEGIN + 190, 25,
    )  # fmt: skip
    assert action.reason == "The session was released, and works on the GPU again."


async def test_waits_of_spawns_with_a_gpu(world: World, url: str) -> None:
    history = await opened(world, url)
    await world.see(history, BEGIN)
    world.pending = [
        HubServer("ann", "", False, "spawn", BEGIN - 5, profile="quarter"),
        HubServer("bob", "", False, "spawn", BEGIN - 5, profile="quarter"),
        HubServer("zoe", "", False, "spawn", BEGIN - 5, profile="cpu"),
    ]
    await history.observe_queue()
    await world.see(history, BEGIN + 60, session(opened_at=BEGIN + 55))
    world.pending = []
    await history.observe_queue()
    answer = await history.ask(lambda c: waits(c, ALWAYS))
    assert (answer.started, answer.gave_up, answer.mean_seconds) == (1, 1, 60.0)
    # the metrics count the same
    assert [(wait.user, wait.outcome, wait.seconds) for wait in world.waited] == [
        ("ann", WaitOutcome.STARTED, 60.0),
        ("bob", WaitOutcome.GAVE_UP, 65.0),
    ]


async def test_a_silent_agent_makes_no_spawn_give_up(world: World, url: str) -> None:
    history = await opened(world, url)
    await world.see(history, BEGIN)
    world.pending = [HubServer("ann", "", False, "spawn", BEGIN, profile="quarter")]
    await history.observe_queue()
    world.pending, world.reports = [], [None]
    await history.observe_queue()
    assert (await history.ask(lambda c: waits(c, ALWAYS))).gave_up == 0


async def test_run_stores_a_last_time_when_it_is_cancelled(world: World, url: str) -> None:
    history = await opened(world, url)
    task = asyncio.create_task(history.run())
    await asyncio.sleep(0)
    await world.see(history, BEGIN + 100, session())
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert await reserved(await opened(world, url)) == {(): pytest.approx(25)}


async def test_a_bad_report_ends_no_recording(world: World, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare_spawner.service.history.recorder.OBSERVE_EVERY", 0.01)
    asked = 0

    async def snapshots() -> list[NodeSnapshot]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise RuntimeError("broken")
        return []

    sources = HistorySources(snapshots, lambda: (), world.pending_now, dict)
    task = asyncio.create_task(History(HistoryStore(url), sources).run())
    for _ in range(100):
        await asyncio.sleep(0.02)
        if asked > 2:
            break
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert asked > 2


async def test_a_question_while_the_database_is_opened_counts_nothing_twice(world: World, url: str) -> None:
    history = History(HistoryStore(url), world.sources())
    opened_twice = asyncio.gather(history.store(), history.store())
    while history._meter is None:
        await asyncio.sleep(0)
    first = history._meter
    await opened_twice
    assert history._meter is first


async def test_what_waits_for_the_database_when_the_service_ends_is_stored(world: World, url: str) -> None:
    history = await opened(world, url)
    slow = threading.Event()
    reading = asyncio.create_task(history.ask(lambda _: slow.wait(10)))
    await asyncio.sleep(0.01)
    history.record(Action(BEGIN, "keep", "ann", "ann"))
    storing = asyncio.create_task(history.store())
    await asyncio.sleep(0.01)
    storing.cancel()
    slow.set()
    await reading
    assert len(await history.ask(lambda c: actions(c, ALWAYS, 10))) == 1


async def test_a_database_that_hangs_delays_neither_a_page_nor_the_end_for_long(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpushare_spawner.service.history.recorder.PATIENCE", 0.05)
    monkeypatch.setattr("gpushare_spawner.service.history.recorder.LAST_PATIENCE", 0.05)
    history = await opened(world, url)
    hangs = threading.Event()
    with pytest.raises(HistoryFailed, match="did not answer"):
        await history.ask(lambda _: hangs.wait(10))
    task = asyncio.create_task(history.run())
    await asyncio.sleep(0.01)
    history.record(Action(BEGIN, "keep", "ann", "ann"))
    task.cancel()
    try:
        ended, _ = await asyncio.wait([task], timeout=2)
        assert ended
    finally:
        hangs.set()


async def test_a_new_session_of_a_released_server_is_not_restored(world: World, url: str) -> None:
    history = await opened(world, url)
    await world.see(history, BEGIN + 100, session(tier=Tier.RELEASED, effective_units=0, tier_since=BEGIN + 50))
    await world.see(history, BEGIN + 200, session(opened_at=BEGIN + 195, tier_since=BEGIN + 195))
    assert not await history.ask(lambda c: actions(c, ALWAYS, 10))
