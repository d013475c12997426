"""`gpushare agent` as a process of its own, on simulated GPUs, with the signals and faults of real life."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gpushare_spawner.idle.use import LEAST_USE
from gpushare_spawner.model.control import (
    ControlRefused,
    CordonRequest,
    MessageRequest,
    OpenRequest,
    StopProcessesRequest,
    TierRequest,
)
from gpushare_spawner.model.controls import Cordon, Message, MessageCause
from gpushare_spawner.model.frames import Kind
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.sharing.native import merged
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import request_for
from tests.agent.peers import GIB, Peer, session_processes


@pytest.fixture
async def agent(short_folder: Path) -> AsyncIterator[AgentProcess]:
    agent = AgentProcess(short_folder)
    await agent.start()
    yield agent
    if agent.process is not None and agent.process.poll() is None:
        agent.end(signal.SIGKILL)


async def request_on_first(agent: AgentProcess, id: str, **changes: object) -> OpenRequest:
    gpu = (await agent.client.report()).gpus[0].uuid
    return request_for(id, gpus=(gpu,), **changes)


async def session(agent: AgentProcess, id: str) -> SessionReport:
    found = (await agent.client.report()).session(id)
    assert found is not None
    return found


async def test_gpus_come_from_nvml(agent: AgentProcess) -> None:
    report = await agent.client.report()
    assert report.node == "here"
    assert [gpu.index for gpu in report.gpus] == [0, 1]
    for gpu in report.gpus:
        assert gpu.simulated
        assert gpu.healthy
        assert gpu.memory_bytes == 16 * GIB
        assert gpu.uuid.startswith("GPU-")


async def test_the_environment_leads_to_the_session(agent: AgentProcess) -> None:
    request = await request_on_first(agent, "ada")
    opened = await agent.client.open(request)
    assert opened.environment["LD_PRELOAD"] == str(agent.preload)
    assert opened.environment["SIMGPU_STATE"] == agent.environment["SIMGPU_STATE"]
    assert opened.environment["CUDA_VISIBLE_DEVICES"] == request.gpus[0]
    peer = Peer(opened.environment["GPUSHARE_SOCKET"])
    welcome, device = await peer.connect()
    assert welcome.fields[0] == 25
    assert device.fields[0] == 16 * GIB
    peer.close()


class Worker:
    """A CUDA process that works in bursts for ever, and comes back when it loses the agent."""

    def __init__(self, path: str, gpu: str) -> None:
        self.path, self.gpu = path, gpu
        self.bursts = 0

    async def run(self) -> None:
        while True:
            peer = Peer(self.path)
            try:
                await peer.connect()
                while True:
                    peer.send(Kind.REQUEST, 6 * GIB, 0, self.bursts, gpu=self.gpu)
                    lease = (await peer.until(Kind.GRANT, timeout=20)).fields[0]
                    await asyncio.sleep(0.002)
                    peer.send(Kind.IDLE, lease, 2_000_000, 0, gpu=self.gpu)
                    peer.send(Kind.RELEASE, lease, 2_000_000, 0, gpu=self.gpu)
                    self.bursts += 1
            except (OSError, AssertionError):
                await asyncio.sleep(0.05)
            finally:
                peer.close()


async def test_killed_under_load_and_started_again(agent: AgentProcess) -> None:
    """kill -9 while six processes work: no session is lost, tiers are kept, everybody works on."""
    paths = {}
    gpu = ""
    for number in range(6):
        request = await request_on_first(agent, f"user-{number}", share_units=10, confirm_within=600)
        gpu = request.gpus[0]
        paths[request.id] = (await agent.client.open(request)).environment["GPUSHARE_SOCKET"]
        await agent.client.confirm(request.id, os.getpid())
    await agent.client.open(await request_on_first(agent, "sleeper", share_units=40))
    await agent.client.send(TierRequest(id="sleeper", tier=Tier.DOWNGRADED, effective_units=5, reason="idle"))
    workers = [Worker(path, gpu) for path in paths.values()]
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        for _ in range(2):
            before = [worker.bursts for worker in workers]
            await asyncio.sleep(0.7)
            assert all(worker.bursts > earlier for worker, earlier in zip(workers, before, strict=True))
            agent.end(signal.SIGKILL)
            await asyncio.sleep(0.1)
            await agent.start()
            report = await agent.client.report()
            assert {one.id for one in report.sessions} == {*paths, "sleeper"}
            sleeper = report.session("sleeper")
            assert sleeper is not None
            assert (sleeper.tier, sleeper.effective_units) == (Tier.DOWNGRADED, 5)
            assert all(one.confirmed for one in report.sessions if one.id != "sleeper")
        before = [worker.bursts for worker in workers]
        await asyncio.sleep(1.0)
        assert all(worker.bursts > earlier for worker, earlier in zip(workers, before, strict=True))
        active = [one.last_gpu_activity for one in (await agent.client.report()).sessions if one.id != "sleeper"]
        assert all(at is not None and at > time.time() - 5 for at in active)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert "Traceback" not in agent.log.read_text()


async def test_sigterm_ends_it_and_keeps_the_sessions(agent: AgentProcess) -> None:
    await agent.client.open(await request_on_first(agent, "ada"))
    assert agent.end(signal.SIGTERM) == 0
    assert not agent.client.socket.exists()
    await agent.start()
    assert (await session(agent, "ada")).share_units == 25
    assert agent.end(signal.SIGINT) == 0
    assert "Traceback" not in agent.log.read_text()


async def test_a_second_agent_is_refused_with_the_pid_of_the_first(agent: AgentProcess) -> None:
    assert agent.process is not None
    second = subprocess.run(agent.command(), env=agent.environment, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert f"another agent (process {agent.process.pid})" in second.stderr
    elsewhere = [*agent.command("--control-socket", str(agent.client.socket))]
    elsewhere[elsewhere.index("--state-dir") + 1] = str(agent.folder / "other")
    third = subprocess.run(elsewhere, env=agent.environment, capture_output=True, text=True, timeout=60)
    assert third.returncode == 1
    assert f"another agent answers on {agent.client.socket}" in third.stderr
    assert (await agent.client.report()).node == "here"


class Program:
    """tests/agent/cuda_program.py under a session's environment."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.agent.cuda_program"],
            env=merged(os.environ, environment),
            stdout=subprocess.PIPE,
        )
        self.rounds = 0

    async def work(self, rounds: int) -> None:
        """Wait until it has done so many more."""
        assert self.process.stdout is not None
        for _ in range(rounds):
            line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), 40)
            assert line, f"the program ended with status {self.process.wait()}"
            self.rounds = int(line)

    def end(self) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


async def test_a_program_under_the_library_outlives_its_agent(agent: AgentProcess) -> None:
    """kill -9 to the agent: the program works on with right results, and comes back to the next agent."""
    opened = await agent.client.open(await request_on_first(agent, "ada"))
    program = Program(opened.environment)
    try:
        await agent.client.confirm("ada", program.process.pid)
        await program.work(5)
        now = await session(agent, "ada")
        assert (now.processes, now.bypassing_pids) == (1, ())
        assert now.memory_bytes >= 4 << 20
        assert now.last_gpu_activity is not None
        agent.end(signal.SIGKILL)
        await program.work(20)
        await agent.start()
        await until_session(agent, "ada", lambda one: one.processes == 1 and one.memory_bytes >= 4 << 20)
        await agent.client.send(TierRequest(id="ada", tier=Tier.RELEASED, effective_units=0, reason="idle"))
        await program.work(3)
        await until_session(agent, "ada", lambda one: one.tier is Tier.ACTIVE)
        program.end()
        await asyncio.sleep(0.3)
        assert (await agent.client.report()).sessions == ()
    finally:
        program.end()


async def until_session(agent: AgentProcess, id: str, holds: Callable[[SessionReport], bool]) -> SessionReport:
    """The session's report, as soon as this holds of it."""
    end = time.monotonic() + 30
    while not holds(now := await session(agent, id)):
        assert time.monotonic() < end, now
        await asyncio.sleep(0.1)
    return now


async def test_the_processes_of_a_session_are_seen_on_the_gpu(agent: AgentProcess) -> None:
    """A CUDA program that unset LD_PRELOAD is reported, one with the library is connected instead."""
    opened = await agent.client.open(await request_on_first(agent, "ada"))
    await agent.client.confirm("ada", os.getpid())
    environment = dict(opened.environment)
    del environment["LD_PRELOAD"]
    program = Program(environment)
    try:
        await program.work(1)
        now = await until_session(agent, "ada", lambda one: one.bypassing_pids == (program.process.pid,))
        assert now.processes == 0
    finally:
        program.end()


async def test_program_without_the_library_that_exceeds_the_limit_is_stopped_on_request(agent: AgentProcess) -> None:
    opened = await agent.client.open(await request_on_first(agent, "ada", memory_limit="1Mi"))
    await agent.client.confirm("ada", os.getpid())
    environment = dict(opened.environment)
    del environment["LD_PRELOAD"]
    program = Program(environment)
    try:
        await program.work(1)
        (hog,) = (await until_session(agent, "ada", lambda one: bool(one.exceeding))).exceeding
        assert hog.pid == program.process.pid
        notice = Message(text="It holds 4 MiB.", by="culler", at=time.time(), cause=MessageCause.BYPASS)
        await agent.client.send(MessageRequest(id="ada", message=notice))
        await agent.client.send(StopProcessesRequest(id="ada", processes=(hog,)))
        assert await asyncio.to_thread(program.process.wait, 10) == -signal.SIGTERM
        await until_session(agent, "ada", lambda one: not one.exceeding and not one.bypassing_pids)
    finally:
        program.end()


@pytest.mark.slow
async def test_fifty_idle_sessions_on_one_gpu_cost_little(agent: AgentProcess) -> None:
    """Measured: 42 MiB resident; nothing is polled for them."""
    peers: list[Peer] = []
    for number in range(50):
        request = await request_on_first(agent, f"user-{number}", share_units=2)
        opened = await agent.client.open(request)
        peers += await session_processes(opened.environment["GPUSHARE_SOCKET"], request.gpus[0])
    await asyncio.sleep(0.5)
    before = agent.cpu_seconds()
    await asyncio.sleep(3)
    used = agent.cpu_seconds() - before
    resident = agent.memory_bytes()["Rss"]
    for peer in peers:
        peer.close()
    assert used < 0.6
    assert resident < 60 * 2**20


async def test_overcommit_and_metrics(agent: AgentProcess) -> None:
    agent.end()
    await agent.start("--overcommit", "1.5", "--exclusive")
    assert [gpu.capacity_units for gpu in (await agent.client.report()).gpus] == [150, 150]
    await agent.client.open(await request_on_first(agent, "a", share_units=100))
    await agent.client.open(await request_on_first(agent, "b", share_units=50))
    with pytest.raises(ControlRefused, match="0 free units"):
        await agent.client.open(await request_on_first(agent, "c", share_units=1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--overcommit", "0.5"], "not a factor from 1 to 10"),
        (["--overcommit", "nan"], "not a factor from 1 to 10"),
        (["--state-dir", "/tmp/" + "x" * 120], "can have 107 bytes"),
        (["--metrics-port", "70000"], "not a port from 1 to 65535"),
        (["--state-dir", "/proc/gpushare"], "/proc/gpushare"),
        (
            ["--control-socket", "/nowhere/control.sock"],
            "the control socket /nowhere/control.sock cannot be made: No such",
        ),
    ],
)
def test_options_that_lead_nowhere(short_folder: Path, options: list[str], words: str) -> None:
    agent = AgentProcess(short_folder)
    done = subprocess.run(agent.command(*options), env=agent.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("mask", [0o000, 0o077])
async def test_the_rights_of_its_files_do_not_depend_on_the_umask(short_folder: Path, mask: int) -> None:
    """An init script can start it with the umask 0, and users can pass its folder."""
    agent, before = AgentProcess(short_folder), os.umask(mask)
    try:
        await agent.start()
    finally:
        os.umask(before)
    try:
        opened = await agent.client.open(await request_on_first(agent, "ada"))
        await agent.client.send(CordonRequest(cordon=Cordon(by="boss", reason="The fan is replaced.", since=1.0)))
    finally:
        agent.end()
    state = short_folder / "state"
    modes = {path.relative_to(state).parts[0]: path.stat().st_mode & 0o777 for path in state.glob("*")}
    files = [path for path in state.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"gpus.json", "cordons.json"}
    assert [path for path in files if path.stat().st_mode & 0o077] == []
    assert state.stat().st_mode & 0o777 == modes["s"] == 0o711
    assert opened.environment["GPUSHARE_SOCKET"].startswith(f"{state}/s/")


def test_without_a_driver_it_says_so(short_folder: Path) -> None:
    agent = AgentProcess(short_folder)
    # where the machine has a driver, this one is found first, and is none
    (short_folder / "libnvidia-ml.so.1").touch()
    agent.environment["LD_LIBRARY_PATH"] = str(short_folder)
    done = subprocess.run(agent.command(), env=agent.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no NVIDIA driver was found" in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_byte_set_every_20_s_is_less_than_what_counts_as_use(agent: AgentProcess) -> None:
    opened = await agent.client.open(await request_on_first(agent, "ada"))
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.agent.touching_program"],
        env=merged(os.environ, opened.environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        await agent.client.confirm("ada", program.pid)
        await asyncio.to_thread(program.stdout.readline)
        counts = [(await session(agent, "ada")).gpu_seconds]
        for _ in range(7):
            program.stdin.write(b"\n")
            program.stdin.flush()
            await asyncio.to_thread(program.stdout.readline)
            await asyncio.sleep(0.2)
            counts.append((await session(agent, "ada")).gpu_seconds)
    finally:
        program.kill()
        program.communicate()
    lengths = sorted(later - earlier for earlier, later in itertools.pairwise(counts))
    assert lengths[-1] > 0
    # the median: a busy machine makes one or the other long
    assert lengths[3] / 20 < LEAST_USE / 10
