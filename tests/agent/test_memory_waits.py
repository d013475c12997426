"""Programs of engine `suspend` that wait for device memory, with a real agent, real processes and simulated GPUs.

Each wait ends: with the memory, with the driver's error, or with an interrupt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.agent.test_suspend import Machine, Program

SHOULD_END_WITHIN = 20.0
"""Seconds. No memory can come free in these tests, so no wait has a reason to last; a loaded machine has some."""


@pytest.fixture
async def small(short_folder: Path) -> AsyncIterator[Machine]:
    """A GPU of 512 MiB."""
    machine = Machine(short_folder)
    machine.agent.environment |= {"SIMGPU_MEMORY": "512MiB"}
    await machine.start()
    yield machine
    machine.end()


async def refused_while_another_works(holder: Program, other: Program, mib: int) -> None:
    """The allocation ends with the driver's error, whatever the other session does meanwhile."""
    began = time.monotonic()
    other.begin("allocate", 9, mib)
    await holder.ask("work", 0.5)
    await asyncio.sleep(0.2)
    await holder.ask("work", 0.2)
    assert "OUT_OF_MEMORY" in str(await other.answer(SHOULD_END_WITHIN))
    assert time.monotonic() - began < SHOULD_END_WITHIN


@pytest.mark.slow
async def test_allocation_beside_a_session_that_cannot_be_suspended_ends_with_the_drivers_error(small: Machine) -> None:
    ada = await small.program("ada", 300)
    await ada.does("managed", 1)
    ben = await small.program("ben")
    for _ in range(3):
        await refused_while_another_works(ada, ben, 300)
        assert not (await small.session("ben")).suspended
    await ben.does("allocate", 10, 50)  # what fits it gets
    rounds = await ben.ask("work", 0.05)
    assert await ben.ask("words") == [[0, rounds, 0]]
