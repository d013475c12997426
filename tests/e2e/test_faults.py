"""Parts of the system die, one after the other; no notebook dies of it, and nothing of what it computed is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest

from gpushare_spawner.model.share import Tier
from tests.e2e import gpu_cells
from tests.e2e.kernel import CellFailed, Kernel
from tests.e2e.running_stack import RunningStack, session_when

# what dies here dies in quicker tests too, one part at a time: test_agent_process, test_mixin_faults, test_notices_end
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

HALF = """
name: half-gpu
display_name: 0.50 GPU
gpu: {fraction: 0.5}
idle: {downgrade_after: DOWN, downgrade_to: 0.10, release_after: 2h, warn_before: 3s, min_use: 0}
"""
# nobody may be idle but in the one test about it
PATIENT = HALF.replace("DOWN", "1h")
QUICK = HALF.replace("DOWN", "6s")
GPU = {"SIMGPU_DEVICES": "1", "SIMGPU_MEMORY": "96MiB", "SIMGPU_MODEL": "Simulated GPU 96 MiB"}
USERS = ("erin", "frank")
# each works on 64 MiB of a GPU of 96 MiB: one at a time, with a hand-off between them
BUSY = """
deadline = time.monotonic() + {seconds}
rounds = 0
while time.monotonic() < deadline:
    add(buffer, count, 1)
    expected += np.uint32(1)
    spin(0.02)
    rounds += 1
print(rounds)
"""
FORK = """
import os
child = os.fork()
if child == 0:
    # what a data loader's worker is: it never touches the GPU
    os._exit(sum(range(1000)) % 7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def stack(start_stack: Callable[..., RunningStack]) -> RunningStack:
    return start_stack({"half.yaml": PATIENT}, GPU)


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    """The users' kernels, kept from one test to the next."""
    return {}


async def all_intact(kernels: dict[str, Kernel]) -> None:
    for user, kernel in kernels.items():
        assert await kernel.run(gpu_cells.READ_BUFFER) == "intact", user


async def until_connected(stack: RunningStack, users: tuple[str, ...] = USERS) -> None:
    for user in users:
        await session_when(stack, user, lambda session: session.confirmed and session.processes >= 1)


async def test_two_users_work_on_more_memory_than_the_gpu_has(stack: RunningStack, kernels: dict[str, Kernel]) -> None:
    await asyncio.gather(*(stack.hub.start(user, "half-gpu") for user in USERS))
    for seed, user in enumerate(USERS):
        kernels[user] = await stack.hub.kernel(user)
        await kernels[user].run(gpu_cells.SETUP)
        assert await kernels[user].run(gpu_cells.WRITE_BUFFER.format(mebibytes=64, seed=seed)) == "written"
    rounds = await asyncio.gather(*(kernel.run(BUSY.format(seconds=2)) for kernel in kernels.values()))
    assert all(int(number) > 0 for number in rounds)
    await all_intact(kernels)
    report = await stack.agent.report()
    assert sum(session.memory_bytes for session in report.sessions) > report.gpus[0].memory_bytes


async def test_the_agent_is_killed_under_load_and_comes_back(stack: RunningStack, kernels: dict[str, Kernel]) -> None:
    before = {session.id: session for session in (await stack.agent.report()).sessions}
    cells = {user: await kernel.send(BUSY.format(seconds=6)) for user, kernel in kernels.items()}
    await asyncio.sleep(1)
    stack.kill_agent()
    await asyncio.sleep(1)
    stack.start_agent()
    for user, kernel in kernels.items():
        assert int(await kernel.result(cells[user])) > 0
    await all_intact(kernels)
    await until_connected(stack)
    after = {session.id: session for session in (await stack.agent.report()).sessions}
    assert {name: (s.pid, s.share_units, s.gpus) for name, s in after.items()} == {
        name: (s.pid, s.share_units, s.gpus) for name, s in before.items()
    }


async def test_cells_run_while_there_is_no_agent(stack: RunningStack, kernels: dict[str, Kernel]) -> None:
    stack.kill_agent()
    for kernel in kernels.values():
        assert await kernel.run(gpu_cells.WORK_ON_BUFFER) == "worked"
    await all_intact(kernels)
    stack.start_agent()
    for kernel in kernels.values():
        assert await kernel.run(gpu_cells.WORK_ON_BUFFER) == "worked"
    await until_connected(stack)


async def test_the_hub_is_killed_and_comes_back(stack: RunningStack, kernels: dict[str, Kernel]) -> None:
    before = {session.id: session for session in (await stack.agent.report()).sessions}
    stack.kill_hub()
    # what the hub had started stays behind, as after any crash; the notebooks go on
    for kernel in kernels.values():
        assert await kernel.run(gpu_cells.WORK_ON_BUFFER) == "worked"
    stack.start_hub()
    for user in USERS:
        await stack.hub.until_ready(user)
    after = {session.id: session for session in (await stack.agent.report()).sessions}
    assert {name: (s.pid, s.share_units) for name, s in after.items()} == {
        name: (s.pid, s.share_units) for name, s in before.items()
    }
    for user in USERS:
        kernels[user].close()
        path = f"/user/{user}/api/kernels"
        listed = await stack.hub.call("GET", path)
        assert len(listed) == 1, "the same kernel"
        kernels[user] = await Kernel.connect(stack.hub.url, f"{path}/{listed[0]['id']}", stack.hub.token)
    await all_intact(kernels)


async def test_the_full_gpu_is_still_full_for_the_hub_that_came_back(stack: RunningStack) -> None:
    await stack.hub.add_user("grace")
    await stack.hub.request_start("grace", "half-gpu")
    await asyncio.sleep(1.5)
    waiting = await stack.hub.server("grace")
    assert waiting is None or not waiting["ready"]
    report = await stack.agent.report()
    assert sum(session.guaranteed_units for session in report.sessions) <= 100
    await stack.hub.stop("grace")
    assert (await stack.agent.report()).session("grace") is None


async def test_the_service_is_killed_and_goes_on_where_it_was(stack: RunningStack, kernels: dict[str, Kernel]) -> None:
    for kernel in kernels.values():
        await kernel.run(gpu_cells.WORK_ON_BUFFER)
    await session_when(stack, "erin", lambda session: session.tier is Tier.ACTIVE)
    (stack.folder.templates / "half.yaml").write_text(QUICK)
    await session_when(stack, "erin", lambda session: session.notice is not None)
    old = stack.service_pid()
    assert old is not None
    os.kill(old, signal.SIGKILL)
    # between its decision and its action; the hub starts its service again, and the action comes all the same
    await session_when(stack, "erin", lambda session: session.tier is Tier.DOWNGRADED, within=45)
    (stack.folder.templates / "half.yaml").write_text(PATIENT)
    new = stack.service_pid()
    assert new is not None
    assert new != old
    assert await kernels["erin"].run(gpu_cells.WORK_ON_BUFFER) == "worked"
    await session_when(stack, "erin", lambda session: session.tier is Tier.ACTIVE)


async def test_a_kernel_forks(stack: RunningStack, kernels: dict[str, Kernel]) -> None:
    for kernel in kernels.values():
        assert await kernel.run(FORK) == str(sum(range(1000)) % 7)
        assert await kernel.run(gpu_cells.WORK_ON_BUFFER) == "worked"
    await all_intact(kernels)


async def test_a_kernel_is_killed_inside_a_burst_and_its_neighbour_goes_on(
    stack: RunningStack, kernels: dict[str, Kernel]
) -> None:
    victim = kernels.pop("frank")
    pid = int(await victim.run("print(os.getpid())"))
    cell = await victim.send("while True: spin(0.2)")
    other = await kernels["erin"].send(BUSY.format(seconds=3))
    await asyncio.sleep(1)
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    assert int(await kernels["erin"].result(other)) > 0
    assert time.monotonic() - started < 30
    await all_intact(kernels)
    with pytest.raises((CellFailed, TimeoutError)):
        await victim.result(cell, timeout=10)
    victim.close()
    frank = await session_when(stack, "frank", lambda session: session.processes == 0 and session.memory_bytes == 0)
    assert frank.confirmed, "the server lives, and has its share"
    fresh = await stack.hub.kernel("frank")
    await fresh.run(gpu_cells.SETUP)
    assert await fresh.run(gpu_cells.WRITE_BUFFER.format(mebibytes=16, seed=9)) == "written"
    assert await fresh.run(gpu_cells.READ_BUFFER) == "intact"
    fresh.close()


async def test_in_the_end_nothing_is_left(stack: RunningStack) -> None:
    await asyncio.gather(*(stack.hub.stop(user) for user in USERS))
    deadline = time.monotonic() + 15
    while (report := await stack.agent.report()).sessions:
        assert time.monotonic() < deadline, report.sessions
        await asyncio.sleep(0.2)
