"""Engine `suspend` where the driver fails: processes in its failed state, calls that never return. Simulated driver."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpushare_spawner.model.frames import Kind
from gpushare_spawner.model.layers import MemoryEngine
from tests.agent.test_suspend import LARGE, MIB, Machine, Neighbour, neighbour

__all__ = ["neighbour"]

pytestmark = pytest.mark.slow

SECONDS = 3.0
"""After which the agent takes a call to hang, instead of 30 and 60."""
IMPATIENT = f"""
import sys
from gpushare_spawner.agent.suspend import checkpoints as checkpoints_module
from gpushare_spawner.cli import main
checkpoints_module.START_WITHIN = checkpoints_module.GIVE_UP = {SECONDS}
checkpoints_module.processes.stopped = lambda pid: False  # a stopped process stands for a driver that hangs
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
async def machine(short_folder: Path) -> AsyncIterator[Machine]:
    machine = Machine(short_folder)
    command = machine.agent.command
    machine.agent.command = lambda *options: [sys.executable, "-c", IMPATIENT, *command(*options)[3:]]  # type: ignore[method-assign]
    machine.agent.environment |= {"SIMGPU_RESTORE_MS": "2500"}
    await machine.start()
    yield machine
    machine.end()


async def test_process_in_the_failed_state_is_reported_until_it_ends_and_others_go_on(
    machine: Machine, neighbour: Neighbour
) -> None:
    await machine.program("ada")
    environment = machine.environments["ada"]
    without_library = {name: value for name, value in environment.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-m", "tests.agent.hiding_program", environment["GPUSHARE_SOCKET"], neighbour.gpu]
    hiding = subprocess.Popen(command, env=without_library, stdout=subprocess.PIPE, text=True)
    try:
        assert hiding.stdout is not None
        assert await asyncio.to_thread(hiding.stdout.readline) == "ready\n"
        neighbour.peer.send(Kind.REQUEST, 900 * MIB, 0, gpu=neighbour.gpu)
        report = await machine.until("ada", lambda session: session.not_suspendable is not None)
        assert f"restore process {hiding.pid} (FAILED): restart its kernel" in str(report.not_suspendable)
        assert f"process {hiding.pid} (FAILED)" in machine.log()
        assert (await neighbour.peer.until(Kind.GRANT, 15)).fields[0]  # what fits runs, what does not pages
        assert await machine.programs[0].ask("work", 0.05) > 0
    finally:
        hiding.kill()
        hiding.communicate()
    await machine.until("ada", lambda session: session.not_suspendable is None)


async def test_call_that_never_returns_is_reported_and_others_go_on(machine: Machine, neighbour: Neighbour) -> None:
    stuck, other = await machine.program("ada", 300), await machine.program("ada", 300)
    await neighbour.comes()
    await machine.suspended("ada")
    neighbour.goes()
    os.kill(stuck.process.pid, signal.SIGSTOP)
    other.begin("work", 0.05)
    report = await machine.until("ada", lambda session: session.not_suspendable is not None, 30)
    assert f"Process {stuck.process.pid} cannot be restored: the driver did not answer" in str(report.not_suspendable)
    await neighbour.comes()
    neighbour.goes()
    os.kill(stuck.process.pid, signal.SIGCONT)
    rounds = await other.answer(60)
    assert await other.ask("words") == [[0, rounds, 0]]
    assert await stuck.ask("words") == [[0, 0, 0]]
    assert (await machine.session("ada")).not_suspendable is None


async def test_allocation_beside_a_restore_waits_for_its_end_and_succeeds(
    machine: Machine, neighbour: Neighbour
) -> None:
    ada, cat = (
        await machine.program("ada", LARGE),
        await machine.program("cat", engine=MemoryEngine.MANAGED, oversubscribe=False),
    )
    await neighbour.comes()
    await machine.suspended("ada")
    neighbour.goes()
    ada.begin("work", 0.05)
    await asyncio.sleep(1.0)
    waited = await cat.ask("reserve", 200)
    rounds = await ada.answer()
    assert 0.5 < waited < 10
    assert await ada.ask("words") == [[0, rounds, 0]]
    assert (await machine.session("cat")).memory_limit_hits.count == 0
