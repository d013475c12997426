"""The suspender by itself, without a GPU and without processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from gpushare_spawner.agent.memory.memory_holds import MemoryHolds
from gpushare_spawner.agent.suspend.driver_checkpoint import Code
from gpushare_spawner.agent.suspend.suspender import Suspender
from tests.agent.test_suspend_capability import Driver


async def test_a_suspender_that_is_closed_begins_nothing_while_clients_leave() -> None:
    saved: list[Any] = []

    async def save(session: Any) -> None:
        saved.append(session)

    orders: Any = SimpleNamespace(not_suspended=lambda session: None, set_suspendable=lambda session, able: None)
    source: Any = None
    left: Any = None
    suspender = Suspender(
        Driver(Code.SUCCESS), {"GPU-0": orders}, {}, source, lambda session, amount: None, save, lambda: None, left,
        MemoryHolds(asyncio.get_running_loop().time),
    )  # fmt: skip
    session: Any = SimpleNamespace(
        id="ann", suspends=True, gpus=[SimpleNamespace(uuid="GPU-0")], cuda=set(), suspended=False,
        not_suspendable=None, record=SimpleNamespace(suspension=None),
    )  # fmt: skip
    suspender.opened(session)
    await suspender.close()
    before = asyncio.all_tasks()
    orders.suspend("ann")
    orders.resume("ann")
    assert asyncio.all_tasks() == before
    await asyncio.sleep(0)
    assert not saved
