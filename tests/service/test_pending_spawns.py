"""The hub's pending spawns, for the dashboard's queue."""

from __future__ import annotations

import asyncio

import pytest

from gpushare_spawner.service.hub import watch
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.service.hub.watch import PendingSpawns
from tests.service.fake_hub import FakeHub


async def test_pending_spawns_come_with_the_longest_first(hub: Hub, hub_server: FakeHub) -> None:
    hub_server.add("ann", ready=False, pending="spawn", started=200.0, user_options={"profile": "half"})
    hub_server.add("bob", started=50.0)
    hub_server.add("eve", "two", ready=False, pending="spawn", started=100.0)
    hub_server.add("fay", ready=False, pending="stop", started=10.0)
    hub_server.add("gus", ready=False, pending="spawn", started=None)
    found = await PendingSpawns(hub).now()
    assert found is not None
    assert [(one.user, one.name, one.started, one.profile) for one in found] == [
        ("eve", "two", 100.0, None),
        ("ann", "", 200.0, "half"),
        ("gus", "", None, None),
    ]


async def test_many_looks_cost_the_hub_one_request(hub: Hub, hub_server: FakeHub) -> None:
    pending = PendingSpawns(hub, max_age=60)
    await asyncio.gather(*(pending.now() for _ in range(20)))
    await pending.now()
    assert len(hub_server.asked) == 1


async def test_a_hub_that_takes_long_is_asked_seldom_and_delays_no_page(hub: Hub, hub_server: FakeHub) -> None:
    hub_server.delay = 0.3
    pending = PendingSpawns(hub, max_age=0, patience=0.05)
    assert await pending.now() is None  # unknown, and the page is there
    async with asyncio.timeout(20):
        while await pending.now() is None:
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.6)
    assert await pending.now() == ()
    assert len(hub_server.asked) == 1, "the next request comes after 20 times 0.3 s"


async def test_after_a_failure_the_queue_is_unknown(
    hub: Hub, hub_server: FakeHub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SHARE_OF_TIME", 0.0)
    pending = PendingSpawns(hub, max_age=0, patience=20)
    assert await pending.now() == ()
    hub_server.faults = [403]
    assert await pending.now() is None
    assert "The dashboard shows no queue" in caplog.text
    assert await pending.now() == ()


async def test_a_changed_reason_is_logged_again(
    hub: Hub, hub_server: FakeHub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SHARE_OF_TIME", 0.0)
    pending = PendingSpawns(hub, max_age=0, patience=20)
    hub_server.faults = [b"not JSON", b"not JSON", 403, 403]
    for _ in range(4):
        assert await pending.now() is None
    said = [record.message for record in caplog.records if "The dashboard shows no queue" in record.message]
    assert len(said) == 2
    assert "cannot be read" in said[0]
    assert "403" in said[1]


async def test_tries_that_failed_do_not_delay_the_next_request(hub: Hub, hub_server: FakeHub) -> None:
    pending = PendingSpawns(hub, max_age=0, patience=20)
    hub_server.delay, hub_server.faults = 0.3, [403]
    assert await pending.now() is None
    assert await pending.now() == (), "asked again at once, not after 20 times 0.3 s"


async def test_an_answer_that_nobody_waited_for_is_not_shown_later(
    hub: Hub, hub_server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SHARE_OF_TIME", 0.0)
    monkeypatch.setattr(watch, "LONGEST_PAUSE", 0.2)
    hub_server.add("uma", ready=False, pending="spawn", started=1.0)
    hub_server.delay = 0.2
    pending = PendingSpawns(hub, max_age=0, patience=0.05)
    assert await pending.now() is None
    await asyncio.sleep(1.0)  # the answer comes, and grows old
    hub_server.users.clear()
    hub_server.delay = 0.0
    assert not await pending.now()
