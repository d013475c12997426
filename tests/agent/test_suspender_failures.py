"""The suspender where a step fails: a driver, a disk and a GPU that do what a test says; processes that do nothing."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import GpuState
from gpushare_spawner.agent.state.session_record import Suspension
from gpushare_spawner.agent.suspend import coming_back, suspender
from gpushare_spawner.agent.suspend.driver_checkpoint import Answer, Code, DriverCheckpoints, ProcessState
from gpushare_spawner.agent.suspend.suspender import Suspender
from gpushare_spawner.model.protocol.frames import Feature, Frame, Kind
from tests.agent.peers import FIRST, GpusOnPaper

MIB = 2**20
SIZE = 100 * MIB


class ScriptedDriver:
    """Keeps the state of each process. A restore that finds too little memory is never done again."""

    def __init__(self, source: GpusOnPaper) -> None:
        self.states: dict[int, ProcessState] = {}
        self.fails: dict[tuple[str, int], list[Code]] = {}
        """What the next such calls answer."""
        self.source = source

    async def _do(self, call: str, pid: int, before: ProcessState, after: ProcessState) -> Answer:
        if codes := self.fails.get((call, pid)):
            return Answer(code := codes.pop(0), code)
        if self.states.get(pid, ProcessState.RUNNING) is not before:
            return Answer(Code.ILLEGAL_STATE)
        self.states[pid] = after
        return Answer(Code.SUCCESS)

    async def lock(self, pid: int, timeout: float) -> Answer:
        return await self._do("lock", pid, ProcessState.RUNNING, ProcessState.LOCKED)

    async def checkpoint(self, pid: int, size: int) -> Answer:
        return await self._do("checkpoint", pid, ProcessState.LOCKED, ProcessState.CHECKPOINTED)

    async def restore(self, pid: int, size: int) -> Answer:
        free = FIRST.memory_bytes - self.source.state(FIRST).memory_used_bytes
        if free < size:
            self.states[pid] = ProcessState.FAILED
            return Answer(Code.OUT_OF_MEMORY)
        return await self._do("restore", pid, ProcessState.CHECKPOINTED, ProcessState.LOCKED)

    async def unlock(self, pid: int) -> Answer:
        return await self._do("unlock", pid, ProcessState.LOCKED, ProcessState.RUNNING)

    async def state(self, pid: int | None = None) -> Answer:
        if codes := self.fails.get(("state", pid or 0)):
            return Answer(codes.pop(0))
        return Answer(Code.SUCCESS, state=self.states.get(pid or 0, ProcessState.RUNNING))


class Arbitration:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.suspend: Any = None
        self.resume: Any = None
        self.told: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.told.append(name)


class Connected:
    """A process that says that it is ready, each time that it is asked."""

    def __init__(self, pid: int) -> None:
        self.peer, self.features = SimpleNamespace(pid=pid), Feature.SUSPEND
        self.sent: list[Kind] = []
        self.answers: Any = None

    def send(self, kind: Kind, number: int) -> None:
        self.sent.append(kind)
        if kind is Kind.SUSPEND and self.answers is not None:
            self.answers(self, Frame(Kind.SUSPEND_READY, (number, 0, 0, 0, 1, 1, SIZE)))


class Bench:
    """A session of two processes, and its suspender."""

    def __init__(self, pids: list[int]) -> None:
        self.source = GpusOnPaper()
        self.driver = ScriptedDriver(self.source)
        self.arbitration = Arbitration()
        self.full = False
        """The disk."""
        self.session: Any = SimpleNamespace(
            id="ann", suspends=True, gpus=[FIRST], cuda={Connected(pid) for pid in pids}, suspended=False,
            not_suspendable=None,
            record=SimpleNamespace(
                suspension=None, opened_at=0.0, pod=None, process=None, request=SimpleNamespace(uid=None)
            ),
        )  # fmt: skip
        arbitrations: Any = {FIRST.uuid: self.arbitration}
        sessions: Any = {"ann": self.session}
        self.suspender = Suspender(
            self.driver, arbitrations, sessions, self.source, lambda session, amount: None, self._save,
            lambda: None,
        )  # fmt: skip
        for one in self.session.cuda:
            one.answers = self._answers

    def _answers(self, connection: Any, frame: Frame) -> None:
        asyncio.get_running_loop().call_soon(self.suspender.ready, self.session, connection, frame)

    async def _save(self, session: Any) -> None:
        if self.full:
            raise OSError("No space left on device")

    def uses(self, amount: int) -> None:
        """So much of the GPU is not free."""
        self.source.states[FIRST.uuid] = GpuState(healthy=True, memory_used_bytes=amount)

    async def until_told(self, what: str, timeout: float = 5.0) -> None:
        async with asyncio.timeout(timeout):
            while what not in self.arbitration.told:
                await asyncio.sleep(0.005)

    def record(self, pids: list[int]) -> None:
        names = [processes.named(pid) for pid in pids]
        self.session.record.suspension = Suspension(
            processes=tuple(name for name in names if name is not None), sizes=(SIZE,) * len(pids), complete=False
        )


@pytest.fixture
def pids() -> Iterator[list[int]]:
    both = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield sorted(one.pid for one in both)
    for one in both:
        one.kill()
        one.wait()


@pytest.fixture
async def bench(pids: list[int], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(coming_back, "SPARE_WITHIN", 0.1)
    monkeypatch.setattr(coming_back, "RESUME_AGAIN", 0.02)
    monkeypatch.setattr(suspender, "RESUME_AGAIN", 0.02)
    monkeypatch.setattr(coming_back, "MEMORY_WITHIN", 0.2)
    bench = Bench(pids)
    yield bench
    await bench.suspender.close()


async def test_without_a_record_on_the_disk_nothing_is_suspended(bench: Bench) -> None:
    bench.suspender.opened(bench.session)
    bench.full = True
    bench.arbitration.suspend("ann")
    await bench.until_told("not_suspended")
    assert not bench.driver.states
    assert "record cannot be written: No space left on device" in bench.session.not_suspendable
    assert bench.session.record.suspension is None
    assert all(one.sent[-1] is Kind.RESUMED for one in bench.session.cuda)


async def test_an_error_of_the_agent_leaves_the_session_running(bench: Bench, pids: list[int]) -> None:
    bench.suspender.opened(bench.session)

    async def breaks(pid: int, size: int) -> Answer:
        raise ValueError("no JSON")

    bench.driver.checkpoint = breaks  # type: ignore[method-assign]
    bench.arbitration.suspend("ann")
    await bench.until_told("not_suspended")
    assert {bench.driver.states[pid] for pid in pids} == {ProcessState.RUNNING}
    assert "no JSON" in bench.session.not_suspendable


async def test_one_process_that_cannot_be_suspended_takes_the_other_back_only_into_free_memory(
    bench: Bench, pids: list[int]
) -> None:
    bench.suspender.opened(bench.session)
    chosen: list[int] = []
    checkpoint = bench.driver.checkpoint

    async def second_fails(pid: int, size: int) -> Answer:
        if chosen:
            return Answer(Code.OPERATING_SYSTEM, 304)
        chosen.append(pid)
        bench.uses(FIRST.memory_bytes)  # somebody else was faster
        return await checkpoint(pid, size)

    bench.driver.checkpoint = second_fails  # type: ignore[method-assign]
    bench.arbitration.suspend("ann")
    await bench.until_told("short_of_memory")
    await asyncio.sleep(0.3)
    assert bench.driver.states[chosen[0]] is ProcessState.CHECKPOINTED
    bench.uses(0)
    await bench.until_told("not_suspended")
    assert {bench.driver.states[pid] for pid in pids} == {ProcessState.RUNNING}


async def test_after_a_crash_half_a_session_comes_back_only_into_free_memory(bench: Bench, pids: list[int]) -> None:
    bench.record(pids)
    bench.driver.states = {pids[0]: ProcessState.CHECKPOINTED, pids[1]: ProcessState.LOCKED}
    bench.uses(FIRST.memory_bytes - SIZE // 2)
    bench.suspender.opened(bench.session)
    await asyncio.sleep(0.3)
    assert bench.driver.states[pids[0]] is ProcessState.CHECKPOINTED
    bench.uses(0)
    await bench.until_told("resumed")
    assert {bench.driver.states[pid] for pid in pids} == {ProcessState.RUNNING}


async def test_session_that_nearly_fills_the_gpu_comes_back(bench: Bench, pids: list[int]) -> None:
    bench.record(pids)
    bench.driver.states = dict.fromkeys(pids, ProcessState.CHECKPOINTED)
    bench.uses(FIRST.memory_bytes - 2 * SIZE)  # all that there will ever be
    bench.suspender.opened(bench.session)
    bench.arbitration.resume("ann")
    await bench.until_told("resumed")
    assert {bench.driver.states[pid] for pid in pids} == {ProcessState.RUNNING}


async def test_call_whose_worker_is_killed_is_made_again_and_what_stays_locked_is_told(
    bench: Bench, pids: list[int]
) -> None:
    bench.record(pids)
    bench.driver.states = dict.fromkeys(pids, ProcessState.CHECKPOINTED)
    bench.driver.fails = {("unlock", pids[0]): [Code.UNKNOWN], ("unlock", pids[1]): [Code.HANGS, Code.HANGS]}
    bench.suspender.opened(bench.session)
    bench.arbitration.resume("ann")
    await bench.until_told("resumed")
    assert bench.driver.states == {pids[0]: ProcessState.RUNNING, pids[1]: ProcessState.LOCKED}
    assert f"process {pids[1]}" in bench.session.not_suspendable


async def test_process_of_which_the_driver_tells_no_state_is_not_taken_for_running(
    bench: Bench, pids: list[int]
) -> None:
    bench.record(pids)
    bench.driver.states = dict.fromkeys(pids, ProcessState.LOCKED)
    bench.driver.fails = {("state", pids[0]): [Code.HANGS, Code.HANGS]}
    bench.suspender.opened(bench.session)
    await bench.until_told("resumed")
    assert f"process {pids[0]} back (HANGS)" in bench.session.not_suspendable


async def test_processes_that_connect_and_leave_all_the_time_are_looked_at_no_more_often(
    bench: Bench, pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.record(pids)
    bench.driver.states = dict.fromkeys(pids, ProcessState.CHECKPOINTED)
    bench.suspender.opened(bench.session)
    await asyncio.sleep(0.05)
    looks: list[Any] = []

    def alive(name: Any) -> bool:
        looks.append(name)
        return True

    monkeypatch.setattr(processes, "alive", alive)
    connection, *_ = bench.session.cuda
    bench.session.cuda.clear()
    for _ in range(50):
        bench.suspender.left(bench.session, connection)
    looks.clear()
    await asyncio.sleep(3 * coming_back.LOOK_EVERY)
    assert 1 <= len(looks) <= 4


async def test_machine_that_starts_no_processes_suspends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(*arguments: Any, **keywords: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuses)
    assert (await DriverCheckpoints().lock(1, 1.0)).code is Code.NO_WORKER
