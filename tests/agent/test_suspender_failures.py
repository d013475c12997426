"""The suspender where a step fails: a driver, a disk and a GPU that do what a test says; processes that do nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import GpuState
from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.agent.session_limit import ExclusiveMemory
from gpushare_spawner.agent.session_records import SessionRecord, Suspension
from gpushare_spawner.agent.suspend import checkpoints as checkpoints_module
from gpushare_spawner.agent.suspend import progress, steps, suspender
from gpushare_spawner.agent.suspend.checkpoints import CheckpointResult, Code, DriverCheckpoints, ProcessState
from gpushare_spawner.agent.suspend.suspender import Suspender
from gpushare_spawner.clocks import BackOff
from gpushare_spawner.model.frames import Feature, Frame, Kind
from tests.agent.conftest import request_for
from tests.agent.peers import FIRST, GpusOnPaper

MIB = 2**20
SIZE = 100 * MIB


def named(pid: int) -> ProcessName:
    """The process of a pid, which must run."""
    name = processes.named(pid)
    assert name is not None
    return name


class ScriptedDriver(DriverCheckpoints):
    """Keeps the state of each process. A restore that finds too little memory is never done again."""

    def __init__(self, source: GpusOnPaper) -> None:
        self.states: dict[int, ProcessState] = {}
        self.fails: dict[tuple[str, int], list[Code]] = {}
        """What the next such calls answer."""
        self.source = source

    async def _do(self, call: str, process: ProcessName, before: ProcessState, after: ProcessState) -> CheckpointResult:
        pid = process.pid
        if codes := self.fails.get((call, pid)):
            return CheckpointResult(code := codes.pop(0), code)
        if self.states.get(pid, ProcessState.RUNNING) is not before:
            return CheckpointResult(Code.ILLEGAL_STATE)
        self.states[pid] = after
        return CheckpointResult(Code.SUCCESS)

    async def lock(self, process: ProcessName, timeout: float) -> CheckpointResult:
        return await self._do("lock", process, ProcessState.RUNNING, ProcessState.LOCKED)

    async def checkpoint(self, process: ProcessName, size: int) -> CheckpointResult:
        return await self._do("checkpoint", process, ProcessState.LOCKED, ProcessState.CHECKPOINTED)

    async def restore(self, process: ProcessName, size: int) -> CheckpointResult:
        free = FIRST.memory_bytes - self.source.state(FIRST).memory_used_bytes
        if free < size:
            self.states[process.pid] = ProcessState.FAILED
            return CheckpointResult(Code.OUT_OF_MEMORY)
        return await self._do("restore", process, ProcessState.CHECKPOINTED, ProcessState.LOCKED)

    async def unlock(self, process: ProcessName) -> CheckpointResult:
        return await self._do("unlock", process, ProcessState.LOCKED, ProcessState.RUNNING)

    async def state(self, process: ProcessName | None = None) -> CheckpointResult:
        pid = process.pid if process is not None else 0
        if codes := self.fails.get(("state", pid)):
            return CheckpointResult(codes.pop(0))
        return CheckpointResult(Code.SUCCESS, state=self.states.get(pid, ProcessState.RUNNING))


class Arbitration:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.suspend: Any = None
        self.resume: Any = None
        self.told: list[str] = []
        self.suspendable = True

    def set_suspendable(self, session: str, suspendable: bool, for_a_moment: bool = False) -> None:
        self.suspendable = suspendable

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.told.append(name)


class Connected:
    """A process that says that it is ready, each time that it is asked."""

    def __init__(self, pid: int) -> None:
        self.peer, self.features = SimpleNamespace(pid=pid, process=named(pid)), Feature.SUSPEND
        self.sent: list[Kind] = []
        self.answers: Any = None

    def send(self, kind: Kind, number: int) -> None:
        self.sent.append(kind)
        if kind is Kind.SUSPEND and self.answers is not None:
            self.answers(self, Frame(Kind.SUSPEND_READY, (number, 0, 0, 0, 1, 1, SIZE)))


class Bench:
    """A session of two processes, and its suspender."""

    def __init__(self, pids: list[int], arbitration: Any = None) -> None:
        self.source = GpusOnPaper()
        self.driver = ScriptedDriver(self.source)
        self.arbitration = arbitration or Arbitration()
        self.full = False
        """The disk."""
        self.exclusive_memory = ExclusiveMemory(asyncio.get_running_loop().time, lambda gpu: None)
        self.records: list[SessionRecord] = []
        """Of processes that are left suspended."""
        self.session: Any = SimpleNamespace(
            id="ann", suspends=True, gpus=[FIRST], cuda={Connected(pid) for pid in pids}, suspended=False,
            not_suspendable=None, record=SessionRecord.opened(request_for("ann", gpus=(FIRST.uuid,)), 0.0),
        )  # fmt: skip
        self.session.record.process = named(os.getpid())
        self.sessions: dict[str, Any] = {"ann": self.session}
        self.suspender = self.next_agent()
        for one in self.session.cuda:
            one.answers = self._answers

    def next_agent(self) -> Suspender:
        arbitrations: Any = {FIRST.uuid: self.arbitration}
        sessions: Any = self.sessions
        records: Any = self
        parts = progress.SuspendParts(
            self.driver, arbitrations, sessions, self.source, self.exclusive_memory, records,
            lambda session, amount: None, self._save, lambda: None,
        )  # fmt: skip
        self.suspender = Suspender(parts)
        return self.suspender

    def put_left(self, record: SessionRecord) -> None:
        self.records.append(record.model_copy())

    def remove_left(self, record: SessionRecord) -> None:
        self.records = [one for one in self.records if one.suspension != record.suspension]

    def _answers(self, connection: Any, frame: Frame) -> None:
        asyncio.get_running_loop().call_soon(self.suspender.ready, self.session, connection, frame)

    async def _save(self, session: Any) -> None:
        if self.full:
            raise OSError("No space left on device")

    def uses(self, amount: int) -> None:
        """So much of the GPU is not free."""
        self.source.states[FIRST.uuid] = GpuState(healthy=True, memory_used_bytes=amount)

    async def until(self, holds: Callable[[], bool], timeout: float = 5.0) -> None:
        async with asyncio.timeout(timeout):
            while not holds():
                await asyncio.sleep(0.005)

    async def until_told(self, what: str, timeout: float = 5.0) -> None:
        await self.until(lambda: what in self.arbitration.told, timeout)

    def record(self, pids: list[int]) -> None:
        self.session.record.suspension = Suspension(
            processes=tuple(map(named, pids)), sizes=(SIZE,) * len(pids), complete=False
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
    monkeypatch.setattr(steps, "SPARE_WITHIN", 0.1)
    monkeypatch.setattr(steps, "RESUME_AGAIN", 0.02)
    monkeypatch.setattr(suspender, "RESUME_AGAIN", 0.02)
    monkeypatch.setattr(steps, "MEMORY_WITHIN", 0.2)
    monkeypatch.setattr(steps, "READY_WITHIN", 0.1)
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

    async def breaks(process: ProcessName, size: int) -> CheckpointResult:
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

    async def second_fails(process: ProcessName, size: int) -> CheckpointResult:
        if chosen:
            return CheckpointResult(Code.OPERATING_SYSTEM, 304)
        chosen.append(process.pid)
        bench.uses(FIRST.memory_bytes)  # somebody else was faster
        return await checkpoint(process, size)

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
    assert f"process {pids[0]} (HANGS)" in bench.session.not_suspendable


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
    await asyncio.sleep(3 * steps.CHECK_EVERY)
    assert 1 <= len(looks) <= 4


async def test_machine_that_starts_no_processes_suspends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(*arguments: Any, **keywords: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuses)
    assert (await DriverCheckpoints().lock(named(1), 1.0)).code is Code.NO_WORKER


class Unanswered(DriverCheckpoints):
    """A driver that carries a call out sometime, and notes which ones were made."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def _call(self, within: float, **request: Any) -> CheckpointResult:
        self.asked.append(request["call"])
        await asyncio.sleep(60.0)
        return CheckpointResult(Code.HANGS)


async def test_stopped_process_is_not_restored_when_it_goes_on_and_keeps_nobody_waiting(
    pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints_module, "STOPPED_FOR", 0.05)
    monkeypatch.setattr(checkpoints_module, "CHECK_EVERY", 0.01)
    driver = Unanswered()
    restore = asyncio.create_task(driver.restore(named(pids[0]), 2**30))
    await asyncio.sleep(0.1)
    assert not restore.done()
    os.kill(pids[0], signal.SIGSTOP)  # in the call
    async with asyncio.timeout(5.0):
        assert (await restore).code is Code.STOPPED
        assert driver.asked == ["restore"]
        # and before it
        assert (await driver.restore(named(pids[0]), 2**30)).code is Code.STOPPED
        assert (await driver.lock(named(pids[0]), 10.0)).code is Code.STOPPED
    assert driver.asked == ["restore"]


async def test_process_whose_restore_was_given_up_and_done_later_needs_no_more_memory(
    bench: Bench, pids: list[int]
) -> None:
    bench.record(pids)
    bench.driver.states = dict.fromkeys(pids, ProcessState.CHECKPOINTED)
    bench.suspender.opened(bench.session)
    bench.driver.fails = {("restore", pids[0]): [Code.HANGS]}
    bench.arbitration.resume("ann")
    await bench.until_told("not_resumed")
    bench.driver.states[pids[0]] = ProcessState.LOCKED
    bench.uses(FIRST.memory_bytes - SIZE)
    bench.arbitration.resume("ann")
    await bench.until_told("resumed")
    assert [bench.driver.states[pid] for pid in pids] == [ProcessState.RUNNING] * 2


async def test_stopped_process_is_no_reason_to_free_memory_for_its_session(bench: Bench, pids: list[int]) -> None:
    bench.record(pids)
    bench.driver.states = dict.fromkeys(pids, ProcessState.CHECKPOINTED)
    bench.suspender.opened(bench.session)
    bench.uses(FIRST.memory_bytes)
    os.kill(pids[1], signal.SIGSTOP)
    await bench.until(lambda: processes.stopped(pids[1]))
    bench.arbitration.resume("ann")
    await bench.until_told("not_resumed")
    assert "short_of_memory" not in bench.arbitration.told
    assert f"Process {pids[1]} cannot be restored: it is stopped" in bench.session.not_suspendable


async def test_session_with_a_stopped_process_stays_suspended_and_says_why(bench: Bench, pids: list[int]) -> None:
    bench.record(pids)
    bench.driver.states = dict.fromkeys(pids, ProcessState.CHECKPOINTED)
    bench.driver.fails = {("restore", pids[1]): [Code.STOPPED]}
    bench.suspender.opened(bench.session)
    bench.arbitration.resume("ann")
    await bench.until_told("not_resumed")
    assert f"Process {pids[1]} cannot be restored: it is stopped" in bench.session.not_suspendable
    assert set(bench.driver.states.values()) == {ProcessState.CHECKPOINTED}
    bench.arbitration.resume("ann")
    await bench.until_told("resumed")
    assert set(bench.driver.states.values()) == {ProcessState.RUNNING}


async def test_reason_goes_when_the_session_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SOON", 0.1)
    bench.suspender.opened(bench.session)
    for one in bench.session.cuda:
        one.answers = None
    bench.arbitration.suspend("ann")
    await bench.until_told("not_suspended")
    assert "did not answer" in bench.session.not_suspendable
    assert not bench.arbitration.suspendable
    await bench.until(lambda: bench.session.not_suspendable is None)
    assert bench.arbitration.suspendable


async def test_answers_that_a_machine_under_load_reads_as_the_time_ends_count(bench: Bench) -> None:
    loop = asyncio.get_running_loop()
    bench.suspender.opened(bench.session)
    for one in bench.session.cuda:
        one.answers = lambda *answer: loop.call_later(0.05, bench.suspender.ready, bench.session, *answer)
    loop.call_later(0.02, time.sleep, 0.3)
    bench.arbitration.suspend("ann")
    await bench.until_told("suspended")


async def test_missing_capability_is_looked_at_again_and_then_no_longer_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspender, "LATER", 0.1)
    bench.driver.fails = {("state", 0): [Code.NO_FUNCTIONS, Code.NO_FUNCTIONS]}
    bench.suspender.opened(bench.session)
    await bench.until(lambda: "driver 570" in str(bench.session.not_suspendable))
    await bench.until(lambda: len(bench.driver.fails["state", 0]) == 0)
    assert not bench.arbitration.suspendable
    await bench.until(lambda: bench.session.not_suspendable is None)
    assert bench.arbitration.suspendable


async def test_all_processes_of_a_session_have_one_deadline_for_their_locks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "LOCK_WITHIN", 0.5)
    bench.suspender.opened(bench.session)
    lock, timeouts = bench.driver.lock, list[float]()

    async def slow(process: ProcessName, timeout: float) -> CheckpointResult:
        timeouts.append(timeout)
        await asyncio.sleep(0.3)
        return await lock(process, timeout)

    bench.driver.lock = slow  # type: ignore[method-assign]
    bench.arbitration.suspend("ann")
    await bench.until_told("suspended")
    assert 0.4 < timeouts[0] <= 0.5
    assert steps.LEAST_TIME <= timeouts[1] <= 0.2


async def test_session_that_is_always_busy_is_asked_less_and_less_often(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SOON", 0.02)
    bench.suspender.opened(bench.session)
    bench.driver.lock = busy = BusyLock()  # type: ignore[method-assign]
    able = bench.arbitration.set_suspendable

    def still_wanted(session: str, suspendable: bool, for_a_moment: bool = False) -> None:
        able(session, suspendable, for_a_moment)
        if suspendable:
            bench.arbitration.suspend("ann")

    monkeypatch.setattr(bench.arbitration, "set_suspendable", still_wanted)
    bench.arbitration.suspend("ann")
    await asyncio.sleep(1.0)
    assert 3 <= busy.asked <= 7  # pauses of 20 ms, 40 ms, 80 ms ...


class BusyLock:
    """The work of a process never ends."""

    def __init__(self) -> None:
        self.asked = 0

    async def __call__(self, process: ProcessName, timeout: float) -> CheckpointResult:
        self.asked += 1
        return CheckpointResult(Code.NOT_READY)


def test_pauses_double_up_to_their_bound_and_begin_anew() -> None:
    pauses, now, seen = BackOff(2.0, progress.LATER), 100.0, list[float]()
    for _ in range(7):
        seen.append(pauses.next(now))
        now += seen[-1]
    assert seen == [2, 4, 8, 16, 32, 60, 60]
    assert pauses.next(now + progress.LATER + 1) == 2
    pauses.next(now + progress.LATER + 3)
    pauses.succeeded()
    assert pauses.next(now + progress.LATER + 3) == 2


async def test_agent_that_stops_unlocks_what_is_only_locked(bench: Bench, pids: list[int]) -> None:
    bench.suspender.opened(bench.session)
    lock = bench.driver.lock

    async def second_hangs(process: ProcessName, timeout: float) -> CheckpointResult:
        answer = await lock(process, timeout)
        if ProcessState.LOCKED in (bench.driver.states.get(other) for other in pids if other != process.pid):
            await asyncio.Event().wait()
        return answer

    bench.driver.lock = second_hangs  # type: ignore[method-assign]
    bench.arbitration.suspend("ann")
    await bench.until(lambda: list(bench.driver.states.values()) == [ProcessState.LOCKED] * 2)
    await bench.suspender.close()
    assert list(bench.driver.states.values()) == [ProcessState.RUNNING] * 2


async def test_agent_that_stops_does_not_wait_for_one_process_before_it_unlocks_the_next(
    bench: Bench, pids: list[int]
) -> None:
    bench.suspender.opened(bench.session)
    checkpoint, unlock = bench.driver.checkpoint, bench.driver.unlock
    leaving: list[int] = []

    async def first_takes_long(process: ProcessName, size: int) -> CheckpointResult:
        leaving.append(process.pid)
        await asyncio.Event().wait()
        return await checkpoint(process, size)

    async def waits_for_its_checkpoint(process: ProcessName) -> CheckpointResult:
        if process.pid in leaving:
            await asyncio.Event().wait()
        return await unlock(process)

    bench.driver.checkpoint, bench.driver.unlock = first_takes_long, waits_for_its_checkpoint  # type: ignore[method-assign]
    bench.arbitration.suspend("ann")
    await bench.until(lambda: bool(leaving))
    closing = asyncio.create_task(bench.suspender.close())
    (other,) = set(pids) - set(leaving)
    await bench.until(lambda: bench.driver.states[other] is ProcessState.RUNNING, 2)
    closing.cancel()


async def test_lock_of_an_earlier_agent_that_is_still_under_way_is_undone(bench: Bench, pids: list[int]) -> None:
    bench.record(pids[:1])
    unlock = bench.driver.unlock

    async def after_the_lock(process: ProcessName) -> CheckpointResult:
        bench.driver.states[process.pid] = ProcessState.LOCKED
        return await unlock(process)

    bench.driver.unlock = after_the_lock  # type: ignore[method-assign]
    bench.suspender.opened(bench.session)
    await bench.until_told("resumed")
    assert bench.driver.states == {pids[0]: ProcessState.RUNNING}


async def test_processes_that_outlive_session_and_agent_come_back_under_the_next_agent(
    bench: Bench, pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "AGAIN_AFTER", 0.02)
    bench.record(pids)
    bench.driver.states = dict.fromkeys(pids, ProcessState.CHECKPOINTED)
    bench.uses(FIRST.memory_bytes - SIZE // 2)
    bench.suspender.opened(bench.session)
    await asyncio.sleep(0.05)
    bench.suspender.ended(bench.session)
    await bench.suspender.close()
    (record,) = bench.records
    following = bench.next_agent()
    following.resume_leftover(record, FIRST)
    await asyncio.sleep(0.3)
    assert bench.driver.states == dict.fromkeys(pids, ProcessState.CHECKPOINTED)
    bench.uses(0)
    await bench.until(lambda: not bench.records)
    assert bench.driver.states == dict.fromkeys(pids, ProcessState.RUNNING)


async def test_state_is_asked_again_where_a_call_of_an_earlier_agent_was_under_way(
    bench: Bench, pids: list[int]
) -> None:
    bench.record(pids[:1])
    bench.driver.states = {pids[0]: ProcessState.LOCKED}
    unlock = bench.driver.unlock

    async def after_the_checkpoint(process: ProcessName) -> CheckpointResult:
        if bench.driver.states[process.pid] is ProcessState.LOCKED and not unlocked:
            bench.driver.states[process.pid] = ProcessState.CHECKPOINTED
        unlocked.append(process.pid)
        return await unlock(process)

    unlocked: list[int] = []
    bench.driver.unlock = after_the_checkpoint  # type: ignore[method-assign]
    bench.suspender.opened(bench.session)
    await bench.until_told("resumed")
    assert bench.driver.states == {pids[0]: ProcessState.RUNNING}


async def test_process_that_stays_locked_is_unlocked_as_soon_as_the_driver_does_it(
    bench: Bench, pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspender, "AGAIN_AFTER", 0.2)
    bench.record(pids)
    bench.driver.states = dict.fromkeys(pids, ProcessState.LOCKED)
    bench.driver.fails = {("unlock", pids[0]): [Code.HANGS]}
    bench.suspender.opened(bench.session)
    await bench.until_told("resumed")
    assert f"process {pids[0]} (HANGS)" in bench.session.not_suspendable
    await bench.until(lambda: bench.session.not_suspendable is None)
    assert bench.driver.states == dict.fromkeys(pids, ProcessState.RUNNING)
    assert not bench.records


async def test_process_in_the_failed_state_is_named_whatever_the_call_answered(bench: Bench, pids: list[int]) -> None:
    bench.suspender.opened(bench.session)

    async def fails(process: ProcessName, size: int) -> CheckpointResult:
        bench.driver.states[process.pid] = ProcessState.FAILED
        return CheckpointResult(Code.NOT_SUPPORTED)

    bench.driver.checkpoint = fails  # type: ignore[method-assign]
    bench.arbitration.suspend("ann")
    await bench.until_told("not_suspended")
    assert "(FAILED): restart its kernel" in bench.session.not_suspendable


class Neighbour:
    """Another session on the GPU, which had been granted more than it has allocated."""

    def __init__(self, bench: Bench, takes: int) -> None:
        self.id, self.gpus, self.suspended, self.memory = "ben", (FIRST,), False, self
        self.record, self.cuda = bench.session.record, set[Any]()
        self._bench, self._takes = bench, takes

    async def recall_unused(self, gpu: str) -> None:
        """It has taken the memory before it hears of this."""
        self._bench.uses(self._takes)
        self._takes = 0


async def test_memory_that_was_granted_in_advance_is_taken_back_before_the_last_look(
    bench: Bench, pids: list[int]
) -> None:
    bench.sessions["ben"] = Neighbour(bench, takes=FIRST.memory_bytes)
    bench.record(pids)
    bench.driver.states = dict.fromkeys(pids, ProcessState.CHECKPOINTED)
    bench.suspender.opened(bench.session)
    bench.arbitration.resume("ann")
    await bench.until_told("not_resumed")
    assert bench.driver.states == dict.fromkeys(pids, ProcessState.CHECKPOINTED)  # and not FAILED
    bench.uses(0)
    bench.arbitration.resume("ann")
    await bench.until_told("resumed")


async def test_free_memory_is_held_while_processes_leave_and_while_they_come_back(
    bench: Bench, pids: list[int]
) -> None:
    bench.suspender.opened(bench.session)
    held: dict[str, bool] = {}
    calls = {name: getattr(bench.driver, name) for name in ("lock", "checkpoint", "restore", "unlock")}

    def look(name: str) -> Any:
        async def call(*arguments: Any) -> CheckpointResult:
            held[name] = bench.exclusive_memory.excludes(FIRST.uuid, "ben")
            assert not bench.exclusive_memory.excludes(FIRST.uuid, "ann")
            answer: CheckpointResult = await calls[name](*arguments)
            return answer

        return call

    for name in calls:
        setattr(bench.driver, name, look(name))
    bench.arbitration.suspend("ann")
    await bench.until_told("suspended")
    assert not bench.exclusive_memory.excludes(FIRST.uuid, "ben")
    bench.arbitration.resume("ann")
    await bench.until_told("resumed")
    assert held == {"lock": False, "checkpoint": True, "restore": True, "unlock": False}
    assert not bench.exclusive_memory.excludes(FIRST.uuid, "ben")


async def test_two_sessions_never_come_back_into_the_same_free_memory(bench: Bench, pids: list[int]) -> None:
    restore = bench.driver.restore

    async def slow(process: ProcessName, size: int) -> CheckpointResult:
        await asyncio.sleep(0.1)  # the driver shows the memory as used only then
        answer = await restore(process, size)
        bench.uses(FIRST.memory_bytes)
        return answer

    bench.driver.restore = slow  # type: ignore[method-assign]
    bench.uses(FIRST.memory_bytes - SIZE)
    bench.sessions.clear()
    bench.driver.states = dict.fromkeys(pids, ProcessState.CHECKPOINTED)
    for name, pid in zip(("ann", "ben"), pids, strict=True):
        process = processes.named(pid)
        assert process is not None
        record = SessionRecord.opened(request_for(name, gpus=(FIRST.uuid,)), 0.0)
        record.suspension = Suspension(processes=(process,), sizes=(SIZE,), complete=True)
        bench.suspender.resume_leftover(record, FIRST)
    await bench.until(lambda: ProcessState.RUNNING in bench.driver.states.values())
    await asyncio.sleep(0.3)
    assert sorted(bench.driver.states.values()) == [ProcessState.RUNNING, ProcessState.CHECKPOINTED]
