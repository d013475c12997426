"""GPU time of a process without a connection counts as its session's."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpushare_spawner.agent.gpus.nvml import Gpu, Utilisation
from gpushare_spawner.agent.sessions import attribution
from gpushare_spawner.agent.sessions.attribution import UnconnectedProcesses
from gpushare_spawner.model.control import ConfirmRequest
from gpushare_spawner.model.frames import Kind
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

    monkeypatch.setattr(attribution, "attributed", attributed)
    finder = UnconnectedProcesses({}, clock=lambda: clock[0])
    for clock[0] in (0.0, 0.9, 1.1):
        assert finder.sessions_of([server.pid, 1]) == {server.pid: "ada"}
    assert asked == [[server.pid, 1], [server.pid, 1]]
    assert finder.sessions_of([2]) == {}


def test_two_threads_each_get_their_answer_whatever_the_other_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of one GPU reads /proc while that of another drops answers that have become old."""
    clock, inside, go_on = [0.0], threading.Event(), threading.Event()

    def attributed(pids: list[int], owners: object) -> dict[str, set[int]]:
        if 8 in pids:
            inside.set()
            assert go_on.wait(10)
        return {"ada": set(pids)}

    monkeypatch.setattr(attribution, "attributed", attributed)
    finder = UnconnectedProcesses({}, clock=lambda: clock[0])
    assert finder.sessions_of([7]) == {7: "ada"}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(finder.sessions_of, [7, 8])
        assert inside.wait(10)
        clock[0] = 1.5
        assert finder.sessions_of([9]) == {9: "ada"}
        go_on.set()
        assert other.result(10) == {7: "ada", 8: "ada"}


def test_many_threads_lose_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution, "REMEMBERED", 0.0005)
    monkeypatch.setattr(attribution, "attributed", lambda pids, owners: {"ada": set(pids)})
    finder = UnconnectedProcesses({})

    def ask(thread: int) -> None:
        for number in range(2000):
            pids = [number % 50, 50 + (number * thread) % 50]
            assert finder.sessions_of(pids) == dict.fromkeys(pids, "ada")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [None] * 4
