"""An error in placement: whatever fails, the form is there, other spawns go on, and the ledger is made anew."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.placement.capacity import CapacityIndex, FreeCapacity
from gpushare_spawner.placement.feed import LedgerFeed
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.strategy import StrandingAwareFgd
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.local.reservations import AgentReservations
from gpushare_spawner.spawner.queue import reservations as queue_reservations
from gpushare_spawner.spawner.queue.availability import WaitEstimates
from gpushare_spawner.spawner.queue.queue import PlacementCheck, Positions
from gpushare_spawner.spawner.queue.quotas import QueueQuotas
from gpushare_spawner.spawner.queue.snapshot import ExpectedWorkload
from tests.placement.reports import active, gpu, report
from tests.spawner.fake_agent import FakeAgent
from tests.spawner.queue.running_queue import RunningQueue
from tests.spawner.queue.test_reservations import progress_of, spawn_request
from tests.spawner.running_hub import Browser, RunningHub, until

FAILING: list[tuple[type, str]] = [
    (Ledger, "place"),
    (Ledger, "why_unplaceable"),
    (Ledger, "fits_without"),
    (LedgerFeed, "follow"),
    (CapacityIndex, "refresh"),
    (FreeCapacity, "prepare_obstacles"),
    (StrandingAwareFgd, "choose"),
    (StrandingAwareFgd, "rate_all"),
    (PlacementCheck, "counted_request"),
    (Positions, "ahead_of"),
    (QueueQuotas, "bring_up_to_date"),
    (QueueQuotas, "admission"),
    (ExpectedWorkload, "strategy"),
    (AgentReservations, "snapshot"),
]
"""Everything that a form asks placement for."""


class Fault:
    """A method that fails while the fault is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.there = True
        self.met = 0
        self.left = -1
        """How often it fails before it is gone by itself; -1: never."""
        working = getattr(owner, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            if self.there and self.left != 0:
                self.left -= 1
                self.met += 1
                raise RuntimeError("the index contradicts itself")
            return working(*args, **kwargs)

        monkeypatch.setattr(owner, name, method)


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The lines that say that the ledger was made anew, with the traceback."""
    return [one for one in caplog.records if "rebuilding the ledger" in one.message and one.exc_info is not None]


@pytest.mark.parametrize(("owner", "name"), FAILING, ids=lambda part: getattr(part, "__name__", part))
async def test_the_form_is_shown_whatever_fails_in_placement(
    hub: RunningHub,
    agent: FakeAgent,
    templates: Path,
    owner: type,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (templates / "quotas.yaml").write_text("default: {maximum: 8}\n")
    agent.occupy("there-0", 80, 0)
    agent.occupy("there-1", 80, 1)
    browser = Browser(hub)
    await browser.log_in("ada")
    fault = Fault(monkeypatch, owner, name)
    for _ in range(3):
        page = await browser.open("/hub/spawn/ada")
        assert page.code == 200
    text = page.body.decode()
    assert fault.met
    if name != "admission":  # the free capacity is known all the same
        assert "Free capacity is unknown because of an internal error" in text
    assert "Starts now" in text, "the template without a GPU"
    lines = logged(caplog)
    assert len(lines) == 1, "once for one trouble"
    assert "the index contradicts itself" in caplog.text
    fault.there = False
    # the report of the machine's agent is asked for at most every half second
    hub.reservations._last = None
    assert "internal error" not in (await browser.open("/hub/spawn/ada")).body.decode()


async def test_a_ledger_that_contradicts_itself_is_made_anew_by_the_first_look(
    hub: RunningHub, agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """A node stays in an index after it is gone, whatever the cause."""
    browser = Browser(hub)
    await browser.log_in("ada")
    assert "Starts now" in (await browser.open("/hub/spawn/ada")).body.decode()
    for index in hub.reservations.feed.ledger.capacity._indexes.values():
        entry = ((-1,), "a-node-that-left", ("GPU-that-left",), ())
        index._entries["a-node-that-left"] = (entry,)
        index._heaps.setdefault((), []).insert(0, entry)
    page = await browser.open("/hub/spawn/ada")
    assert page.code == 200
    assert "a-node-that-left" in (logged(caplog)[0].exc_text or "")
    text = (await browser.open("/hub/spawn/ada")).body.decode()
    assert "Unknown" not in text
    assert text.count("Starts now") >= 2
    assert (await hub.start_server("ada", {"profile": "quarter-gpu"})).code < 300


@pytest.fixture
def queue(agent: FakeAgent) -> RunningQueue:
    return RunningQueue(agent)


async def test_a_spawn_that_meets_one_error_gets_its_place_on_the_new_ledger(
    queue: RunningQueue, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Fault(monkeypatch, Ledger, "place").left = 1
    async with queue:
        assert (await asyncio.wait_for(queue.start(spawn_request("ada")), 5)).gpus
        assert len(logged(caplog)) == 1


async def test_an_error_that_a_new_ledger_does_not_mend_ends_the_wait_with_a_clear_message(
    queue: RunningQueue, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fault = Fault(monkeypatch, Ledger, "place")
    async with queue:
        for name in ("ada", "bob"):
            with pytest.raises(SpawnRefused, match="internal error"):
                await asyncio.wait_for(queue.start(spawn_request(name)), 5)
        assert len(logged(caplog)) == 1
        fault.there = False
        assert (await asyncio.wait_for(queue.start(spawn_request("cyd")), 5)).gpus
        queue.reservations.release("cyd")
        await until(queue.nothing_left)


@pytest.mark.parametrize(
    ("owner", "name"), [(WaitEstimates, "intervals"), (PlacementCheck, "preparing"), (LedgerFeed, "hold")]
)
async def test_a_spawn_that_waits_hears_its_position_whatever_else_fails(
    make_hub: Any, agent: FakeAgent, owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub: RunningHub = await make_hub(
        lambda config: config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}})
    )
    agent.occupy("there-0", 80, 0)
    agent.occupy("there-1", 80, 1)
    fault = Fault(monkeypatch, owner, name)
    await hub.start_server("ada", {"profile": "half-gpu"})
    event = await progress_of(hub, "ada", "First in queue")
    assert event["queue_position"] == 1
    fault.there = False
    agent.sessions.pop("there-0")
    await hub.started("ada")


async def test_a_failing_report_of_the_gpus_does_not_end_the_queue(
    queue: RunningQueue, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fault(monkeypatch, AgentReservations, "snapshot").left = 3
    async with queue:
        assert (await asyncio.wait_for(queue.start(spawn_request("ada")), 5)).gpus


def test_a_ledger_that_is_made_anew_says_the_same_and_tells_its_observers() -> None:
    feed = LedgerFeed()
    feed.follow([report("n", [gpu("a"), gpu("b", 1)], [active("s", "a", 30)])], [active("t", "b", 20)])
    heard: list[tuple[str, bool]] = []
    feed.ledger.observers.append(lambda session, allocation: heard.append((session, allocation is not None)))
    ledger, free = feed.ledger, {one.uuid: one.free for one in feed.ledger.capacity.gpus.values()}
    feed.make_anew()
    assert feed.ledger is ledger
    assert {one.uuid: one.free for one in ledger.capacity.gpus.values()} == free
    assert sorted(heard) == [("s", False), ("s", True), ("t", False), ("t", True)]


async def test_the_ledger_is_made_anew_once_in_a_while_and_after_the_last_error_too(
    queue: RunningQueue, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    reservations, made = queue.reservations, 0

    def make_anew() -> None:
        nonlocal made
        made += 1
        reservations.feed.doubtful = False

    monkeypatch.setattr(reservations.feed, "make_anew", make_anew)
    async with queue:
        assert reservations.placement_failed(RuntimeError())
        assert not reservations.placement_failed(RuntimeError())
        await reservations.availability_now()
        assert made == 1
        monkeypatch.setattr(queue_reservations, "MAKE_ANEW_SECONDS", 0.0)
        for _ in range(2):
            await reservations.availability_now()
            assert made == 2, "the second error may have left something behind"


async def test_an_error_while_the_ledger_is_made_anew_is_no_error_of_the_form(
    queue: RunningQueue, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Fault(monkeypatch, Ledger, "make_anew")
    async with queue:
        assert not queue.reservations.placement_failed(RuntimeError())
        assert "Cannot rebuild the ledger" in caplog.text
        assert (await asyncio.wait_for(queue.start(spawn_request("ada")), 5)).gpus
