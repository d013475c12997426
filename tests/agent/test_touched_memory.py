"""Jobs that reserve most of a GPU and touch little of it: real agent, real library, and what the driver moved."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.sharing.native import merged
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import request_for
from tests.native.preload_clients import Client

MIB = 2**20

JOB = """
from tests.native.simgpu_program import stats
d = Driver()
arena = d.alloc(768 * MIB)          # 75 % of the GPU, as JAX does
at = arena + 256 * MIB
asked = threading.Event()
threading.Thread(target=lambda: [asked.set() for _ in iter(hear, None)], daemon=True).start()
say("ready")
d.fill(at, 64 * MIB // 4, 7)
rounds = 0
while True:
    place = at + rounds % 64 * MIB
    d.fill(place, MIB // 4, rounds)    # far from using the GPU up: nobody is held back for it
    d.synchronize()
    rounds += 1
    time.sleep(0.02)
    if asked.is_set():
        asked.clear()
        say([rounds, stats(), int.from_bytes(d.read(place, 4), "little")])
"""
MOVES = ("faulted_in", "fault_evicted", "prefetched_in", "prefetched_out", "prefetch_evicted")


@pytest.fixture
async def agent(short_folder: Path) -> AsyncIterator[AgentProcess]:
    agent = AgentProcess(short_folder)
    agent.environment["SIMGPU_MEMORY"] = "1GiB"
    await agent.start()
    yield agent
    if agent.process is not None and agent.process.poll() is None:
        agent.end(signal.SIGKILL)


async def test_two_jobs_that_reserve_most_of_the_gpu_and_touch_little_run_together(agent: AgentProcess) -> None:
    """The second one starts when the driver has shown what the first one uses: nothing has to move at all."""
    gpu = (await agent.client.report()).gpus[0].uuid
    jobs = []
    try:
        for name in ("ada", "bob"):
            opened = await agent.client.open(request_for(name, gpus=(gpu,), share_units=50))
            jobs.append(Client(JOB, merged(os.environ, opened.environment)))
            assert jobs[-1].hear() == "ready"
            await asyncio.sleep(3.5)  # the agent looks every 2 s, and believes what it sees after a second of work

        def ask() -> list[list[Any]]:
            for job in jobs:
                job.say("how far?")
            return [job.hear() for job in jobs]

        before = await asyncio.to_thread(ask)
        await asyncio.sleep(1.5)
        after = await asyncio.to_thread(ask)
        for (rounds, _, _), (later, _, value) in zip(before, after, strict=True):
            assert later - rounds > 20, "they run side by side"
            assert value == later - 1
        moved = {name: after[-1][1][name] - before[-1][1][name] for name in MOVES}
        assert sum(moved.values()) == 0, moved
        assert sum(after[-1][1][name] for name in MOVES) <= 64 * MIB, after[-1][1]
        assert after[-1][1]["first_touched"] <= 3 * 64 * MIB, "memory that nobody touched got no pages"
    finally:
        for job in jobs:
            job.process.kill()
            job.process.communicate()
