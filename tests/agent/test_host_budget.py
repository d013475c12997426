"""Budgets of host memory, met by real programs: real agent, real library, simulated GPUs, and a simulated cgroup."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.notebook.client import ask
from gpushare_spawner.sharing.native import merged
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import request_for
from tests.native.preload_clients import Client

MIB = 2**20
OUT_OF_MEMORY = 2
PROGRAM = """
d = Driver()
held = []
def alloc(mib, value):
    try:
        held.append((d.alloc(mib * MIB), mib, value))
    except CudaError as error:
        return error.code
    d.fill(held[-1][0], mib * MIB // 4, value)
    d.synchronize()
    return 0
def intact():
    return all(d.read(at, mib * MIB) == value.to_bytes(4, "little") * (mib * MIB // 4) for at, mib, value in held)
say("ready")
while True:
    what, *values = hear()
    say(globals()[what](*values))
"""
AGENT = """
import os
import sys
from functools import partial
from pathlib import Path
from gpushare_spawner.agent import command, processes
from gpushare_spawner.cli import main
cgroups = Path(os.environ.get("TEST_CGROUPS", "/sys/fs/cgroup"))
command.HostMemorySettings = partial(command.HostMemorySettings, cgroups=cgroups)
processes.cgroup = lambda pid: "/agent.service" if pid == "self" else "/ada.service"
sys.exit(main(sys.argv[1:]))
"""


class AgentOfOneServer(AgentProcess):
    """Takes every process for one of the cgroup /ada.service."""

    def command(self, *options: str) -> list[str]:
        python, _, _, *arguments = super().command(*options)
        return [python, "-c", AGENT, *arguments]


@pytest.fixture
async def agent(short_folder: Path) -> AsyncIterator[AgentProcess]:
    agent = AgentOfOneServer(short_folder, gpus=1)
    agent.environment["SIMGPU_MEMORY"] = "64MiB"
    yield agent
    if agent.process is not None and agent.process.poll() is None:
        agent.end(signal.SIGKILL)


@pytest.fixture
def programs() -> Iterator[list[Client]]:
    started: list[Client] = []
    yield started
    for program in started:
        program.process.kill()
        program.process.communicate()


async def start(agent: AgentProcess, programs: list[Client], name: str, **changes: Any) -> tuple[Client, str]:
    """A program of a new session; and the path of the session's socket."""
    gpu = (await agent.client.report()).gpus[0].uuid
    opened = await agent.client.open(request_for(name, gpus=(gpu,), share_units=50, memory_limit="200%", **changes))
    environment = merged(os.environ, opened.environment)
    programs.append(Client(PROGRAM, environment))
    assert programs[-1].hear() == "ready"
    return programs[-1], environment["GPUSHARE_SOCKET"]


def do(program: Client, what: str, *values: int) -> Any:
    program.say([what, *values])
    return program.hear()


async def test_what_a_servers_memory_limit_could_not_hold_is_not_allocated(
    agent: AgentProcess, programs: list[Client], tmp_path: Path
) -> None:
    """Of 1 GiB the server's processes use 949 MiB: 75 are left for what leaves the GPU, which has 64."""
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    group = tmp_path / "ada.service"
    group.mkdir()
    for name, text in (("max", 1024 * MIB), ("current", 949 * MIB), ("stat", "anon 1\ninactive_file 0")):
        (group / f"memory.{name}").write_text(f"{text}\n")
    agent.environment["TEST_CGROUPS"] = str(tmp_path)
    await agent.start()
    program, socket = await start(agent, programs, "ada")
    await agent.client.confirm("ada", os.getpid())
    assert do(program, "alloc", 50, 7) == 0
    assert do(program, "alloc", 26, 8) == OUT_OF_MEMORY
    assert do(program, "alloc", 25, 9) == 0
    page = str(await asyncio.to_thread(ask, socket))
    assert "this server's memory limit leaves too little host memory" in page
    report = (await agent.client.report()).session("ada")
    assert report is not None
    assert report.memory_limit_hits.last is not None
    assert (report.memory_limit_hits.count, report.memory_limit_hits.last.limit) == (1, "session_host_memory")
    assert do(program, "intact") is True
    (group / "memory.current").write_text(f"{749 * MIB}\n")
    await asyncio.sleep(0.6)  # the agent reads it at most every half second
    assert do(program, "alloc", 26, 8) == 0, "host memory was freed"
    assert do(program, "intact") is True


async def test_what_the_node_could_not_hold_is_not_allocated_and_no_neighbours_data_is_lost(
    agent: AgentProcess, programs: list[Client]
) -> None:
    """64 MiB on the GPU and 32 MiB in host memory; each session is guaranteed 32 MiB."""
    await agent.start("--host-memory", "32Mi")
    (ada, _), (bob, socket) = [await start(agent, programs, name) for name in ("ada", "bob")]
    assert do(ada, "alloc", 62, 7) == 0
    assert do(ada, "alloc", 5, 8) == OUT_OF_MEMORY, "bob is guaranteed the rest"
    assert do(bob, "alloc", 32, 9) == 0
    assert do(bob, "alloc", 5, 10) == OUT_OF_MEMORY
    assert "the machine's host memory for paged-out GPU memory is used up, or reserved for other sessions" in str(
        await asyncio.to_thread(ask, socket)
    )
    assert do(bob, "intact") is True
    assert do(ada, "intact") is True
    report = (await agent.client.report()).host_memory
    assert report is not None
    assert 30 * MIB <= report.needed_bytes <= 32 * MIB
    ada.process.kill()
    ada.process.wait()
    assert do(bob, "alloc", 32, 10) == 0
    assert do(bob, "intact") is True
