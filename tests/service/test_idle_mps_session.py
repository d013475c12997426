"""An MPS session over real processes: the culler stops its server when its GPU programs are idle, and not before.

An agent on a simulated GPU with a stand-in of NVIDIA's MPS program, a service, and a CUDA program. By hub and
kernels its server is idle.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.tier import Tier
from tests.agent.agent_process import AgentProcess
from tests.agent.mps.test_daemons import STAND_IN, end_daemons, mps
from tests.present import present
from tests.service.fake_hub import TOKEN, FakeHub

STOP_AFTER = 2.0
TEMPLATE = f"""
name: quarter-gpu
display_name: 0.25 GPU
gpu: {{fraction: 0.25, layer: mps}}
idle: {{stop_after: {STOP_AFTER}s, warn_before: 1s}}
"""


class Stage:
    """One MPS session of ann, whose notebook server has been idle for an hour by the hub."""

    def __init__(self, folder: Path, hub: FakeHub) -> None:
        shutil.copy(STAND_IN, folder)
        (folder / "templates").mkdir()
        (folder / "templates" / "quarter-gpu.yaml").write_text(TEMPLATE)
        self.agent = AgentProcess(folder, gpus=1)
        self.agent.environment["PATH"] = f"{folder}:{self.agent.environment['PATH']}"
        self.hub = hub
        self.environment: dict[str, str] = {}
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    async def start(self) -> None:
        await self.agent.start()
        (gpu,) = (await self.agent.client.report()).gpus
        opened = await self.agent.client.open(mps("ann", gpus=(gpu.uuid,)))
        self.environment = {**os.environ, **opened.environment}
        await self.agent.client.confirm("ann", os.getpid())

    def run(self, *arguments: str, log: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self._folder / log).open("ab") as output:
            started = subprocess.Popen(
                [sys.executable, "-m", *arguments], env=environment, stdout=output, stderr=output
            )
        self._started.append(started)
        return started

    def program(self) -> subprocess.Popen[bytes]:
        """A program that works on the GPU for ever, as a kernel would start it."""
        return self.run("tests.agent.cuda_program", log="program.log", environment=self.environment)

    def service(self) -> None:
        self.run(
            "gpushare_spawner.cli", "service", f"--templates-dir={self._folder}/templates",
            f"--control-socket={self.agent.client.socket}", "--history=false", "--cull-every=0.5s",
            log="service.log",
            environment={**os.environ, "JUPYTERHUB_API_URL": self.hub.url, "JUPYTERHUB_API_TOKEN": TOKEN},
        )  # fmt: skip

    async def session(self) -> SessionReport:
        return present((await self.agent.client.report()).session("ann"))

    async def until(self, holds: Callable[[SessionReport], bool], seconds: float = 30) -> SessionReport:
        end = time.monotonic() + seconds
        while not holds(session := await self.session()):
            assert time.monotonic() < end, session
            await asyncio.sleep(0.02)
        return session

    def close(self) -> None:
        for one in self._started:
            one.kill()
            one.wait()
        self.agent.end(signal.SIGKILL)
        end_daemons(self._folder / "state")


@pytest.fixture
async def stage(hub_server: FakeHub) -> AsyncIterator[Stage]:
    folder = Path(tempfile.mkdtemp(prefix="gs"))
    hub_server.add("ann", last_activity=time.time() - 3600)
    stage = Stage(folder, hub_server)
    await stage.start()
    yield stage
    stage.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
async def test_server_is_stopped_when_its_gpu_is_idle_and_not_before(stage: Stage) -> None:
    program = stage.program()
    working = await stage.until(lambda session: session.gpu_seconds > 0)
    assert (working.layer, working.tier, working.processes) == (LayerName.MPS, Tier.ACTIVE, 1)
    assert working.memory_bytes >= 4 << 20
    assert working.kernels is None
    stage.service()
    # an agent that was killed learns of the work again
    stage.agent.end(signal.SIGKILL)
    await stage.agent.start()
    await stage.until(lambda session: session.processes == 1)
    while not stage.hub.asked:
        await asyncio.sleep(0.05)
    end = time.monotonic() + STOP_AFTER
    while time.monotonic() < end:
        session = await stage.session()
        assert session.notice is None
        assert session.last_gpu_activity is None or time.time() - session.last_gpu_activity < STOP_AFTER / 2
        await asyncio.sleep(0.05)
    assert session.gpu_seconds > working.gpu_seconds
    assert not stage.hub.deleted

    program.send_signal(signal.SIGKILL)
    killed_at = time.time()
    told = await stage.until(lambda session: session.notice is not None)
    assert (present(told.notice).tier, told.gpu_busy, told.processes) == (Tier.STOPPED, False, 0)
    assert abs(present(told.last_gpu_activity) - killed_at) < 1
    while not stage.hub.deleted:
        assert time.time() < killed_at + 30
        assert (await stage.session()).tier is Tier.ACTIVE, "another layer's share is neither downgraded nor released"
        await asyncio.sleep(0.05)
    assert stage.hub.deleted == ["/users/ann/server"]
    assert time.time() - killed_at >= STOP_AFTER
