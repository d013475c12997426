"""The bypass report can be neither forged nor evaded, and accuses nobody who is about to connect again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gpushare_spawner.agent.gpus.nvml import GpuState
from gpushare_spawner.agent.session_records import PodOwner
from gpushare_spawner.agent.sessions import attribution
from gpushare_spawner.agent.sessions.attribution import UNSTATED_SLACK
from gpushare_spawner.model.control import ConfirmRequest
from gpushare_spawner.model.frames import Kind
from gpushare_spawner.model.layers import LayerName
from tests.agent.conftest import Agent, Eventually
from tests.agent.peers import FIRST, GIB, SECOND


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def accused(agent: Agent, id: str = "ada") -> tuple[int, ...]:
    session = agent.node.report().session(id)
    assert session is not None
    return session.bypassing_pids


def shows(agent: Agent, memory: dict[int, int | None]) -> None:
    """NVML shows these processes with so many bytes on the first GPU."""
    processes = dict(memory.items())
    agent.source.states[FIRST.uuid] = GpuState(healthy=True, processes=processes)


async def polls(agent: Agent) -> None:
    """NVML has been asked a few times."""
    await asyncio.sleep(8 * agent.settings.rounds.poll_every)


async def test_hello_by_hand_does_not_hide_memory_that_was_not_claimed(
    agent: Agent, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    peer = await agent.peer(agent.open())
    shows(agent, {os.getpid(): 4 * GIB})
    await eventually(lambda: accused(agent) == (os.getpid(),))
    assert "connected, without stating its memory" in caplog.text
    peer.send(Kind.MEMORY, 3 * GIB, 0, gpu=FIRST.uuid)
    await eventually(lambda: accused(agent) == ())
    shows(agent, {os.getpid(): 4 * GIB + UNSTATED_SLACK + 1})
    await eventually(lambda: accused(agent) == (os.getpid(),))


async def test_process_within_its_claim_and_the_slack_is_not_accused(agent: Agent) -> None:
    peer = await agent.peer(agent.open())
    for claim, shown in ((0, UNSTATED_SLACK), (2 * GIB, 2 * GIB + UNSTATED_SLACK), (0, None), (8 * GIB, 0)):
        peer.send(Kind.MEMORY, claim, 0, gpu=FIRST.uuid)
        shows(agent, {os.getpid(): shown})
        await polls(agent)
        assert accused(agent) == ()


async def test_connected_process_on_a_gpu_of_others_is_reported_however_little_it_holds(
    agent: Agent, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    """Programs know a MIG instance by its GPU's UUID, so that frames do not tell one instance from another."""
    peer = await agent.peer(agent.open())
    peer.send(Kind.MEMORY, GIB // 8, 0, gpu=FIRST.uuid)
    shows(agent, {os.getpid(): GIB // 8})
    await polls(agent)
    assert accused(agent) == ()
    agent.source.states[SECOND.uuid] = GpuState(healthy=True, processes={os.getpid(): None})
    await eventually(lambda: accused(agent) == (os.getpid(),))
    assert "connected, on a GPU that is not the session's" in caplog.text


async def test_process_of_two_sessions_may_use_the_gpus_of_both(agent: Agent) -> None:
    """A user who starts a program of one server with the other one's GPU."""
    await agent.peer(agent.open())
    await agent.peer(agent.open("bob", gpus=(SECOND.uuid,)))
    for gpu in (FIRST, SECOND):
        agent.source.states[gpu.uuid] = GpuState(healthy=True, processes={os.getpid(): GIB // 8})
    await polls(agent)
    assert accused(agent) == accused(agent, "bob") == ()


async def test_claim_of_one_session_covers_no_process_of_another(agent: Agent, eventually: Eventually) -> None:
    honest = await agent.peer(agent.open("bob"))
    honest.send(Kind.MEMORY, 0, 0, gpu=FIRST.uuid)
    shows(agent, {os.getpid(): 4 * GIB})
    await eventually(lambda: accused(agent, "bob") == (os.getpid(),))


async def test_socket_in_the_environment_accuses_nobody(agent: Agent) -> None:
    """Anybody can write the victim's GPUSHARE_SOCKET into a process's environment."""
    path = agent.open("victim")
    environment = os.environ | {"GPUSHARE_SOCKET": path}
    forged = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
    try:
        shows(agent, {forged.pid: 4 * GIB})
        await polls(agent)
        assert accused(agent, "victim") == ()
    finally:
        forged.kill()
        forged.communicate()


async def test_nobody_is_accused_until_reconnecting_had_its_time(
    agent: Agent, child: subprocess.Popen[bytes], eventually: Eventually
) -> None:
    agent.open()
    agent.node.requests.confirm(ConfirmRequest(id="ada", pid=os.getpid()))
    await agent.stop()
    shows(agent, {child.pid: GIB})
    await agent.start(rounds=replace(agent.settings.rounds, reconnect_within=1.0))
    await asyncio.sleep(0.7)
    assert accused(agent) == ()
    await eventually(lambda: accused(agent) == (child.pid,))


async def test_process_of_an_mps_session_without_the_library_is_reported(
    agent: Agent, child: subprocess.Popen[bytes], eventually: Eventually
) -> None:
    """Its GPU work is not seen, so its server can be stopped while the GPU is busy."""
    agent.open(layer=LayerName.MPS, oversubscribe=False)
    agent.node.requests.confirm(ConfirmRequest(id="ada", pid=os.getpid()))
    shows(agent, {child.pid: GIB})
    await eventually(lambda: accused(agent) == (child.pid,))


async def test_process_of_a_pod_that_another_layer_serves_can_do_without_the_library(
    agent: Agent, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.open(layer=LayerName.MPS, oversubscribe=False)
    agent.node.sessions["ada"].record.pod = PodOwner(namespace="hub", name="jupyter-ada", uid="1", devices={})
    monkeypatch.setattr(attribution, "attributed", lambda pids, owners: {"ada": set(pids)})
    shows(agent, {child.pid: GIB})
    await polls(agent)
    assert accused(agent) == ()
