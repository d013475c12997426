"""The suspender without a GPU: closed, and with a real arbiter in virtual time."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.session_limit import ExclusiveMemory
from gpushare_spawner.agent.suspend.checkpoints import Code
from gpushare_spawner.agent.suspend.progress import SuspendParts
from gpushare_spawner.agent.suspend.suspender import Suspender
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.frames import NO_GPU, Frame, Kind
from tests.agent.peers import FIRST, GIB
from tests.agent.test_suspend_capability import Driver
from tests.agent.test_suspender_failures import Bench
from tests.agent.virtual_node import VirtualLoop


async def test_a_suspender_that_is_closed_begins_nothing_while_clients_leave() -> None:
    saved: list[Any] = []

    async def save(session: Any) -> None:
        saved.append(session)

    orders: Any = SimpleNamespace(not_suspended=lambda session: None, set_suspendable=lambda *_: None)
    source: Any = None
    left: Any = None
    parts = SuspendParts(
        Driver(Code.SUCCESS), {"GPU-0": orders}, {}, source,
        ExclusiveMemory(asyncio.get_running_loop().time, lambda gpu: None), left,
        lambda session, amount: None, save, lambda: None,
    )  # fmt: skip
    suspender = Suspender(parts)
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


class Waiting:
    """A process of another session, which is short of memory."""

    number = 2

    def __init__(self) -> None:
        self.granted: list[tuple[float, int]] = []
        """When it was granted a lease, or told that it still waits (0)."""

    def send(self, kind: Kind, *fields: int, gpu: bytes = NO_GPU, flags: int = 0) -> None:
        if kind is Kind.GRANT:
            self.granted.append((asyncio.get_running_loop().time(), fields[0]))


@pytest.fixture
def virtual_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualLoop]:
    async def at_once(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    loop = VirtualLoop()
    yield loop
    loop.close()


@pytest.mark.parametrize(
    ("busy", "managed", "after", "suspended"),
    [(2, 0, 2 + 4, True), (10**6, 0, 2 + 4 + 8, False), (0, 2**20, 0, False)],
    ids=["busy for a moment", "always busy", "cannot be suspended"],
)
def test_allocation_waits_only_for_a_neighbour_that_is_busy_for_a_moment(
    virtual_loop: VirtualLoop, busy: int, managed: int, after: float, suspended: bool
) -> None:
    """ann has 12 of 16 GiB, is idle and answers so many SUSPEND with "not ready". ben needs 8 GiB."""
    ben = Waiting()

    async def scenario() -> bool:
        arbitration = GpuArbitration(FIRST, ArbiterSettings())
        bench, answers = Bench([process.pid], arbitration), list[int]()
        (ann,) = bench.session.cuda
        ann.number = 1

        def answer(connection: Any, frame: Frame) -> None:
            answers.append(frame.fields[0])
            ready = len(answers) > busy and not managed
            fields = (frame.fields[0], managed, 0, 0, 1, int(ready), 12 * GIB)
            bench._answers(connection, Frame(Kind.SUSPEND_READY, fields))

        ann.answers = answer
        arbitration.add_session("ann", 50, suspends=True)
        bench.suspender.opened(bench.session)
        arbitration.join(ann, "ann")
        arbitration.receive(ann, Frame(Kind.MEMORY, (0, 12 * GIB, 0)))
        arbitration.device_memory({1: 12 * GIB}, {})
        arbitration.add_session("ben", 50, suspends=True)
        arbitration.join(ben, "ben")
        arbitration.receive(ben, Frame(Kind.REQUEST, (0, 8 * GIB, 1, 8 * GIB)))
        await asyncio.sleep(100.0)
        was_suspended = bool(bench.session.suspended)
        await bench.suspender.close()
        arbitration.close()
        return was_suspended

    with subprocess.Popen(["sleep", "60"]) as process:
        assert virtual_loop.run_until_complete(scenario()) is suspended
        process.kill()
    when = next(at for at, lease in ben.granted if lease)
    assert when == pytest.approx(after, abs=0.5)
