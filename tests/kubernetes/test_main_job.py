"""The main job on a cluster: the course of tests/e2e/test_main_job.py, with pods instead of processes.

JupyterHub as zero-to-jupyterhub configures it, with its proxy, the service and one agent for each node as processes of
their own, each with no more rights at the API server than the charts give it; kubelets that start a real notebook
server for each pod, with what the device plugins hand to them. Two nodes have one simulated GPU each, and both are
full: dave has one, carol 75 % and alice 25 % of the other. The tests are the steps: each goes on where the one before
it stopped.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gpushare_spawner.model.kubernetes.annotations import SESSION_SELECTOR
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.share import Tier
from gpushare_spawner.wording import actions as words
from tests.e2e import gpu_cells
from tests.e2e.kernel import Kernel

from .cluster_stack import ClusterStack
from .conftest import ControlPlane, cluster_on
from .logs_of_failures import logs_of_failures
from .node_agent import GPU_0

# the steps are those of tests/e2e/test_main_job.py; make test has each part of the cluster in a test of its own
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

QUARTER = """
name: quarter-gpu
display_name: 0.25 GPU
gpu: {fraction: 0.25}
idle: {downgrade_after: DOWN, downgrade_to: 0.10, release_after: AWAY, warn_before: 1s, min_use: 0}
"""
# nobody may be idle while servers start; later the admin edits the file
PATIENT = QUARTER.replace("DOWN", "1h").replace("AWAY", "2h")
SMALLER_SOON = QUARTER.replace("DOWN", "3s").replace("AWAY", "2h")
NOTHING_SOON = QUARTER.replace("DOWN", "3s").replace("AWAY", "4s")
SMALL_SERVER = Path(__file__).parents[1] / "spawner" / "small_server.py"
# nobody looks into these two servers: something smaller than JupyterLab starts sooner
SMALL = f"kubespawner_override: {{cmd: [{sys.executable}, -I, -S, {SMALL_SERVER}], args: []}}\n"
TEMPLATES = {
    "quarter.yaml": PATIENT,
    "three-quarters.yaml": "name: three-quarters\ndisplay_name: 0.75 GPU\ngpu: {fraction: 0.75}\n" + SMALL,
    "whole.yaml": "name: whole-gpu\ndisplay_name: A whole GPU\ngpu: {count: 1}\n" + SMALL,
}
GPU = {"SIMGPU_DEVICES": "1", "SIMGPU_MEMORY": "96MiB", "SIMGPU_MODEL": "Simulated GPU 96 MiB"}
WITHIN = 90.0
"""Seconds for a server to start, on a slow machine."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(request: pytest.FixtureRequest, control_plane: ControlPlane | None) -> AsyncIterator[ClusterStack]:
    async with cluster_on(control_plane) as cluster:
        stack = ClusterStack(cluster, TEMPLATES, GPU, nodes=2)
        with logs_of_failures(request.config, "hub, service, agents and servers", stack.logs):
            async with stack:
                yield stack


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    """The users' kernels, kept from one step to the next."""
    return {}


@pytest.fixture(scope="module")
def pids() -> dict[str, int]:
    """The kernels' processes."""
    return {}


async def in_use(stack: ClusterStack, user: str) -> int:
    """Units of the GPU of that user's pod that are guaranteed to somebody."""
    report = await (await stack.agent_of(user)).client.report()
    return sum(session.guaranteed_units for session in report.sessions)


async def test_both_gpus_are_full_and_alice_writes_a_buffer(
    stack: ClusterStack, kernels: dict[str, Kernel], pids: dict[str, int]
) -> None:
    users = {"dave": "whole-gpu", "carol": "three-quarters", "alice": "quarter-gpu"}
    for user, template in users.items():
        await stack.hub.add_user(user)
        await stack.hub.request_start(user, template)
    told = await stack.progress("alice")
    await asyncio.gather(*(stack.hub.until_ready(user, within=WITHIN) for user in users))

    alice, carol, dave = [await stack.said_of(user) for user in ("alice", "carol", "dave")]
    assert (alice.template, alice.share_units, alice.tier, alice.effective_units) == (
        "quarter-gpu", 25, Tier.ACTIVE, 25,
    )  # fmt: skip
    assert alice.gpus == carol.gpus != dave.gpus
    node = (await stack.pod_of("alice"))["spec"]["nodeName"]
    assert any(f"Placed on GPU 0 (Simulated GPU 96 MiB) of {node}" in sentence for sentence in told), told
    assert "Started" in [reason for reason, _ in await stack.cluster.events("jupyter-alice")]
    assert len(await stack.devices_of("alice")) == 25
    assert len(await stack.devices_of("carol")) == 75
    assert await in_use(stack, "alice") == await in_use(stack, "dave") == 100

    kernels["alice"] = kernel = await stack.hub.kernel("alice")
    pids["alice"] = int(await kernel.run(gpu_cells.SETUP))
    # nothing but what the device plugin handed out brings the kernel to its share
    assert await kernel.run("print(os.environ['CUDA_VISIBLE_DEVICES'])") == alice.gpus[0]
    library = await kernel.run("print(os.environ['LD_PRELOAD'])")
    assert library.startswith(str((await stack.agent_of("alice")).host_dir))
    assert int(await kernel.run("print(check(cuda.cuDeviceTotalMem(device)))")) == 96 * 2**20
    assert await kernel.run(gpu_cells.WRITE_BUFFER.format(mebibytes=48, seed=1)) == "written"
    assert await kernel.run(gpu_cells.READ_BUFFER) == "intact"
    session = await (await stack.agent_of("alice")).session("alice", lambda session: session.processes == 1)
    assert session.memory_bytes >= 48 * 2**20
    assert session.last_gpu_activity is not None


async def test_while_idle_she_is_told_then_downgraded_then_released(stack: ClusterStack) -> None:
    agent = await stack.agent_of("alice")
    states = await stack.follow("alice")
    (stack.templates / "quarter.yaml").write_text(SMALLER_SOON)
    smaller = await stack.said_when("alice", lambda said: said.tier is Tier.DOWNGRADED)
    assert (smaller.share_units, smaller.effective_units) == (25, 10)
    # what she lost is advertised at once: hers stay hers by their ids
    await stack.offered(agent, 115)
    hers = await stack.devices_of("alice")

    (stack.templates / "quarter.yaml").write_text(NOTHING_SOON)
    released = await stack.said_when("alice", lambda said: said.tier is Tier.RELEASED)
    assert (released.share_units, released.effective_units) == (25, 0)
    await stack.offered(agent, 125)
    assert await stack.devices_of("alice") == hers
    session = await agent.session("alice", lambda session: session.tier is Tier.RELEASED)
    assert (session.effective_units, session.guaranteed_units) == (0, 0)
    await agent.published(lambda report: _tier_of(report, "alice") is Tier.RELEASED)

    notices = [state.notice.tier for state in states if state.notice is not None]
    assert notices[0] is Tier.DOWNGRADED
    assert notices[-1] is Tier.RELEASED
    told_first = next(state for state in states if state.notice is not None)
    assert told_first.tier is Tier.ACTIVE
    assert (await stack.said_of("carol")).tier is Tier.ACTIVE, "her template has no idle steps"


async def test_bob_is_placed_on_the_units_that_she_released(
    stack: ClusterStack, kernels: dict[str, Kernel], pids: dict[str, int]
) -> None:
    (stack.templates / "quarter.yaml").write_text(PATIENT)
    await stack.hub.add_user("bob")
    await stack.hub.request_start("bob", "quarter-gpu")
    told = await stack.progress("bob")
    await stack.hub.until_ready("bob", within=WITHIN)
    alice, bob = await stack.said_of("alice"), await stack.said_of("bob")
    assert bob.gpus == alice.gpus
    assert bob.borrowed_units == bob.share_units == 25, "everything that is free in the cluster is lent by alice"
    assert any("idle sessions lend 25 % of each GPU" in sentence for sentence in told), told
    given = [await stack.devices_of(user) for user in ("alice", "bob", "carol")]
    assert [len(devices) for devices in given] == [25, 25, 75]
    assert len(set().union(*given)) == 125
    session = await (await stack.agent_of("bob")).session("bob", lambda session: session.guaranteed_units == 25)
    assert session.borrowed_units == 25
    assert await in_use(stack, "bob") == 100

    kernels["bob"] = kernel = await stack.hub.kernel("bob")
    pids["bob"] = int(await kernel.run(gpu_cells.SETUP))
    # more than fits beside alice's buffer: hers must leave the GPU
    assert await kernel.run(gpu_cells.WRITE_BUFFER.format(mebibytes=80, seed=2)) == "written"
    assert await kernel.run(gpu_cells.READ_BUFFER) == "intact"


async def test_her_next_cell_restores_the_share_and_the_buffer_is_intact(
    stack: ClusterStack, kernels: dict[str, Kernel], pids: dict[str, int]
) -> None:
    agent, pod = await stack.agent_of("alice"), await stack.pod_of("alice")
    before = await agent.session("alice", lambda session: session.tier is Tier.RELEASED)
    alice = kernels["alice"]
    assert await alice.run(gpu_cells.READ_BUFFER) == "intact"
    assert await alice.run(gpu_cells.WORK_ON_BUFFER) == "worked"
    after = await agent.session("alice", lambda session: session.tier is Tier.ACTIVE)
    assert (after.effective_units, after.guaranteed_units) == (25, 25)
    restored = await stack.said_when("alice", lambda said: said.tier is Tier.ACTIVE)
    assert (restored.effective_units, restored.notice) == (25, None)
    assert await alice.run(gpu_cells.READ_BUFFER) == "intact"
    assert int(await alice.run("print(os.getpid())")) == pids["alice"], "the same kernel"
    assert (after.pid, after.opened_at) == (before.pid, before.opened_at), "the same server"
    assert (await stack.pod_of("alice"))["metadata"]["uid"] == pod["metadata"]["uid"], "in the same pod"

    bob = await agent.session("bob", lambda session: session.guaranteed_units < 25)
    assert bob.borrowed_units == 25
    assert await in_use(stack, "alice") <= 100
    # nothing is left to hand out: what is advertised is held
    await stack.offered(agent, 125)
    assert len(agent.kubelet.devices.in_use(GPU_0)) == 125


async def test_the_borrower_keeps_working_and_its_data_is_intact(
    stack: ClusterStack, kernels: dict[str, Kernel], pids: dict[str, int]
) -> None:
    both = [kernels[user] for user in ("alice", "bob")]
    for _ in range(3):
        assert await asyncio.gather(*(kernel.run(gpu_cells.WORK_ON_BUFFER) for kernel in both)) == ["worked"] * 2
    assert await asyncio.gather(*(kernel.run(gpu_cells.READ_BUFFER) for kernel in both)) == ["intact"] * 2
    assert int(await kernels["bob"].run("print(os.getpid())")) == pids["bob"]


async def test_alice_keeps_and_releases_her_share_inside_her_pod(
    stack: ClusterStack, kernels: dict[str, Kernel]
) -> None:
    async def gpushare(*words: str) -> str:
        # the pod has the environment of the tests, without its programs on the path
        command = [sys.executable, "-m", "gpushare_spawner.cli", *words]
        code = f"import subprocess; print(subprocess.run({command!r}, stdout=-1, stderr=-2, text=True).stdout)"
        return await kernels["alice"].run(code)

    assert await gpushare("keep", "2h") == "The GPU share is kept for 2 h."
    keep = (await stack.said_of("alice")).controls.keep
    assert keep is not None
    assert (keep.by, round(keep.until - time.time(), -2)) == ("alice", 7200)
    assert (await stack.said_of("bob")).controls.keep is None
    assert await gpushare("keep", "end") == words.KEEP_ENDED
    assert (await stack.said_of("alice")).controls.keep is None
    assert await gpushare("release") == words.RELEASED
    assert (await stack.said_of("alice")).tier is Tier.RELEASED
    assert await kernels["alice"].run(gpu_cells.WORK_ON_BUFFER) == "worked"
    await stack.said_when("alice", lambda said: said.tier is Tier.ACTIVE)


async def test_stopping_frees_everything(stack: ClusterStack) -> None:
    agent = await stack.agent_of("alice")
    await stack.hub.stop("bob")
    await stack.offered(agent, 100)
    await asyncio.gather(*(stack.hub.stop(user) for user in ("alice", "carol", "dave")))
    deadline = time.monotonic() + WITHIN
    while pods := await stack.cluster.pods(SESSION_SELECTOR):
        assert time.monotonic() < deadline, [pod["metadata"]["name"] for pod in pods]
        await asyncio.sleep(0.2)
    for agent in stack.agents:
        await agent.published(lambda report: not report.sessions)
        await stack.offered(agent, 100)
        assert agent.kubelet.devices.in_use(GPU_0) == set()
        while left := list(agent.host_dir.glob("pods/*")):
            assert time.monotonic() < deadline, left
            await asyncio.sleep(0.2)
    while running := stack.processes_in_pods():
        assert time.monotonic() < deadline, running
        await asyncio.sleep(0.2)
    for agent in stack.agents:
        assert await asyncio.to_thread(agent.end) == 0
        await stack.offered(agent, 0)
        assert [path.name for path in agent.kubelet.plugin_folder.glob("*.sock")] == ["kubelet.sock"]


def _tier_of(report: Report, user: str) -> Tier | None:
    session = report.session(user)
    return None if session is None else session.tier
