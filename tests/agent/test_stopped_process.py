"""A process of a session is stopped (Ctrl-Z, SIGSTOP, a debugger) in the middle of its GPU work: the others go on. A
real agent, real programs under the library, simulated GPUs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpushare_spawner.sharing.native import merged
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import request_for
from tests.native.session_program import Program

pytestmark = pytest.mark.slow
GIVEN_ON_WITHIN = 4.0
"""Seconds after which the arbiter takes a revoked client to answer no more (docs/explanation/arbiter.md)."""
WORK = 2.0
"""Seconds that the others work."""


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.end()


@pytest.mark.parametrize("mib", [100, 700], ids=["fits together", "does not fit"])
async def test_others_work_on_while_a_process_that_holds_a_lease_is_stopped(
    short_folder: Path, programs: list[Program], mib: int
) -> None:
    agent = AgentProcess(short_folder, gpus=1)
    agent.environment |= {"SIMGPU_MEMORY": "1GiB"}
    await agent.start("--host-memory", "off")
    try:
        gpu = (await agent.client.report()).gpus[0].uuid
        for name in ("ada", "bob"):
            opened = await agent.client.open(request_for(name, gpus=(gpu,), share_units=50))
            await agent.client.confirm(name, os.getpid())
            programs.append(Program(merged(os.environ, opened.environment), mib))
        ada, bob = programs
        ada.spin(60.0)
        time.sleep(0.5)
        os.kill(ada.pid, signal.SIGSTOP)
        before = time.monotonic()
        bob.spin(WORK)
        _, kernels = bob.hear()
        assert time.monotonic() - before < GIVEN_ON_WITHIN + 2 * WORK
        assert kernels > 20
        # and from then on nobody waits for it
        before = time.monotonic()
        bob.spin(WORK)
        _, kernels = bob.hear()
        assert time.monotonic() - before < 2 * WORK
        assert kernels > 0.5 * WORK / 0.01, "kernels of 10 ms"
        os.kill(ada.pid, signal.SIGCONT)
        worked = (await agent.client.report()).session("ada")
        assert worked is not None
        deadline = time.monotonic() + 15
        now = worked
        while now.gpu_seconds < worked.gpu_seconds + 0.2:
            assert time.monotonic() < deadline, "it goes on"
            await asyncio.sleep(0.05)
            now = (await agent.client.report()).session("ada") or now
    finally:
        for program in programs:
            os.kill(program.pid, signal.SIGCONT)
        agent.end(signal.SIGKILL)
