"""The share of a running session changes, over real processes on the simulated GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpushare_spawner.model.control import ResizeRequest
from gpushare_spawner.sharing.native import merged
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import request_for
from tests.native.session_program import Program

GIB = 2**30
SECONDS = 2.0


@pytest.fixture
async def agent() -> AsyncIterator[AgentProcess]:
    # pytest's own folders are too long for the path of a socket
    with tempfile.TemporaryDirectory(prefix="size") as folder:
        agent = AgentProcess(Path(folder), gpus=1)
        await agent.start()
        yield agent
        agent.end(signal.SIGKILL)


def delivered(*programs: Program) -> list[int]:
    """Kernels of 10 ms that each program has run, all at the same time."""
    for program in programs:
        program.spin(SECONDS)
    return [program.hear()[1] for program in programs]


async def test_gpu_time_and_memory_follow_the_new_share_and_programs_go_on(agent: AgentProcess) -> None:
    gpu = (await agent.client.report()).gpus[0].uuid
    ada, bob = [
        Program(merged(os.environ, (await agent.client.open(request_for(name, gpus=(gpu,)))).environment))
        for name in ("ada", "bob")
    ]
    try:
        equal = delivered(ada, bob)
        # wide bounds: other programs keep the cores of a test machine busy
        assert 0.6 <= equal[0] / equal[1] <= 1.7, equal
        await agent.client.send(ResizeRequest(id="ada", share_units=75, memory_limit="5Gi", reason="a test"))
        # the same processes, with what they had; the arbiter evens out within the first round
        delivered(ada, bob)
        threefold = delivered(ada, bob)
        assert 2.0 <= threefold[0] / threefold[1] <= 4.5, threefold
        ada.spin(0)
        assert ada.hear()[0][1] == 5 * GIB, "CUDA shows the new limit at once"
        agent.end(signal.SIGKILL)
        await agent.start()
        restored = (await agent.client.report()).session("ada")
        assert restored is not None
        assert (restored.share_units, restored.guaranteed_units, restored.memory_limit_bytes) == (75, 75, 5 * GIB)
    finally:
        ada.end()
        bob.end()


async def test_limit_of_gpu_time_holds_alone_beside_others_and_over_a_restart(agent: AgentProcess) -> None:
    gpu = (await agent.client.report()).gpus[0].uuid
    limited = await agent.client.open(request_for("ada", gpus=(gpu,), time_limit_units=25))
    other = await agent.client.open(request_for("bob", gpus=(gpu,)))
    ada, bob = [Program(merged(os.environ, opened.environment)) for opened in (limited, other)]

    def parts(seconds: float, *programs: Program) -> list[float]:
        """Percentages of the GPU. A program that is at its limit ends later."""
        begun = time.monotonic()
        for program in programs:
            program.spin(seconds)
        counts = [program.hear()[1] for program in programs]
        return [count * 0.01 / (time.monotonic() - begun) * 100 for count in counts]

    try:
        beside = parts(3.0, ada, bob)
        assert beside[0] == pytest.approx(25, abs=7)
        assert beside[1] > 55, "the rest goes to the other session"
        status = subprocess.run(
            [sys.executable, "-m", "gpushare_spawner.cli", "status"],
            env=merged(os.environ, limited.environment),
            text=True,
            capture_output=True,
            check=True,
        )
        assert "at most 25 % of the GPU's time" in status.stdout
        agent.end(signal.SIGKILL)
        await agent.start()
        # the program runs without the agent until it has connected again
        parts(1.0, ada)
        assert parts(8.0, ada)[0] == pytest.approx(25, abs=4)
    finally:
        ada.end()
        bob.end()
