"""GPU time of a process without a connection counts as its session's."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gpushare_spawner.agent.gpus.nvml import Gpu, Utilisation
from gpushare_spawner.agent.sessions import unconnected_processes
from gpushare_spawner.agent.sessions.unconnected_processes import UnconnectedProcesses
from gpushare_spawner.model.protocol.control import ConfirmRequest
from gpushare_spawner.model.protocol.frames import Kind
from tests.agent.conftest import Agent
from tests.agent.peers import FIRST, GIB


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """The server of a session, which computes on the GPU without the library."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


async def test_unconnected_process_takes_its_gpu_time_from_its_own_session(
    agent: Agent, server: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process takes four fifths of the GPU. Its session owes that time, and its connected process is held back."""
    eve, bob = agent.open("eve"), agent.open("bob")
    agent.node.requests.confirm(ConfirmRequest(id="eve", pid=server.pid))

    def utilisation(gpu: Gpu, since: float) -> tuple[Utilisation, ...]:
        return (Utilisation(server.pid, time.time(), 0.8), Utilisation(os.getpid(), time.time(), 0.2))

    monkeypatch.setattr(agent.source, "utilisation", utilisation)
    # bob's connection is the last one of this process, so the time of this process is bob's
    pretender, honest = await agent.peer(eve), await agent.peer(bob)
    for peer in (pretender, honest):
        peer.send(Kind.REQUEST, GIB, 0, 1, gpu=FIRST.uuid)
    await pretender.until(Kind.REVOKE)
    await asyncio.sleep(1.0)
    received = {one.id: one.delivered.delivered_seconds for one in agent.node.report().sessions}
    assert received["eve"] > 2 * received["bob"]


def test_an_answer_is_kept_for_a_second(server: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    clock = [0.0]

    def attributed(pids: list[int], owners: object) -> dict[str, set[int]]:
        asked.append(pids)
        return {"ada": {pid for pid in pids if pid == server.pid}}

    monkeypatch.setattr(unconnected_processes, "attributed", attributed)
    finder = UnconnectedProcesses({}, clock=lambda: clock[0])
    for clock[0] in (0.0, 0.9, 1.1):
        assert finder.sessions_of([server.pid, 1]) == {server.pid: "ada"}
    assert asked == [[server.pid, 1], [server.pid, 1]]
    assert finder.sessions_of([2]) == {}
