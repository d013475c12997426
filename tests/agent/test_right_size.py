"""The right size of a share on a simulated GPU: real processes with the library, a real agent, and a share that is
changed while its neighbours go on."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpushare_spawner.arbiter.right_size import PREDICTION_ERROR, RecordedSession, Recording, waits
from gpushare_spawner.model.control import ResizeRequest
from gpushare_spawner.model.report import Burst
from gpushare_spawner.sharing.native import merged
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import request_for
from tests.native.preload_clients import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PLAN = """
import json, os, time
size = int(os.environ["GPUSHARE_TEST_MIB"]) * MIB
plan = json.loads(os.environ["GPUSHARE_TEST_PLAN"])
d = Driver()
arena = d.alloc(size)
say("ready")
hear()
again = True
while again:
    for pause, seconds in plan["steps"]:
        time.sleep(pause)
        for _ in range(round(seconds / 0.1)):
            for _ in range(5):
                d.launch(d.kernel("touch"), c.c_uint64(arena), c.c_uint64(size), c.c_uint64(20_000_000))
            d.synchronize()
    again = plan["again"]
say("done")
"""
"""Pauses and GPU seconds, in kernels of 20 ms."""
Steps = list[tuple[float, float]]


def cells(seed: str, count: int = 24) -> Steps:
    chance = random.Random(seed)
    return [(1.2 + chance.expovariate(1.0), 0.3 + chance.expovariate(1.0)) for _ in range(count)]


def training(seed: str, count: int = 6) -> Steps:
    """Three epochs with short pauses, then a longer one."""
    chance = random.Random(seed)
    return [(0.3 if number % 3 else 2.0, 1.0 + chance.random()) for number in range(3 * count)]


KINDS: dict[str, tuple[Steps, int]] = {
    "cells": (cells("own"), 64),
    "training": (training("own"), 64),
    "more memory than the GPU has": (cells("own"), 450),
}
"""What the session does, and the MiB that each session uses of the GPU's 1024."""


class Stage:
    """An agent with sessions that work, and their bursts."""

    def __init__(self, folder: Path) -> None:
        self.agent = AgentProcess(folder, gpus=1)
        self.agent.environment["SIMGPU_MEMORY"] = "1GiB"
        self.bursts: dict[str, list[Burst]] = {}
        self._programs: list[Client] = []
        self._environments: dict[str, dict[str, str]] = {}

    async def open(self, name: str, units: int) -> None:
        gpu = (await self.agent.client.report()).gpus[0].uuid
        opened = await self.agent.client.open(request_for(name, gpus=(gpu,), share_units=units))
        self._environments[name], self.bursts[name] = opened.environment, []

    def run(self, name: str, steps: Steps, mib: int, again: bool) -> Client:
        values = {"GPUSHARE_TEST_MIB": str(mib), "GPUSHARE_TEST_PLAN": json.dumps({"steps": steps, "again": again})}
        program = Client(PLAN, merged(os.environ, self._environments[name]) | values)
        self._programs.append(program)
        assert program.hear() == "ready"
        program.say("go")
        return program

    async def record(self, program: Client) -> None:
        """Collect the sessions' bursts until a program is done."""
        done = asyncio.get_running_loop().run_in_executor(None, program.hear)
        ends_at = time.monotonic() + 3.0
        while not done.done() or time.monotonic() < ends_at:
            if not done.done():
                ends_at = time.monotonic() + 3.0
            for session in (await self.agent.client.report()).sessions:
                seen = self.bursts[session.id]
                seen += [burst for burst in session.bursts if not seen or burst.ended_at > seen[-1].ended_at]
            await asyncio.sleep(1.0)

    def close(self) -> None:
        for program in self._programs:
            program.process.kill()
            program.process.communicate()
        if self.agent.process is not None and self.agent.process.poll() is None:
            self.agent.end(signal.SIGKILL)


@pytest.fixture
async def stage(short_folder: Path) -> AsyncIterator[Stage]:
    stage = Stage(short_folder)
    await stage.agent.start()
    yield stage
    stage.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_replay_predicts_the_waits_with_a_smaller_share_that_is_then_given(stage: Stage, kind: str) -> None:
    steps, mib = KINDS[kind]
    units = {"own": 50, "bob": 25, "cyd": 25}
    for name, share in units.items():
        await stage.open(name, share)
    stage.run("bob", training("bob"), mib, again=True)
    stage.run("cyd", cells("cyd"), mib, again=True)
    await stage.record(stage.run("own", steps, mib, again=False))
    gpu = (await stage.agent.client.report()).gpus[0]
    own, *others = (RecordedSession(units[name], tuple(bursts)) for name, bursts in stage.bursts.items())
    recording = Recording(gpu.memory_bytes, own, tuple(others))
    count, recorded = len(own.bursts), sum(burst.waited_seconds for burst in own.bursts)
    predicted, same = waits(recording, 25), waits(recording, 50)
    await stage.agent.client.send(ResizeRequest(id="own", share_units=25, reason="a test"))
    await stage.record(stage.run("own", steps, mib, again=False))
    after = stage.bursts["own"][count:]
    happened = sum(burst.waited_seconds for burst in after)
    assert predicted is not None
    assert same is not None
    figures = (
        f"{count} bursts, {len(after)} then; waits in seconds: recorded {recorded:.1f}, replayed {sum(same):.1f}, "
    )
    figures += f"predicted {sum(predicted):.1f}, happened {happened:.1f}"
    print(figures)
    assert len(after) == pytest.approx(count, abs=2), figures
    assert happened > 1.1 * recorded, figures
    assert sum(predicted) == pytest.approx(happened, rel=PREDICTION_ERROR), figures
