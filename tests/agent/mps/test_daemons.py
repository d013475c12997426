"""MPS daemons of an agent, with a program that stands in for NVIDIA's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.agent import mps as control_program
from gpushare_spawner.agent import mps as mps_module
from gpushare_spawner.agent import processes
from gpushare_spawner.agent.session_records import short_name
from gpushare_spawner.model.control import CloseRequest, ControlRefused, OpenRequest, ResizeRequest, TierRequest
from gpushare_spawner.model.frames import Role
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import Tier
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import Agent, Eventually, request_for
from tests.agent.peers import FIRST, SECOND, Peer
from tests.present import present

STAND_IN = Path(__file__).with_name("nvidia-cuda-mps-control")


def mps(id: str, **changes: Any) -> OpenRequest:
    """A session with a quarter of the first GPU by MPS."""
    return request_for(id, **{"layer": LayerName.MPS, "memory_limit": "25%", "oversubscribe": False} | changes)


class Machine:
    """An agent whose MPS program is the stand-in."""

    def __init__(self, agent: Agent, program: Path) -> None:
        self.agent = agent
        self.program = program

    async def open(self, request: OpenRequest) -> dict[str, str]:
        """The environment of the server."""
        answer = await self.agent.node.requests.answer(request)
        return dict(answer["environment"])

    def pipes(self, uuid: str = FIRST.uuid) -> Path:
        return self.agent.path / "mps" / short_name(uuid) / "pipe"

    def pid(self, uuid: str = FIRST.uuid) -> int | None:
        """The daemon's; None: it was ended."""
        return pid_in(self.pipes(uuid))

    def starts(self, uuid: str = FIRST.uuid) -> list[str]:
        return (self.pipes(uuid) / "starts").read_text().splitlines()

    def session(self, id: str) -> SessionReport:
        found = self.agent.node.report().session(id)
        assert found is not None
        return found

    def breaks(self) -> None:
        """No daemon can be started from now on."""
        self.program.with_name("broken").touch()

    def works(self) -> None:
        self.program.with_name("broken").unlink()


def pid_in(pipes: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return int((pipes / "nvidia-cuda-mps-control.pid").read_text())
    return None


def end_daemons(folder: Path) -> None:
    for pipes in folder.glob("mps/*/pipe"):
        if (pid := pid_in(pipes)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
async def machine(short_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Machine]:
    program = Path(shutil.copy(STAND_IN, tmp_path))
    agent = Agent(short_folder)
    for name, value in (("PROGRAM", str(program)), ("CHECK_EVERY", 0.05), ("FIRST_PAUSE", 0.05)):
        monkeypatch.setattr(mps_module, name, value)
    await agent.start()
    yield Machine(agent, program)
    await agent.stop()
    end_daemons(short_folder)


async def test_first_session_starts_the_daemon_of_its_gpu_and_the_last_one_ends_it(
    machine: Machine, eventually: Eventually
) -> None:
    environment = await machine.open(mps("ada"))
    await machine.open(mps("bob", share_units=50, memory_limit="4Gi"))
    log = machine.pipes().parent / "log"
    options = "-d -multiuser-server" if os.geteuid() == 0 else "-d"
    assert machine.starts() == [f"{FIRST.uuid} {log} {options}"]
    assert environment["CUDA_VISIBLE_DEVICES"] == FIRST.uuid
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == str(machine.pipes())
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4096M"
    assert environment["GPUSHARE_LAYER"] == "mps"
    assert Path(environment["GPUSHARE_SOCKET"]).is_socket()
    assert environment["GPUSHARE_ENGINE"] == "observe"
    assert environment["LD_PRELOAD"].endswith("libgpushare.so")
    assert machine.session("ada").layer is LayerName.MPS
    assert machine.session("ada").memory_limit_bytes == 4 * 2**30
    assert machine.session("ada").layer_trouble is None

    await machine.agent.node.requests.answer(CloseRequest(id="ada"))
    await machine.agent.node.mps.check()
    assert machine.pid() is not None
    await machine.agent.node.requests.answer(CloseRequest(id="bob"))
    await eventually(lambda: machine.pid() is None)


async def test_users_reach_the_pipes_and_not_the_logs(machine: Machine) -> None:
    await machine.open(mps("ada"))
    modes = {
        folder: folder.stat().st_mode & 0o777
        for folder in (machine.pipes().parent.parent, machine.pipes().parent, machine.pipes())
    }
    assert [oct(mode) for mode in modes.values()] == ["0o711", "0o711", "0o755"]
    assert (machine.pipes().parent / "log").stat().st_mode & 0o777 == 0o700


async def test_each_gpu_has_a_daemon_of_its_own(machine: Machine, eventually: Eventually) -> None:
    await machine.open(mps("ada"))
    await machine.open(mps("bob", gpus=(SECOND.uuid,)))
    first, second = machine.pid(), machine.pid(SECOND.uuid)
    assert first is not None
    assert second is not None
    assert first != second
    assert machine.starts(SECOND.uuid)[0].startswith(SECOND.uuid)
    await machine.agent.node.requests.answer(CloseRequest(id="bob"))
    await eventually(lambda: machine.pid(SECOND.uuid) is None)
    assert machine.pid() == first


async def test_gpu_has_sessions_of_one_layer(machine: Machine) -> None:
    await machine.open(mps("ada"))
    with pytest.raises(ControlRefused, match=r"GPU 0 .* has sessions of the layer mps") as refused:
        await machine.open(request_for("bob"))
    assert refused.value.code == "no-capacity"
    await machine.open(request_for("bob", gpus=(SECOND.uuid,)))
    with pytest.raises(ControlRefused, match=r"GPU 1 .* has sessions of the layer native"):
        await machine.open(mps("eve", gpus=(SECOND.uuid,)))
    assert not machine.pipes(SECOND.uuid).exists()


async def test_daemon_that_ends_is_started_again_and_its_sessions_say_so(
    machine: Machine, eventually: Eventually
) -> None:
    path = (await machine.open(mps("ada")))["GPUSHARE_SOCKET"]
    first = machine.pid()
    assert first is not None
    machine.breaks()
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: "cannot be started" in (machine.session("ada").layer_trouble or ""))
    assert "The MPS daemon of GPU 0 is not running, and GPU work fails" in (machine.session("ada").layer_trouble or "")
    peer = Peer(path)
    machine.agent.peers.append(peer)
    await peer.connect(Role.NOTEBOOK)
    said = await peer.status()
    assert (said.layer, said.gpu_count, said.layer_trouble) == ("mps", 1, machine.session("ada").layer_trouble)
    machine.works()
    await eventually(lambda: "was restarted" in (machine.session("ada").layer_trouble or ""))
    assert machine.pid() != first
    await machine.open(mps("bob"))
    assert machine.session("bob").layer_trouble is None
    assert "restart their kernels" in (machine.session("ada").layer_trouble or "")
    assert len(machine.starts()) == 2


async def test_session_is_refused_where_the_daemon_cannot_be_started(machine: Machine) -> None:
    machine.breaks()
    with pytest.raises(ControlRefused, match=r"ended with status 1 .An instance of this daemon cannot") as refused:
        await machine.open(mps("ada"))
    assert refused.value.code == "internal"
    assert not machine.agent.node.sessions
    machine.program.unlink()
    with pytest.raises(ControlRefused, match=r"nvidia-cuda-mps-control is not installed"):
        await machine.open(mps("ada"))


async def test_failed_starts_come_at_growing_intervals(machine: Machine) -> None:
    await machine.open(mps("ada"))
    daemons = machine.agent.node.mps
    await daemons.close()
    machine.breaks()
    killed = machine.pid() or 0
    os.kill(killed, signal.SIGKILL)
    while processes.named(killed) is not None:
        await asyncio.sleep(0.01)
    daemon = daemons._daemons[FIRST.uuid]
    daemon.pauses.first = 5.0  # longer than a busy machine takes for a check
    pauses = []
    for _ in range(3):
        daemon.pauses.until = asyncio.get_running_loop().time()
        await daemons.check()
        pauses.append(daemon.pauses.until)
        await daemons.check()  # too early: no further try
    assert daemon.pauses.pause == 20.0
    assert pauses == sorted(pauses)
    assert pauses[2] - pauses[1] >= 20.0 - 10.0


async def test_daemon_is_not_taken_to_have_ended_because_the_program_hangs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await machine.open(mps("ada"))
    await machine.agent.node.mps.close()
    monkeypatch.setattr(control_program, "ANSWER_WITHIN", 0.05)
    machine.program.with_name("hangs").touch()
    await machine.agent.node.mps.check()
    assert machine.session("ada").layer_trouble is None
    assert len(machine.starts()) == 1
    machine.program.with_name("hangs").unlink()


async def test_daemon_that_an_admin_started_again_is_found(machine: Machine, eventually: Eventually) -> None:
    await machine.open(mps("ada"))
    machine.breaks()
    pid = machine.pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: "is not running" in (machine.session("ada").layer_trouble or ""))
    by_hand = subprocess.Popen(["sleep", "60"])
    (machine.pipes() / "nvidia-cuda-mps-control.pid").write_text(str(by_hand.pid))
    try:
        await eventually(lambda: "was restarted" in (machine.session("ada").layer_trouble or ""))
    finally:
        by_hand.kill()
        by_hand.wait()


async def test_agent_that_comes_back_finds_the_daemon(machine: Machine, eventually: Eventually) -> None:
    await machine.open(mps("ada"))
    before = machine.pid()
    await machine.agent.stop()
    node = await machine.agent.start()
    assert machine.pid() == before
    assert len(machine.starts()) == 1
    assert machine.session("ada").layer_trouble is None
    await node.requests.answer(CloseRequest(id="ada"))
    await eventually(lambda: machine.pid() is None)


async def test_daemon_that_nobody_needs_is_ended_when_the_agent_comes_back(machine: Machine) -> None:
    await machine.open(mps("ada"))
    machine.agent.state.records.write(short_name("ada"), None)
    node = machine.agent.node
    node.registry.store.remove("ada")
    await node.mps.close()
    await node.registry.store.flush()
    node.registry.save = lambda session: None  # type: ignore[method-assign]
    await machine.agent.stop()
    await machine.agent.start()
    assert not machine.agent.node.sessions
    assert machine.pid() is None


async def test_share_by_mps_is_fixed(machine: Machine) -> None:
    await machine.open(mps("ada"))
    tier = TierRequest(id="ada", tier=Tier.RELEASED, effective_units=0, reason="idle")
    for request in (tier, ResizeRequest(id="ada", share_units=50)):
        with pytest.raises(ControlRefused, match="with NVIDIA MPS the share of session ada is fixed"):
            await machine.agent.node.requests.answer(request)
    session = machine.agent.node.sessions["ada"]
    assert machine.agent.node.registry.tiers.largest_share(session) == 0


async def test_layers_and_gpus_that_cannot_be_are_refused(machine: Machine) -> None:
    with pytest.raises(ControlRefused, match="KAI Scheduler does not work on one machine"):
        await machine.open(request_for("ada", layer=LayerName.KAI))
    with pytest.raises(ControlRefused, match="a session can use only one of them"):
        await machine.open(mps("ada", share_units=100, gpus=(FIRST.uuid, SECOND.uuid)))


async def test_daemon_and_gpu_work_survive_an_agent_that_is_killed(tmp_path: Path, short_folder: Path) -> None:
    shutil.copy(STAND_IN, tmp_path)
    agent = AgentProcess(short_folder, gpus=1)
    program = None
    agent.environment["PATH"] = f"{tmp_path}:{agent.environment['PATH']}"
    try:
        await agent.start()
        (gpu,) = (await agent.client.report()).gpus
        opened = await agent.client.open(mps("ada", gpus=(gpu.uuid,)))
        pipes = Path(opened.environment["CUDA_MPS_PIPE_DIRECTORY"])
        before = pid_in(pipes)
        assert before is not None
        program = subprocess.Popen(
            [sys.executable, "-m", "tests.agent.cuda_program"],
            env={**os.environ, **opened.environment},
            stdout=subprocess.DEVNULL,
        )
        while (working := present((await agent.client.report()).session("ada"))).gpu_seconds == 0:
            assert program.poll() is None
            await asyncio.sleep(0.05)
        assert working.memory_bytes >= 4 << 20
        agent.end(signal.SIGKILL)
        os.kill(before, 0)
        await agent.start()
        session = (await agent.client.report()).session("ada")
        assert session is not None
        assert session.layer is LayerName.MPS
        assert session.layer_trouble is None
        assert pid_in(pipes) == before
        assert len((pipes / "starts").read_text().splitlines()) == 1
        while present((await agent.client.report()).session("ada")).gpu_seconds <= session.gpu_seconds:
            assert program.poll() is None
            await asyncio.sleep(0.05)
        await agent.client.close("ada")
    finally:
        if program is not None:
            program.kill()
            program.wait()
        if agent.process is not None and agent.process.poll() is None:
            agent.end()
        end_daemons(short_folder / "state")
