"""Jobs that reserve most of a GPU and touch little of it: real agent, real library, and what the driver moved."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
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
reserved, touched = (int(os.environ["GPUSHARE_TEST_" + name]) for name in ("RESERVED", "TOUCHED"))    # MiB
arena = d.alloc(reserved * MIB)          # most of the GPU, as JAX does
at = arena + (reserved - touched) // 2 * MIB
asked = threading.Event()
threading.Thread(target=lambda: [asked.set() for _ in iter(hear, None)], daemon=True).start()
say("ready")
asked.wait()
asked.clear()
d.fill(at, touched * MIB // 4, 7)
rounds = 0
while True:
    place = at + rounds % touched * MIB
    d.fill(place, MIB // 4, rounds)    # far from using the GPU up: nobody is held back for it
    d.synchronize()
    rounds += 1
    time.sleep(0.02)
    if asked.is_set():
        asked.clear()
        say([rounds, stats(), int.from_bytes(d.read(place, 4), "little")])
"""
WHOLE = """
d = Driver()
arena = d.alloc(768 * MIB)
say("ready")
hear()
while True:
    d.launch(d.kernel("touch"), c.c_uint64(arena), c.c_uint64(768 * MIB), c.c_uint64(10_000_000))
    d.synchronize()
"""
WATCH = """
from tests.native.simgpu_program import stats
d = Driver()
say("ready")
for _ in iter(hear, None):
    say(stats())
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


@pytest.fixture
def jobs() -> Iterator[list[Client]]:
    started: list[Client] = []
    yield started
    for job in started:
        job.process.kill()
        job.process.communicate()


async def started(agent: AgentProcess, count: int, reserved: int, apart: float = 0.0, job: str = JOB) -> list[Client]:
    """Jobs of one session each, ready; the program waits for `go`."""
    gpu = (await agent.client.report()).gpus[0].uuid
    jobs = []
    for name in ("ada", "bob", "cyd")[:count]:
        opened = await agent.client.open(request_for(name, gpus=(gpu,), share_units=100 // count))
        values = {"GPUSHARE_TEST_RESERVED": str(reserved), "GPUSHARE_TEST_TOUCHED": "64"}
        jobs.append(Client(job, merged(os.environ, opened.environment) | values))
        assert jobs[-1].hear() == "ready"
        if apart:
            jobs[-1].say("go")
            await asyncio.sleep(apart)
    if not apart:
        for one in jobs:
            one.say("go")
    return jobs


def ask(jobs: list[Client]) -> list[Any]:
    """Rounds and stats of each job; raises AssertionError where one reads what it did not write."""
    for job in jobs:
        job.say("how far?")
    answers = [job.hear() for job in jobs]
    for rounds, _, value in answers:
        assert value == rounds - 1
    return [(rounds, stats) for rounds, stats, _ in answers]


def moved(before: dict[str, int], after: dict[str, int]) -> int:
    return sum(after[name] - before[name] for name in MOVES)


@pytest.mark.parametrize(
    ("count", "reserved", "apart"), [(2, 768, 0.0), (2, 768, 0.3), (3, 920, 0.0)], ids=["at once", "apart", "three"]
)
async def test_jobs_that_reserve_most_of_the_gpu_and_touch_little_run_together(
    agent: AgentProcess, jobs: list[Client], count: int, reserved: int, apart: float
) -> None:
    jobs += await started(agent, count, reserved, apart)
    await asyncio.sleep(0.3)
    before = await asyncio.to_thread(ask, jobs)
    await asyncio.sleep(1.2)
    after = await asyncio.to_thread(ask, jobs)
    for (rounds, _), (later, _) in zip(before, after, strict=True):
        assert later - rounds > 20, "they run side by side"
    stats = after[-1][1]
    assert moved(before[-1][1], stats) == 0, stats
    assert sum(stats[name] for name in MOVES) <= 64 * MIB, stats
    assert stats["first_touched"] <= (count + 1) * 64 * MIB, "memory that nobody touched got no pages"


async def test_jobs_that_touch_all_that_they_reserved_take_turns_within_a_second(
    agent: AgentProcess, jobs: list[Client]
) -> None:
    """Once the driver has shown a full GPU, nothing is moved fault by fault any more, and the GPU works."""
    jobs += await started(agent, 2, 768, job=WHOLE)
    jobs.append(Client(WATCH, os.environ | agent.environment | {"GPUSHARE_DISABLE": "1"}))
    assert jobs[-1].hear() == "ready"

    async def look() -> dict[str, int]:
        jobs[-1].say("what moved?")
        stats = await asyncio.to_thread(jobs[-1].hear)
        assert isinstance(stats, dict)
        return stats

    await asyncio.sleep(1.0)
    before = await look()
    await asyncio.sleep(1.0)
    after = await look()
    assert after["kernels"] - before["kernels"] > 20
    assert after["faulted_in"] - before["faulted_in"] < 64 * MIB, (before, after)
