"""The hub's pending spawns, for the dashboard's queue."""

from __future__ import annotations

import asyncio

from gpushare_spawner.service.hub import pending_spawns
from gpushare_spawner.service.hub.pending_spawns import PendingSpawns


async def test_pending_spawns_come_with_the_longest_first(hub, hub_server):
    hub_server.add("ann", ready=False, pending="spawn", started=200.0, user_options={"profile": "half"})
    hub_server.add("bob", started=50.0)
    hub_server.add("eve", "two", ready=False, pending="spawn", started=100.0)
    hub_server.add("fay", ready=False, pending="stop", started=10.0)
    found = await PendingSpawns(hub).now()
    assert found is not None
    assert [(one.user, one.name, one.started, one.profile) for one in found] == [
        ("eve", "two", 100.0, None),
        ("ann", "", 200.0, "half"),
    ]


async def test_many_looks_cost_the_hub_one_request(hub, hub_server):
    pending = PendingSpawns(hub, max_age=60)
    await asyncio.gather(*(pending.now() for _ in range(20)))
    await pending.now()
    assert len(hub_server.asked) == 1


async def test_a_hub_that_takes_long_is_asked_seldom_and_delays_no_page(hub, hub_server):
    hub_server.delay = 0.3
    pending = PendingSpawns(hub, max_age=0, patience=0.05)
    assert await pending.now() is None  # unknown, and the page is there
    async with asyncio.timeout(20):
        while await pending.now() is None:
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.6)
    assert await pending.now() == ()
    assert len(hub_server.asked) == 1, "the next request comes after 20 times 0.3 s"


async def test_after_a_failure_the_queue_is_unknown(hub, hub_server, caplog, monkeypatch):
    monkeypatch.setattr(pending_spawns, "SHARE_OF_TIME", 0.0)
    pending = PendingSpawns(hub, max_age=0, patience=20)
    assert await pending.now() == ()
    hub_server.faults = [403]
    assert await pending.now() is None
    assert "The dashboard shows no queue" in caplog.text
