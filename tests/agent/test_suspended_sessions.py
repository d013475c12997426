"""What can happen to a session of engine `suspend` while it is suspended, and what sessions that lie do to others: a
real agent, simulated GPUs, real processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

import pytest

from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.agent.suspend.checkpoints import CheckpointResult, Code, ProcessState
from gpushare_spawner.model.control import CordonRequest, ResizeRequest, TierRequest
from gpushare_spawner.model.controls import Cordon
from gpushare_spawner.model.frames import Feature, Kind
from gpushare_spawner.model.layers import MemoryEngine
from gpushare_spawner.model.share import Tier
from tests.agent.conftest import request_for
from tests.agent.peers import Peer
from tests.agent.test_suspend import CONTEXT, LARGE, MIB, Machine, Neighbour, Program, machine, neighbour  # noqa: F401 (fixtures)
from tests.agent.test_suspender_failures import Bench, bench, pids  # noqa: F401 (fixtures)

# ruff: noqa: F811


async def no_answer(program: Program, seconds: float = 0.7) -> None:
    """It still waits after so many seconds."""
    assert program.process.stdout is not None
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(program.process.stdout, ready.set)
    try:
        await asyncio.wait([waiting := asyncio.create_task(ready.wait())], timeout=seconds)
        assert not waiting.done(), program.process.stdout.readline()
        waiting.cancel()
    finally:
        loop.remove_reader(program.process.stdout)


class Liar:
    """A connected process of a session of engine `suspend` that answers as a test says; it has no device memory."""

    def __init__(self, peer: Peer, gpu: str) -> None:
        self.peer, self.gpu = peer, gpu

    async def claim(self, mib: int) -> None:
        self.peer.send(Kind.MEMORY, 0, mib * MIB, gpu=self.gpu)
        self.peer.send(Kind.REQUEST, 0, mib * MIB, gpu=self.gpu)

    async def obey_revokes(self, ready: bool) -> None:
        """Return each lease that is revoked. `ready`: answer SUSPEND, with figures that are not true."""
        while (frame := await self.peer.receive(timeout=60.0)) is not None:
            if frame.kind is Kind.REVOKE:
                self.peer.send(Kind.RELEASE, frame.fields[0], 1, gpu=self.gpu)
                self.peer.send(Kind.REQUEST, 0, 2**60, gpu=self.gpu)
            elif frame.kind is Kind.SUSPEND and ready:
                self.peer.send(Kind.SUSPEND_READY, frame.fields[0], 0, 0, 0, 1, 1, 2**60)


@pytest.fixture
async def liar(machine: Machine) -> AsyncIterator[Liar]:
    gpu = (await machine.agent.client.report()).gpus[0].uuid
    opened = await machine.agent.client.open(
        request_for("liar", gpus=(gpu,), share_units=20, engine=MemoryEngine.SUSPEND)
    )
    await machine.agent.client.confirm("liar", os.getpid())
    peer = Peer(opened.environment["GPUSHARE_SOCKET"])
    await peer.connect(features=Feature.SUSPEND)
    yield Liar(peer, gpu)
    peer.close()


@pytest.mark.slow
async def test_share_tier_and_cordons_change_while_the_session_is_suspended(
    machine: Machine, neighbour: Neighbour
) -> None:
    client = machine.agent.client
    ada = await machine.program("ada", LARGE)
    await neighbour.comes()
    await machine.suspended("ada")
    await client.send(ResizeRequest(id="ada", share_units=60))
    cordon = Cordon(gpu=neighbour.gpu, by="root", since=time.time(), drain=True, reason="new fans")
    await client.send(CordonRequest(gpu=neighbour.gpu, cordon=cordon))
    await client.send(TierRequest(id="ada", tier=Tier.RELEASED, effective_units=0, reason="idle"))
    report = await machine.session("ada")
    assert (report.suspended, report.share_units, report.tier) == (True, 60, Tier.RELEASED)
    neighbour.goes()
    rounds = await ada.ask("work", 0.2)
    assert await ada.ask("words") == [[0, rounds, 0]]
    report = await machine.session("ada")
    assert (report.suspended, report.effective_units, report.tier) == (False, 60, Tier.ACTIVE)


@pytest.mark.slow
async def test_session_that_stops_while_it_is_suspended_leaves_room_for_one_of_its_name(
    machine: Machine, neighbour: Neighbour
) -> None:
    client = machine.agent.client
    ada = await machine.program("ada", LARGE)
    await neighbour.comes()
    await machine.suspended("ada")
    await client.close("ada")
    ada.end()
    del machine.environments["ada"]
    neighbour.goes()
    again = await machine.program("ada", LARGE)
    rounds = await again.ask("work", 0.1)
    assert await again.ask("words") == [[0, rounds, 0]]
    report = await machine.session("ada")
    assert (report.suspended, report.not_suspendable, report.memory_bytes) == (False, None, LARGE * MIB)
    await neighbour.comes()
    await machine.suspended("ada")


@pytest.mark.slow
async def test_kernel_that_restarts_while_its_session_is_suspended_waits_for_the_session(
    machine: Machine, neighbour: Neighbour
) -> None:
    first, other = await machine.program("ada", 300), await machine.program("ada", 300)
    await neighbour.comes()
    await machine.suspended("ada")
    first.end()
    again = Program(machine.environments["ada"])
    machine.programs.append(again)
    again.begin("context")  # it makes the driver's first calls, perhaps before the agent has answered its HELLO
    await machine.until("ada", lambda session: session.processes == 2)
    await asyncio.sleep(0.2)
    again.begin("allocate", 77, 300)
    await asyncio.sleep(0.7)
    assert machine.free_memory() >= (1024 - CONTEXT) * MIB
    neighbour.goes()
    assert [await again.answer(), await again.answer()] == [None, None]
    assert [await again.ask("words"), await other.ask("words")] == [[[0, 0, 0]], [[0, 0, 0]]]
    report = await machine.until("ada", lambda session: session.processes == 2)
    assert (report.suspended, report.memory_bytes) == (False, 600 * MIB)


@pytest.mark.slow
async def test_suspended_program_can_fork(machine: Machine, neighbour: Neighbour) -> None:
    ada = await machine.program("ada", LARGE)
    await neighbour.comes()
    await machine.suspended("ada")
    assert await ada.ask("fork_without_cuda") == 7
    assert (await machine.session("ada")).suspended
    neighbour.goes()
    rounds = await ada.ask("work", 0.1)
    assert await ada.ask("words") == [[0, rounds, 0]]


@pytest.mark.slow
async def test_interrupt_of_a_program_that_waits_for_its_memory_harms_nothing(
    machine: Machine, neighbour: Neighbour
) -> None:
    ada = await machine.program("ada", LARGE)
    await neighbour.comes()
    await machine.suspended("ada")
    ada.begin("work", 0.1)
    await no_answer(ada)
    ada.process.send_signal(signal.SIGINT)
    await asyncio.sleep(0.5)
    neighbour.goes()
    answer = await ada.answer()
    await machine.until("ada", lambda session: not session.suspended)
    # its launch was under way: the kernel of the first round has run, or has not
    assert answer == "interrupted"
    ((first, middle, last),) = await ada.ask("words")
    assert (first, last) == (0, 0)
    assert middle in (0, 1)
    rounds = await ada.ask("work", 0.1)
    assert await ada.ask("words") == [[0, middle + rounds, 0]]


@pytest.mark.slow
async def test_program_that_is_stopped_while_it_waits_for_its_turn_keeps_no_other_session_waiting(
    machine: Machine, neighbour: Neighbour
) -> None:
    ada = await machine.program("ada", LARGE)
    await neighbour.comes()
    await machine.suspended("ada")
    ada.begin("work", 0.1)
    await no_answer(ada, 0.3)
    os.kill(ada.process.pid, signal.SIGSTOP)
    try:
        neighbour.goes()
        report = await machine.until("ada", lambda session: session.not_suspendable is not None)
        assert "it is stopped, by Ctrl-Z" in str(report.not_suspendable)
        await neighbour.comes()
        assert (await machine.session("ada")).suspended
    finally:
        os.kill(ada.process.pid, signal.SIGCONT)
    # nothing that was asked for while it was stopped restores it into memory that is in use
    await no_answer(ada)
    neighbour.goes()
    rounds = await ada.answer()
    assert await ada.ask("words") == [[0, rounds, 0]]
    assert (await machine.session("ada")).not_suspendable is None


@pytest.mark.slow
async def test_program_that_is_stopped_in_its_restore_goes_on_with_its_contents(short_folder: Path) -> None:
    machine = Machine(short_folder)
    machine.agent.environment |= {"SIMGPU_RESTORE_MS": "800"}
    await machine.start()
    try:
        ada, ben = await machine.program("ada", LARGE), await machine.program("ben")
        ben.begin("allocate", 5, LARGE)
        assert await ben.answer() is None
        await machine.suspended("ada")
        ada.begin("work", 0.1)
        await machine.suspended("ben")
        await asyncio.sleep(0.4)  # the restore is under way
        os.kill(ada.process.pid, signal.SIGSTOP)
        report = await machine.until("ada", lambda session: session.not_suspendable is not None)
        assert "it is stopped" in str(report.not_suspendable)
        os.kill(ada.process.pid, signal.SIGCONT)
        rounds = await ada.answer()
        assert await ada.ask("words") == [[0, rounds, 0]]
        assert await ben.ask("words") == [[0, 0, 0]]
    finally:
        machine.end()


@pytest.mark.slow
async def test_two_suspended_sessions_and_a_managed_one_take_turns_and_keep_their_contents(machine: Machine) -> None:
    programs = [await machine.program(name, LARGE, share_units=30) for name in ("ada", "ben")]
    programs.append(await machine.program("mia", LARGE, share_units=30, engine=MemoryEngine.MANAGED))
    rounds = [0, 0, 0]
    for _ in range(2):
        for program in programs:
            program.begin("work", 1.0)
        rounds = [before + await one.answer() for before, one in zip(rounds, programs, strict=True)]
    assert [await one.ask("words") for one in programs] == [[[0, done, 0]] for done in rounds]
    assert min(rounds) > 0


@pytest.mark.slow
async def test_weights_of_one_to_three_hold_over_twenty_seconds(short_folder: Path) -> None:
    machine = Machine(short_folder)
    machine.agent.environment |= {"SIMGPU_MEMORY": "256MiB", "SIMGPU_CONTEXT_MEMORY": "4MiB"}
    await machine.start()
    try:
        programs = [await machine.program(name, 150, share_units=units) for name, units in (("ada", 20), ("ben", 60))]
        before = [(await machine.session(name)).gpu_seconds for name in ("ada", "ben")]
        for program in programs:
            program.begin("work", 20.0)
        rounds = [await one.answer(60.0) for one in programs]
        after = [(await machine.session(name)).gpu_seconds for name in ("ada", "ben")]
        had = [new - old for new, old in zip(after, before, strict=True)]
        assert [await one.ask("words") for one in programs] == [[[0, done, 0]] for done in rounds]
        moves = [float(found) for found in re.findall(r"is (?:suspended|resumed): .* in ([0-9.]+) s", machine.log())]
        assert len(moves) >= 4
        # A round in which moves cost a fortieth of the time: within one round weights need not hold
        if 4 * median(moves) / 0.025 > 20.0:
            pytest.skip(f"moves take {median(moves)} s on this machine now")
        assert had[0] / sum(had) == pytest.approx(0.25, abs=0.1)
        assert rounds[0] / sum(rounds) == pytest.approx(0.25, abs=0.1)
    finally:
        machine.end()


@pytest.mark.slow
@pytest.mark.parametrize("ready", [False, True], ids=["silent", "false figures"])
async def test_session_that_claims_all_memory_and_does_not_leave_keeps_nobody_waiting(
    machine: Machine, liar: Liar, ready: bool
) -> None:
    await liar.claim(2**40)
    task = asyncio.create_task(liar.obey_revokes(ready))
    try:
        ada = await machine.program("ada")
        began = time.monotonic()
        await ada.does("allocate", 5, LARGE)
        await ada.ask("work", 0.1)
        assert time.monotonic() - began < 15
        done = await ada.ask("work", 3.0)
        assert done > 0
        assert (await ada.ask("words"))[0][0] == 0
    finally:
        task.cancel()


@pytest.mark.slow
async def test_flood_of_requests_stops_neither_the_agent_nor_other_sessions(machine: Machine, liar: Liar) -> None:
    ada = await machine.program("ada", LARGE)
    alone = await ada.ask("work", 1.0)

    async def flood() -> None:
        while True:
            for size in range(100):
                try:
                    liar.peer.send(Kind.REQUEST, size * MIB, size * 2**50, gpu=liar.gpu)
                    liar.peer.send(Kind.MEMORY, size * MIB, size * 2**50, gpu=liar.gpu)
                except (BlockingIOError, OSError):
                    await asyncio.sleep(0.001)
            await asyncio.sleep(0)

    task = asyncio.create_task(flood())
    try:
        beside = await ada.ask("work", 4.0)
        began = time.monotonic()
        await machine.session("ada")
        assert time.monotonic() - began < 2.0
    finally:
        task.cancel()
    assert beside >= 0.5 * alone  # in four times the time, on a machine that may have two cores
    assert await ada.ask("words") == [[0, alone + beside, 0]]


@pytest.mark.slow
async def test_session_stays_where_the_host_has_no_memory_for_it_and_the_other_gets_the_error(
    short_folder: Path,
) -> None:
    machine = Machine(short_folder)
    await machine.agent.start("--host-memory", "300MiB")
    try:
        ada = await machine.program("ada", LARGE)
        ben = await machine.program("ben")
        began = time.monotonic()
        assert "OUT_OF_MEMORY" in str(await ben.ask("allocate", 9, LARGE))
        assert time.monotonic() - began < 10
        assert not (await machine.session("ada")).suspended
        last = (await machine.session("ben")).memory_limit_hits.last
        assert last is not None
        assert (last.limit, last.requested_bytes) == ("node_host_memory", LARGE * MIB)
        rounds = await ada.ask("work", 0.1)
        assert await ada.ask("words") == [[0, rounds, 0]]
        await ben.does("allocate", 9, 100)  # what fits it gets
        # a process that asks for no allowance gets its lease all the same: nothing hangs
        gpu = (await machine.agent.client.report()).gpus[0].uuid
        asked = request_for("neighbour", gpus=(gpu,), share_units=20, engine=MemoryEngine.SUSPEND)
        opened = await machine.agent.client.open(asked)
        peer = Peer(opened.environment["GPUSHARE_SOCKET"])
        await peer.connect()
        await Neighbour(peer, gpu).comes()
        report = await machine.session("ada")
        assert not report.suspended
        assert "of host memory left for GPU memory" in str(report.not_suspendable)
        peer.close()
    finally:
        machine.end()


async def test_session_of_a_gpu_that_does_not_answer_stays_suspended_until_it_does(
    bench: Bench, pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.record(pids)
    bench.driver.states = dict.fromkeys(pids, ProcessState.CHECKPOINTED)
    bench.suspender.opened(bench.session)
    with monkeypatch.context() as patch:
        patch.setattr(bench.source, "memory", lambda gpu: None)
        bench.arbitration.resume("ann")
        await bench.until_told("not_resumed")
        assert set(bench.driver.states.values()) == {ProcessState.CHECKPOINTED}
    bench.arbitration.resume("ann")
    await bench.until_told("resumed")
    assert {bench.driver.states[pid] for pid in pids} == {ProcessState.RUNNING}


async def test_session_of_which_all_processes_die_while_they_are_being_suspended_is_not_suspended(
    bench: Bench, pids: list[int]
) -> None:
    bench.suspender.opened(bench.session)

    async def dies(process: ProcessName, size: int) -> CheckpointResult:
        pid = process.pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        (gone,) = [one for one in bench.session.cuda if one.peer.pid == pid]
        bench.session.cuda.discard(gone)
        bench.suspender.left(bench.session, gone)
        return CheckpointResult(Code.INVALID_VALUE)

    bench.driver.checkpoint = dies  # type: ignore[method-assign]
    bench.arbitration.suspend("ann")
    await bench.until_told("suspended")
    await bench.until_told("resumed")
    assert not bench.session.suspended
    assert bench.session.record.suspension is None
