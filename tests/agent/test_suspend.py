"""Sessions of engine `suspend` under a real agent, on simulated GPUs: turns, contents, deaths, failures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.session_records import SessionRecord, Suspension, short_name
from gpushare_spawner.agent.suspend.checkpoints import DriverCheckpoints
from gpushare_spawner.model.control import TierRequest
from gpushare_spawner.model.frames import Kind
from gpushare_spawner.model.layers import MemoryEngine
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.sharing.native import merged
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import request_for
from tests.agent.peers import Peer

PROGRAM = [sys.executable, "-m", "tests.agent.suspend_program"]
MIB = 2**20
LARGE = 640
"""MiB; two of them do not fit on the GPU of 1 GiB."""
CONTEXT = 32
"""MiB of a process's CUDA context."""


def write_suspension(state: Path, session: str, pid: int, size: int) -> None:
    """Write a session's record as the agent does before it touches a process."""
    process = processes.named(pid)
    assert process is not None
    path = state / "records" / f"{short_name(session)}.json"
    record = SessionRecord.model_validate_json(path.read_text())
    record.suspension = Suspension(processes=(process,), sizes=(size,), complete=False)
    path.write_text(record.model_dump_json())


class Program:
    """A program of a session."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            PROGRAM, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, *what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    async def answer(self, timeout: float = 60.0) -> Any:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), timeout)
        assert line, f"the program ended with {self.process.wait()}"
        return json.loads(line)

    async def ask(self, *what: Any) -> Any:
        self.begin(*what)
        return await self.answer()

    async def does(self, *what: Any) -> None:
        """Without an answer but that it is done."""
        assert await self.ask(*what) is None

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Machine:
    """An agent, and programs in its sessions."""

    def __init__(self, folder: Path) -> None:
        self.agent = AgentProcess(folder, gpus=1)
        self.agent.environment |= {"SIMGPU_MEMORY": "1GiB", "SIMGPU_CONTEXT_MEMORY": f"{CONTEXT}MiB"}
        self.environments: dict[str, dict[str, str]] = {}
        self.programs: list[Program] = []

    async def start(self) -> None:
        await self.agent.start("--host-memory", "off")

    async def program(self, session: str = "ada", mib: int = 0, **changes: Any) -> Program:
        """One more program of a session, which is opened where it is not there. With a context, and memory."""
        if session not in self.environments:
            gpu = (await self.agent.client.report()).gpus[0].uuid
            changes = {"engine": MemoryEngine.SUSPEND, "share_units": 40} | changes
            opened = await self.agent.client.open(request_for(session, gpus=(gpu,), **changes))
            await self.agent.client.confirm(session, os.getpid())
            self.environments[session] = merged(os.environ, opened.environment)
        program = Program(self.environments[session])
        self.programs.append(program)
        await program.does("context")
        if mib:
            await program.does("allocate", 1000 * len(self.programs), mib)
        return program

    async def session(self, name: str) -> SessionReport:
        found = (await self.agent.client.report()).session(name)
        assert found is not None
        return found

    async def until(self, name: str, holds: Callable[[SessionReport], bool], timeout: float = 15.0) -> SessionReport:
        end = time.monotonic() + timeout
        while not holds(found := await self.session(name)):
            assert time.monotonic() < end, f"{found}\n{self.agent.log.read_text()}"
            await asyncio.sleep(0.02)
        return found

    async def suspended(self, name: str) -> SessionReport:
        return await self.until(name, lambda session: session.suspended)

    def free_memory(self) -> int:
        """Bytes that are free on the GPU, as the driver says."""
        ask = "from pynvml import *; nvmlInit(); print(nvmlDeviceGetMemoryInfo(nvmlDeviceGetHandleByIndex(0)).free)"
        answer = subprocess.run(
            [sys.executable, "-c", ask], env=self.agent.environment, stdout=subprocess.PIPE, check=True
        )
        return int(answer.stdout)

    def end(self) -> None:
        """End what runs: programs first."""
        for program in self.programs:
            program.end()
        if self.agent.process is not None and self.agent.process.poll() is None:
            self.agent.end(signal.SIGKILL)

    def log(self) -> str:
        return self.agent.log.read_text()


@pytest.fixture
async def machine(short_folder: Path) -> AsyncIterator[Machine]:
    machine = Machine(short_folder)
    await machine.start()
    yield machine
    machine.end()


class Neighbour:
    """A scripted process of another session, which needs most of the GPU for a while."""

    def __init__(self, peer: Peer, gpu: str) -> None:
        self.peer, self.gpu, self.lease = peer, gpu, 0

    async def comes(self, timeout: float = 15.0) -> None:
        """It has its lease: the memory is free."""
        self.peer.send(Kind.REQUEST, 900 * MIB, 0, gpu=self.gpu)
        while not self.lease:
            self.lease = (await self.peer.until(Kind.GRANT, timeout)).fields[0]

    def goes(self) -> None:
        """It needs nothing any more."""
        self.peer.send(Kind.MEMORY, 0, 0, gpu=self.gpu)
        self.peer.send(Kind.RELEASE, self.lease, 1, gpu=self.gpu)
        self.lease = 0


@pytest.fixture
async def neighbour(machine: Machine) -> AsyncIterator[Neighbour]:
    gpu = (await machine.agent.client.report()).gpus[0].uuid
    # of an engine whose processes the driver need not list: what any other states without a context counts for nothing
    asked = request_for("neighbour", gpus=(gpu,), share_units=20, engine=MemoryEngine.SUSPEND)
    opened = await machine.agent.client.open(asked)
    await machine.agent.client.confirm("neighbour", os.getpid())
    peer = Peer(opened.environment["GPUSHARE_SOCKET"])
    await peer.connect()
    yield Neighbour(peer, gpu)
    peer.close()


async def test_idle_session_is_suspended_when_its_memory_is_needed_and_the_next_burst_resumes_it(
    machine: Machine, neighbour: Neighbour
) -> None:
    ada = await machine.program("ada", LARGE)
    rounds = await ada.ask("work", 0.1)
    await neighbour.comes()
    report = await machine.suspended("ada")
    assert (report.resident_bytes, report.memory_bytes, report.not_suspendable) == (0, LARGE * MIB, None)
    neighbour.goes()
    rounds += await ada.ask("work", 0.1)
    assert await ada.ask("words") == [[0, rounds, 0]]
    report = await machine.session("ada")
    assert (report.suspended, report.resident_bytes) == (False, LARGE * MIB)


async def test_released_session_is_suspended_at_once_and_its_next_work_brings_it_back(machine: Machine) -> None:
    ada = await machine.program("ada", LARGE)
    rounds = await ada.ask("work", 0.1)
    before = machine.free_memory()
    await machine.agent.client.send(TierRequest(id="ada", tier=Tier.RELEASED, effective_units=0, reason="idle"))
    assert (await machine.suspended("ada")).tier is Tier.RELEASED
    assert machine.free_memory() == before + (LARGE + CONTEXT) * MIB
    rounds += await ada.ask("work", 0.1)
    assert await ada.ask("words") == [[0, rounds, 0]]
    assert (await machine.session("ada")).tier is Tier.ACTIVE


async def test_all_processes_of_a_session_are_suspended_a_forked_one_too(
    machine: Machine, neighbour: Neighbour
) -> None:
    first, second = await machine.program("ada", 200), await machine.program("ada", 200)
    parent = Program(machine.environments["ada"])  # it forks before it has a context of its own
    machine.programs.append(parent)
    child = await parent.ask("fork", 7, 200)
    try:
        await machine.until("ada", lambda session: session.processes == 3)
        await machine.until("ada", lambda session: session.memory_bytes == 600 * MIB)
        await neighbour.comes()
        await machine.suspended("ada")
        neighbour.goes()
        assert await first.ask("words") == await second.ask("words") == [[0, 0, 0]]
        assert not (await machine.session("ada")).suspended
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
async def test_process_that_dies_while_it_is_suspended_leaves_nothing_behind(
    machine: Machine, neighbour: Neighbour
) -> None:
    first, second = await machine.program("ada", 300), await machine.program("ada", 300)
    await neighbour.comes()
    await machine.suspended("ada")
    first.end()
    neighbour.goes()
    assert await second.ask("words") == [[0, 0, 0]]
    second.end()
    await machine.until("ada", lambda session: session.processes == 0)
    third = await machine.program("ada", 300)
    await neighbour.comes()
    await machine.suspended("ada")
    third.end()
    await machine.until("ada", lambda session: not session.processes and not session.suspended)


async def test_process_with_managed_memory_is_never_suspended_and_the_reason_is_told(
    machine: Machine, neighbour: Neighbour
) -> None:
    ada = await machine.program("ada", 300)
    await ada.does("managed", 8)
    await neighbour.comes()
    report = await machine.until("ada", lambda session: session.not_suspendable is not None)
    assert "managed memory" in str(report.not_suspendable)
    assert not report.suspended
    assert await ada.ask("work", 0.05) > 0
    assert "is not suspendable" in machine.log()


async def test_process_that_is_no_descendant_of_the_server_is_never_locked_for_its_connection(
    machine: Machine, neighbour: Neighbour
) -> None:
    """It reached the socket, or its pid was another process's: the kernel attributes it to nobody."""
    gpu = (await machine.agent.client.report()).gpus[0].uuid
    opened = await machine.agent.client.open(
        request_for("eve", gpus=(gpu,), engine=MemoryEngine.SUSPEND, share_units=40)
    )
    with subprocess.Popen(["sleep", "60"]) as server:
        await machine.agent.client.confirm("eve", server.pid)
        machine.environments["eve"] = merged(os.environ, opened.environment)
        foreign = await machine.program("eve", LARGE)
        await neighbour.comes()
        report = await machine.until("eve", lambda session: session.not_suspendable is not None)
        assert f"Process {foreign.process.pid} uses this session's socket" in str(report.not_suspendable)
        assert not report.suspended
        neighbour.goes()
        assert await foreign.ask("work", 0.05) > 0
        server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("step", ["lock", "checkpoint"])
async def test_agent_killed_after_a_step_is_mended_by_the_next_one(
    machine: Machine, neighbour: Neighbour, step: str
) -> None:
    ada = await machine.program("ada", LARGE)
    pid = ada.process.pid
    await neighbour.comes()
    await machine.suspended("ada")
    machine.agent.end(signal.SIGKILL)
    neighbour.peer.close()
    write_suspension(machine.agent.folder / "state", "ada", pid, LARGE * MIB)  # as it was before the first step
    if step == "lock":
        checkpoints = DriverCheckpoints(machine.agent.environment)
        try:
            process = processes.named(pid)
            assert process is not None
            assert (await checkpoints.restore(process, 0)).ok
        finally:
            await checkpoints.close()
    ada.begin("work", 0.05)  # it waits in the driver
    await machine.start()
    rounds = await ada.answer()
    await machine.until("ada", lambda session: session.memory_bytes == LARGE * MIB and not session.suspended)
    assert await ada.ask("words") == [[0, rounds, 0]]


def workers_of(agent: int) -> list[int]:
    """The processes in which an agent makes the driver's calls."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(pid) for pid in children if "checkpoint_worker" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["checkpoint", "restore"])
async def test_agent_killed_inside_a_call_leaves_no_worker_and_the_next_agent_goes_by_the_drivers_state(
    short_folder: Path, call: str
) -> None:
    machine = Machine(short_folder)
    slow = {"checkpoint": {"SIMGPU_CHECKPOINT_D2H": "400MiB"}, "restore": {"SIMGPU_RESTORE_MS": "1500"}}
    machine.agent.environment |= slow[call]
    await machine.start()
    try:
        ada = await machine.program("ada", LARGE)
        ben = await machine.program("ben")
        ben.begin("allocate", 5, LARGE)
        if call == "restore":
            assert await ben.answer() is None
            await machine.suspended("ada")
            ada.begin("work", 0.05)
            await machine.suspended("ben")
        await asyncio.sleep(0.5)  # the call is under way
        agent = machine.agent.process
        assert agent is not None
        workers = workers_of(agent.pid)
        assert workers
        machine.agent.end(signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert [pid for pid in workers if processes.named(pid) is not None] == []
        await machine.start()
        if call == "checkpoint":
            ada.begin("work", 0.05)
            if await ben.answer() is not None:  # there was no agent, and the driver refused
                await machine.until("ben", lambda session: session.processes == 1)
                await machine.until("ada", lambda session: session.memory_bytes == LARGE * MIB)
                assert await ben.ask("allocate", 5, LARGE) is None
        rounds = await ada.answer()
        assert await ada.ask("words") == [[0, rounds, 0]]
        assert await ben.ask("words") == [[0, 0, 0]]
    finally:
        machine.end()


@pytest.mark.slow
async def test_agent_that_is_stopped_in_a_suspension_leaves_no_process_locked(short_folder: Path) -> None:
    machine = Machine(short_folder)
    machine.agent.environment |= {"SIMGPU_CHECKPOINT_D2H": "100MiB"}
    await machine.start()
    try:
        both = [await machine.program("ada", 300), await machine.program("ada", 300)]
        ben = await machine.program("ben")
        ben.begin("allocate", 5, LARGE)
        await asyncio.sleep(1.0)  # one process leaves the GPU, which takes 3 s; the other is locked
        machine.agent.end(signal.SIGTERM)
        for program in both:
            program.begin("work", 0.05)
        done, waiting = await asyncio.wait([asyncio.create_task(one.answer(60)) for one in both], timeout=6)
        assert (len(done), len(waiting)) == (1, 1)
        await machine.start()
        await asyncio.wait(waiting, timeout=30)
        assert not [one for one in waiting if not one.done()], machine.log()
        assert [one.result() > 0 for one in waiting] == [True]
    finally:
        machine.end()


@pytest.mark.slow
async def test_suspended_process_that_outlives_session_and_agent_is_resumed_by_the_next_agent(
    machine: Machine, neighbour: Neighbour
) -> None:
    ada = await machine.program("ada", LARGE)
    await neighbour.comes()
    await machine.suspended("ada")
    await machine.agent.client.close("ada")
    machine.agent.end(signal.SIGKILL)
    neighbour.peer.close()
    await machine.start()
    assert await ada.ask("work", 0.05) > 0
    while list((machine.agent.folder / "state" / "records").glob("*.left")):
        await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_processes_of_a_session_that_ended_while_no_agent_ran_are_resumed(
    machine: Machine, neighbour: Neighbour
) -> None:
    ada = await machine.program("ada", LARGE)
    await neighbour.comes()
    await machine.suspended("ada")
    server = subprocess.Popen(["sleep", "60"])
    await machine.agent.client.confirm("ada", server.pid)
    machine.agent.end(signal.SIGKILL)
    server.kill()
    server.wait()
    neighbour.peer.close()
    await machine.start()
    assert await ada.ask("work", 0.05) > 0


async def resume_without_agent(machine: Machine) -> tuple[int, str]:
    """`gpushare agent resume`: its exit status, and what it says."""
    command = [sys.executable, "-m", "gpushare_spawner.cli", "agent", "resume", "--state-dir"]
    done = await asyncio.to_thread(
        subprocess.run, [*command, str(machine.agent.folder / "state")], env=machine.agent.environment,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
async def test_command_resumes_what_a_stopped_agent_has_left_and_only_into_free_memory(
    machine: Machine, neighbour: Neighbour
) -> None:
    ada = await machine.program("ada", LARGE)
    await neighbour.comes()
    await machine.suspended("ada")
    status, said = await resume_without_agent(machine)
    assert status == 1
    assert "already works on" in said
    machine.agent.end(signal.SIGTERM)
    neighbour.peer.close()
    status, said = await resume_without_agent(machine)
    assert status == 0
    assert f"Process {ada.process.pid} of session ada runs again." in said
    status, said = await resume_without_agent(machine)
    assert (status, said.splitlines()[0]) == (0, "No process is suspended.")
    assert await ada.ask("words") == [[0, 0, 0]]
    await machine.start()
    assert not (await machine.session("ada")).suspended


@pytest.mark.slow
async def test_command_leaves_a_process_suspended_where_memory_is_short(machine: Machine, neighbour: Neighbour) -> None:
    ada = await machine.program("ada", LARGE)
    await neighbour.comes()
    await machine.suspended("ada")
    machine.agent.end(signal.SIGTERM)
    neighbour.peer.close()
    foreign = Program(os.environ | machine.agent.environment)
    machine.programs.append(foreign)
    await foreign.does("context")
    await foreign.does("allocate", 5, 500)
    status, said = await resume_without_agent(machine)
    assert (status, "stays suspended: " in said, "more must be free on its GPU" in said) == (1, True, True)
    foreign.end()
    assert (await resume_without_agent(machine))[0] == 0
    assert await ada.ask("words") == [[0, 0, 0]]


@pytest.mark.slow
async def test_session_stays_suspended_over_a_restart_of_the_agent(machine: Machine, neighbour: Neighbour) -> None:
    ada = await machine.program("ada", LARGE)
    await neighbour.comes()
    await machine.suspended("ada")
    machine.agent.end(signal.SIGKILL)
    neighbour.peer.close()
    await machine.start()
    await machine.suspended("ada")
    assert await ada.ask("words") == [[0, 0, 0]]


@pytest.mark.slow
async def test_without_the_drivers_functions_the_session_says_why_it_stays(short_folder: Path) -> None:
    machine = Machine(short_folder)
    machine.agent.environment |= {"SIMGPU_CHECKPOINT": "absent"}
    await machine.start()
    try:
        await machine.program("ada", 100)
        report = await machine.until("ada", lambda session: session.not_suspendable is not None)
        assert "driver 570 or later" in str(report.not_suspendable)
    finally:
        machine.end()


async def test_sessions_that_do_not_fit_together_take_turns_from_their_start_on(machine: Machine) -> None:
    ada, ben = await machine.program("ada", LARGE), await machine.program("ben", LARGE)
    report = await machine.suspended("ada")
    assert (report.resident_bytes, report.not_suspendable) == (0, None)
    ada.begin("work", 1.0)
    ben.begin("work", 1.0)
    rounds = [await ada.answer(), await ben.answer()]
    assert min(rounds) > 0
    assert [await ada.ask("words"), await ben.ask("words")] == [[[0, rounds[0], 0]], [[0, rounds[1], 0]]]


@pytest.mark.slow
async def test_resumption_waits_until_the_driver_shows_enough_free_memory(
    machine: Machine, neighbour: Neighbour
) -> None:
    ada = await machine.program("ada", LARGE)
    await neighbour.comes()
    await machine.suspended("ada")
    # a restore that found too little memory could never be repeated: the simulated driver keeps to that
    foreign = Program(os.environ | machine.agent.environment)
    machine.programs.append(foreign)
    await foreign.does("context")
    await foreign.does("allocate", 5, 500)
    neighbour.goes()
    ada.begin("work", 0.05)
    await asyncio.sleep(1.0)
    assert (await machine.session("ada")).suspended
    foreign.end()
    rounds = await ada.answer()
    assert await ada.ask("words") == [[0, rounds, 0]]


@pytest.mark.slow
async def test_suspended_process_that_outlives_its_session_goes_on(machine: Machine, neighbour: Neighbour) -> None:
    ada = await machine.program("ada", LARGE)
    await neighbour.comes()
    await machine.suspended("ada")
    neighbour.goes()
    await machine.agent.client.close("ada")
    assert await ada.ask("work", 0.05) > 0
    async with asyncio.timeout(10.0):  # the program works a moment before the agent logs it
        while "which session ada left suspended, is resumed" not in machine.log():
            await asyncio.sleep(0.05)
