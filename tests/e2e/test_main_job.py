"""The main job over real processes: hub, proxy, agent, service, notebook servers, kernels, NVIDIA's bindings, preload.

One simulated GPU is full: carol holds 75 %, alice 25 %. While alice is idle she loses her share but not her kernel;
bob is placed on the units that she released; her next cell has them again, and her buffer is intact. The tests are the
steps of this story: each goes on where the one before it stopped.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

import pytest

from gpushare_spawner.demo.home import NOTEBOOK
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.tier import Tier
from tests.e2e import gpu_cells
from tests.e2e.kernel import Kernel
from tests.e2e.running_stack import RunningStack, session_when

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

QUARTER = """
name: quarter-gpu
display_name: 0.25 GPU
gpu: {fraction: 0.25}
idle: {downgrade_after: DOWN, downgrade_to: 0.10, release_after: AWAY, warn_before: 2s, min_use: 0}
"""
# nobody may be idle while servers start; later the admin edits the file
PATIENT = QUARTER.replace("DOWN", "1h").replace("AWAY", "2h")
QUICK = QUARTER.replace("DOWN", "4s").replace("AWAY", "7s")
THREE_QUARTERS = """
name: three-quarters
display_name: 0.75 GPU
gpu: {fraction: 0.75}
"""
HALF = """
name: half-gpu
display_name: 0.50 GPU
gpu: {fraction: 0.5}
"""
GPU = {"SIMGPU_DEVICES": "1", "SIMGPU_MEMORY": "96MiB", "SIMGPU_MODEL": "Simulated GPU 96 MiB"}
BUFFER = gpu_cells.WRITE_BUFFER.format(mebibytes=48, seed=1)


@pytest.fixture(scope="module")
def stack(start_stack: Callable[..., RunningStack]) -> RunningStack:
    return start_stack({"quarter.yaml": PATIENT, "three-quarters.yaml": THREE_QUARTERS, "half.yaml": HALF}, GPU)


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    """The users' kernels, kept from one step to the next."""
    return {}


def used_units(report: Report) -> int:
    return sum(session.guaranteed_units for session in report.sessions)


async def test_alice_gets_a_quarter_and_writes_a_buffer(stack: RunningStack, kernels: dict[str, Kernel]) -> None:
    await asyncio.gather(stack.hub.start("carol", "three-quarters"), stack.hub.start("alice", "quarter-gpu"))
    session = await session_when(stack, "alice", lambda session: session.confirmed)
    assert (session.share_units, session.tier, session.effective_units) == (25, Tier.ACTIVE, 25)
    assert used_units(await stack.agent.report()) == 100

    kernels["alice"] = alice = await stack.hub.kernel("alice")
    await alice.run(gpu_cells.SETUP)
    total = await alice.run("print(check(cuda.cuDeviceTotalMem(device)))")
    assert int(total) == 96 * 2**20
    assert await alice.run(BUFFER) == "written"
    assert await alice.run(gpu_cells.READ_BUFFER) == "intact"
    session = await session_when(stack, "alice", lambda session: session.processes == 1)
    assert session.memory_bytes >= 48 * 2**20
    assert session.last_gpu_activity is not None


async def test_while_idle_she_is_told_then_downgraded_then_released(stack: RunningStack) -> None:
    (stack.folder.templates / "quarter.yaml").write_text(QUICK)
    told = await session_when(stack, "alice", lambda session: session.notice is not None)
    assert told.notice is not None
    assert (told.tier, told.notice.tier) == (Tier.ACTIVE, Tier.DOWNGRADED)
    assert told.notice.at > time.time() - 1

    smaller = await session_when(stack, "alice", lambda session: session.tier is Tier.DOWNGRADED)
    assert (smaller.share_units, smaller.effective_units) == (25, 10)

    released = await session_when(stack, "alice", lambda session: session.tier is Tier.RELEASED)
    assert (released.share_units, released.effective_units, released.guaranteed_units) == (25, 0, 0)
    carol = await session_when(stack, "carol", lambda _: True)
    assert carol.tier is Tier.ACTIVE, "her template has no idle steps"


async def test_bob_is_placed_on_the_units_that_she_released(stack: RunningStack, kernels: dict[str, Kernel]) -> None:
    (stack.folder.templates / "quarter.yaml").write_text(PATIENT)
    await stack.hub.start("bob", "quarter-gpu")
    bob = await session_when(stack, "bob", lambda session: session.confirmed)
    alice = await session_when(stack, "alice", lambda _: True)
    assert bob.gpus == alice.gpus
    assert bob.borrowed_units == 25, "everything that is free on this GPU is lent by alice"
    assert bob.guaranteed_units == 25
    assert used_units(await stack.agent.report()) == 100

    kernels["bob"] = kernel = await stack.hub.kernel("bob")
    await kernel.run(gpu_cells.SETUP)
    # more than fits beside alice's buffer: hers must leave the GPU
    assert await kernel.run(gpu_cells.WRITE_BUFFER.format(mebibytes=80, seed=2)) == "written"
    assert await kernel.run(gpu_cells.READ_BUFFER) == "intact"


async def test_her_next_cell_restores_the_share_and_the_buffer_is_intact(
    stack: RunningStack, kernels: dict[str, Kernel]
) -> None:
    before = await session_when(stack, "alice", lambda session: session.tier is Tier.RELEASED)
    alice = kernels["alice"]
    assert await alice.run(gpu_cells.READ_BUFFER) == "intact"
    assert await alice.run(gpu_cells.WORK_ON_BUFFER) == "worked"
    after = await session_when(stack, "alice", lambda session: session.tier is Tier.ACTIVE)
    assert (after.effective_units, after.guaranteed_units) == (25, 25)
    assert after.pid == before.pid, "the same notebook server"
    assert await alice.run(gpu_cells.READ_BUFFER) == "intact"

    bob = await session_when(stack, "bob", lambda session: session.guaranteed_units < 25)
    assert bob.borrowed_units == 25
    assert used_units(await stack.agent.report()) <= 100


async def test_the_borrower_keeps_working_and_its_data_is_intact(
    stack: RunningStack, kernels: dict[str, Kernel]
) -> None:
    bob, alice = kernels["bob"], kernels["alice"]
    for _ in range(3):
        assert (
            list(await asyncio.gather(bob.run(gpu_cells.WORK_ON_BUFFER), alice.run(gpu_cells.WORK_ON_BUFFER)))
            == ["worked"] * 2
        )
    read = await asyncio.gather(bob.run(gpu_cells.READ_BUFFER), alice.run(gpu_cells.READ_BUFFER))
    assert list(read) == ["intact"] * 2


async def test_a_share_that_does_not_fit_waits_in_line_until_there_is_room(stack: RunningStack) -> None:
    await stack.hub.add_user("dave")
    await stack.hub.request_start("dave", "half-gpu")
    await asyncio.sleep(1)
    waiting = await stack.hub.server("dave")
    assert waiting is not None
    assert waiting["pending"] == "spawn"
    assert (await stack.agent.report()).session("dave") is None, "nothing is reserved while it waits"
    await stack.hub.stop("carol")
    await stack.hub.until_ready("dave", within=40)
    dave = await session_when(stack, "dave", lambda session: session.confirmed)
    assert (dave.share_units, dave.borrowed_units) == (50, 0)
    bob = await session_when(stack, "bob", lambda session: session.borrowed_units == 0)
    assert bob.guaranteed_units == 25, "what he had borrowed is his own now, of what carol left"
    assert used_units(await stack.agent.report()) == 100


async def test_the_demo_notebook_runs_from_top_to_bottom(stack: RunningStack) -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    # smaller and quicker: this GPU has 96 MiB, and nobody waits for minutes here
    quick = {"2**26": "2**20", "time.monotonic() + 60": "time.monotonic() + 1", "+ 240": "+ 3", "range(20)": "range(2)"}
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for before, after in quick.items():
        assert any(before in cell for cell in cells), f"{before} is no longer in the notebook"
        cells = [cell.replace(before, after) for cell in cells]
    kernel = await stack.hub.kernel("dave")
    said = [await kernel.run(cell) for cell in cells]
    # JupyterLab's terminals are login shells
    shell = "import subprocess; print(subprocess.check_output(['bash', '-lc', 'gpushare status'], text=True))"
    terminal = await kernel.run(shell)
    assert "share           0.50 GPU" in terminal
    assert "tier            active" in terminal
    kernel.close()
    assert "share           0.50 GPU" in said[0]
    assert "Simulated GPU 96 MiB" in said[1]
    assert not any("WRONG" in text for text in said)
    assert sum("the buffer is correct" in text for text in said) == 4
    assert ": 50 % of a GPU" in said[4]


async def test_stopping_frees_everything(stack: RunningStack) -> None:
    await asyncio.gather(*(stack.hub.stop(user) for user in ("alice", "bob", "dave")))
    deadline = time.monotonic() + 15
    while (report := await stack.agent.report()).sessions:
        assert time.monotonic() < deadline, report.sessions
        await asyncio.sleep(0.2)
    assert used_units(report) == 0
    # a kernel whose server is gone ends by itself, a moment later
    servers = {"ipykernel_launcher", "jupyterhub.singleuser"}
    while left := [words for words in stack.processes().values() if servers & {*words}]:
        assert time.monotonic() < deadline + 15, left
        await asyncio.sleep(0.2)
