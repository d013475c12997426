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
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.share import Tier
from tests.agent.mps.test_daemons import STAND_IN, end_daemons, mps
from tests.present import present
from tests.service.fake_hub import FakeHub
from tests.service.over_processes import OverProcesses

STOP_AFTER = 2.0
TEMPLATE = f"""
name: quarter-gpu
display_name: 0.25 GPU
gpu: {{fraction: 0.25, layer: mps}}
idle: {{stop_after: {STOP_AFTER}s, warn_before: 1s}}
"""


class Stage(OverProcesses):
    """An MPS session of ann, whose notebook server has been idle for an hour by the hub."""

    def __init__(self, folder: Path, hub: FakeHub) -> None:
        super().__init__(folder, hub, TEMPLATE)
        shutil.copy(STAND_IN, folder)
        self.agent.environment["PATH"] = f"{folder}:{self.agent.environment['PATH']}"
        self._program: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        await super().start()
        environment = await self.open(lambda gpu: mps("ann", gpus=(gpu,)))
        with (self.folder / "program.log").open("wb") as log:
            # it works on the GPU for ever, as a kernel would start it
            self._program = subprocess.Popen(
                [sys.executable, "-m", "tests.agent.cuda_program"],
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
            )

    def kill_program(self) -> None:
        if self._program is not None:
            self._program.kill()
            self._program.wait()

    def close(self) -> None:
        self.kill_program()
        super().close()
        end_daemons(self.folder / "state")


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
    working = await stage.until(lambda session: session.gpu_seconds > 0)
    assert (working.layer, working.tier, working.processes) == (LayerName.MPS, Tier.ACTIVE, 1)
    assert working.memory_bytes >= 4 << 20
    assert working.kernels is None
    stage.start_service("--cull-every=0.5s")
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

    stage.kill_program()
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
