"""An agent and CUDA programs on MIG instances of a simulated GPU, as processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gpushare_spawner.model.control import OpenRequest
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import GpuReport, SessionReport
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import request_for
from tests.present import present

MIB = 2**20


@pytest.fixture
async def agent(short_folder: Path) -> AsyncIterator[AgentProcess]:
    """On a GPU with two instances, and a whole one."""
    made = AgentProcess(short_folder, gpus=2)
    made.environment |= {"SIMGPU_MEMORY": "80GiB", "SIMGPU_MIG": "0:1g.10gb,3g.40gb"}
    await made.start()
    yield made
    if made.process is not None and made.process.poll() is None:
        made.end()


def mig(id: str, gpu: GpuReport) -> OpenRequest:
    return request_for(
        id, layer=LayerName.MIG, share_units=10, gpus=(gpu.uuid,), memory_limit="100%", oversubscribe=False
    )


async def session_when(
    agent: AgentProcess, id: str, holds: Callable[[SessionReport], bool], within: float = 20.0
) -> SessionReport:
    end = time.monotonic() + within
    while True:
        found = present((await agent.client.report()).session(id))
        if holds(found):
            return found
        assert time.monotonic() < end, found
        await asyncio.sleep(0.05)


async def test_program_on_an_instance_is_seen_and_goes_on_while_the_agent_is_killed(agent: AgentProcess) -> None:
    large, small, whole = (await agent.client.report()).gpus
    assert (whole.mig, whole.index, large.index, small.index) == (None, 1, 0, 0)
    assert [(one.memory_bytes // MIB, one.capacity_units) for one in (small, large)] == [(9728, 14), (40448, 42)]
    assert [present(one.mig).profile.memory_slices for one in (small, large)] == [1, 4]
    opened = await agent.client.open(mig("ada", small))
    assert opened.environment["CUDA_VISIBLE_DEVICES"] == small.uuid
    log = agent.folder / "program.log"
    with log.open("wb") as output:
        program = subprocess.Popen(
            [sys.executable, "-m", "tests.agent.cuda_program"],
            env={**os.environ, **opened.environment},
            stdout=output,
            stderr=output,
        )
    try:
        worked = await session_when(agent, "ada", lambda one: one.gpu_seconds > 0 and one.memory_bytes > 0)
        assert (worked.memory_bytes, worked.memory_limit_bytes) == (4 * MIB, small.memory_bytes)
        agent.end(signal.SIGKILL)
        await agent.start()
        again = await session_when(
            agent, "ada", lambda one: one.gpu_seconds > worked.gpu_seconds and one.processes == 1
        )
        assert (again.gpus, again.layer, again.layer_trouble) == ((small.uuid,), LayerName.MIG, None)
        assert again.bypassing_pids == ()
        assert program.poll() is None, log.read_text()
    finally:
        program.kill()
        program.wait()


@pytest.mark.slow
async def test_program_that_names_the_instance_of_others_is_reported(agent: AgentProcess) -> None:
    """Its frames name the GPU of both instances, so only the driver tells which of them it has."""
    large, small, _ = (await agent.client.report()).gpus
    opened = await agent.client.open(mig("mallory", small))
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.agent.cuda_program"],
        env={**os.environ, **opened.environment, "CUDA_VISIBLE_DEVICES": large.uuid},
        stdout=subprocess.DEVNULL,
    )
    try:
        found = await session_when(agent, "mallory", lambda one: bool(one.bypassing_pids))
        assert (found.bypassing_pids, found.processes) == ((program.pid,), 1)
    finally:
        program.kill()
        program.wait()
