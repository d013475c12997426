"""An agent in a pid namespace of its own: pids of the driver and of the sockets are not those of the same processes."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import GpuState, Utilisation
from gpushare_spawner.agent.kubernetes.options import WithoutProcesses, matched
from gpushare_spawner.agent.node import Node, NodeSettings
from gpushare_spawner.agent.periodic import RoundSettings
from gpushare_spawner.agent.sessions.environment import Libraries
from gpushare_spawner.agent.state_folder import StateFolder
from gpushare_spawner.model.control import OpenRequest
from gpushare_spawner.model.frames import Kind

from .peers import FIRST, GIB, GpusOnPaper, Peer

SEEN = GpuState(healthy=True, memory_used_bytes=GIB, processes={os.getpid(): GIB})


def may_unshare() -> bool:
    return subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode == 0


def test_nothing_is_said_of_processes_that_cannot_be_matched() -> None:
    source = GpusOnPaper()
    source.states[FIRST.uuid] = SEEN
    source.utilised[FIRST.uuid] = (Utilisation(os.getpid(), 1.0, 0.5),)
    blind = WithoutProcesses(source)
    assert blind.state(FIRST) == replace(SEEN, processes={})
    assert blind.utilisation(FIRST, 0.0) is None


@pytest.mark.parametrize(
    ("sees", "simulated", "blind"), [(True, False, False), (False, False, True), (False, True, False)]
)
def test_processes_are_left_out_where_the_agent_does_not_see_the_host_and_this_is_said(
    sees: bool, simulated: bool, blind: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "sees_the_host", lambda: sees)
    source = GpusOnPaper()
    with caplog.at_level(logging.WARNING):
        found = matched(source, (replace(FIRST, simulated=simulated),))
    assert isinstance(found, WithoutProcesses) is blind
    assert ("hostPID" in caplog.text) is blind


@pytest.mark.skipif(os.geteuid() != 0 or not may_unshare(), reason="needs root, and a pid namespace of its own")
def test_a_process_in_a_pid_namespace_of_its_own_knows_that_it_does_not_see_the_host() -> None:
    code = "from gpushare_spawner.agent import processes; print(processes.sees_the_host())"
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


AGENT_ELSEWHERE = """
import asyncio, sys
from pathlib import Path
from gpushare_spawner.agent.sessions.environment import Libraries
from gpushare_spawner.agent.kubernetes.options import matched
from gpushare_spawner.agent.gpus.nvml import GpuState
from gpushare_spawner.agent.node import Node, NodeSettings
from gpushare_spawner.agent.periodic import RoundSettings
from gpushare_spawner.agent.state_folder import StateFolder
from gpushare_spawner.model.control import OpenRequest
from tests.agent.peers import FIRST, GIB, GpusOnPaper

async def serve():
    source = GpusOnPaper()
    source.states[FIRST.uuid] = GpuState(healthy=True, processes={int(pid): GIB for pid in sys.argv[2:]})
    settings = NodeSettings("n", rounds=RoundSettings(check_every=0.05, poll_every=0.05))
    node = Node(settings, [FIRST], matched(source, (FIRST,)), StateFolder(Path(sys.argv[1])), Libraries(Path("/l.so")))
    await node.start()
    request = OpenRequest(id="ada", user="ada", uid=0, template="t", gpus=(FIRST.uuid,), share_units=25)
    opened = node.requests.open(request)
    session = node.sessions["ada"]
    print(session.socket.path, flush=True)
    while not session.cuda:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    print([one.peer.pid for one in session.cuda], node.report().session("ada").bypassing_pids, flush=True)
    while session.cuda:
        await asyncio.sleep(0.01)
    print("gone", flush=True)
    await node.close()

asyncio.run(serve())
"""


@pytest.fixture
async def node(short_folder: Path) -> AsyncIterator[Node]:
    source = GpusOnPaper()
    # the driver's numbers, one of which is that of another process here
    source.states[FIRST.uuid] = GpuState(healthy=True, processes={1: GIB, 4_000_001: GIB})
    source.utilised[FIRST.uuid] = (Utilisation(1, 1.0, 0.9),)
    settings = NodeSettings("n", rounds=RoundSettings(check_every=0.05, poll_every=0.05))
    folder = StateFolder(short_folder)
    node = Node(settings, [FIRST], WithoutProcesses(source), folder, Libraries(preload=Path("/lib.so")))
    await node.start()
    yield node
    await node.close()
    folder.close()


async def test_sessions_are_arbitrated_and_nobody_is_accused(node: Node) -> None:
    for name in ("ada", "bob"):
        request = OpenRequest(
            id=name, user=name, uid=os.geteuid(), template="t", gpus=(FIRST.uuid,), share_units=25, confirm_within=60
        )
        node.requests.open(request)
    peers = {}
    for name in ("ada", "bob"):
        socket = node.sessions[name].socket
        assert socket is not None
        peers[name] = Peer(socket.path)
        await peers[name].connect()
    for peer in peers.values():
        peer.send(Kind.REQUEST, GIB, 0, gpu=FIRST.uuid)
        await peer.until(Kind.GRANT)
    await asyncio.sleep(0.3)
    report = node.report()
    for name, peer in peers.items():
        session = report.session(name)
        assert session is not None
        assert (session.bypassing_pids, session.gpu_busy) == ((), True)
        peer.close()


@pytest.mark.skipif(os.geteuid() != 0 or not may_unshare(), reason="needs root, and a pid namespace of its own")
async def test_an_agent_in_a_pid_namespace_of_its_own_arbitrates_processes_that_it_knows_no_pid_of(
    short_folder: Path,
) -> None:
    # as the driver would list them: the peer's pid, and one that is the agent's own in its namespace
    listed = [str(os.getpid()), "1"]
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", AGENT_ELSEWHERE]
    agent = await asyncio.create_subprocess_exec(
        *command, str(short_folder), *listed, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert agent.stdout is not None
    lines = agent.stdout
    peer = Peer((await asyncio.wait_for(lines.readline(), 60)).decode().strip())
    await peer.connect()
    peer.send(Kind.REQUEST, GIB, 0, gpu=FIRST.uuid)
    await peer.until(Kind.GRANT)
    assert await asyncio.wait_for(lines.readline(), 30) == b"[0] ()\n"
    peer.close()
    assert await asyncio.wait_for(lines.readline(), 30) == b"gone\n"
    assert await agent.wait() == 0
