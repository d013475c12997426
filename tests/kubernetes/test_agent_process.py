"""`gpushare agent --kubernetes` as a process of its own, on simulated GPUs, with the faults of real life."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpushare_spawner.agent.kubernetes.pods.sessions import GONE_AFTER
from gpushare_spawner.model.control import ControlRefused
from gpushare_spawner.model.frames import Kind, Role
from gpushare_spawner.model.kubernetes.annotations import TIER, SessionAnnotations, labels, tier_patch
from gpushare_spawner.model.share import Tier
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import request_for, short_folder  # noqa: F401
from tests.agent.peers import GIB, Peer, session_processes

from .agent_account import agent_token
from .cluster_agent import ClusterAgent
from .node_agent import GPU_0
from .standin.client import path
from .standin.cluster import Cluster, a_pod


@pytest.fixture
async def agent(cluster: Cluster, short_folder: Path) -> AsyncIterator[ClusterAgent]:  # noqa: F811
    kubelet = await cluster.make_node()
    agent = ClusterAgent(short_folder, cluster, kubelet, await agent_token(cluster, kubelet.name))
    await agent.start()
    await cluster.wait_for_allocatable(kubelet.name, GPU_0, 100)
    yield agent
    if agent.process is not None and agent.process.poll() is None:
        agent.end(signal.SIGKILL)


async def test_from_a_pod_to_a_lease_and_back(agent: ClusterAgent) -> None:
    socket = await agent.pod("ada")
    report = await agent.published(lambda report: report.session("ada") is not None)
    assert report.node == agent.kubelet.name
    assert report.gpus[0].simulated
    peer = Peer(socket)
    await peer.connect(Role.CUDA)
    await agent.cluster.admin.patch(
        path("pods", agent.cluster.namespace, "ada"),
        {"metadata": {"annotations": tier_patch(Tier.RELEASED, time.time(), 0, time.time())}},
    )
    await peer.until(Kind.TIER, timeout=2.0)
    await agent.cluster.wait_for_allocatable(agent.kubelet.name, GPU_0, 125)
    peer.send(Kind.REQUEST, GIB, 0, gpu=report.gpus[0].uuid)
    await peer.until(Kind.GRANT)
    await agent.cluster.wait_for_pod("ada", lambda pod: pod["metadata"]["annotations"][TIER] == "active")
    await agent.cluster.wait_for_allocatable(agent.kubelet.name, GPU_0, 100)
    with pytest.raises(ControlRefused, match="start and end with pods"):
        await agent.client.open(request_for("ben"))
    peer.close()


@pytest.mark.slow
async def test_fifty_sessions_on_one_gpu_fit_into_80_mib(cluster: Cluster, short_folder: Path) -> None:  # noqa: F811
    """The chart's memory request relies on it. Measured: 74 MiB."""
    kubelet = await cluster.make_node()
    agent = ClusterAgent(short_folder, cluster, kubelet, await agent_token(cluster, kubelet.name))
    peers: list[Peer] = []
    async with agent.in_pod():
        await cluster.wait_for_allocatable(kubelet.name, GPU_0, 100)
        gpu = (await agent.client.report()).gpus[0].uuid
        sockets = await asyncio.gather(*(agent.pod(f"user-{number}", share=2) for number in range(50)))
        for socket in sockets:
            peers += await session_processes(socket, gpu)
        await agent.published(lambda report: len(report.sessions) == 50)
        resident = agent.memory_bytes()["Rss"]
    for peer in peers:
        peer.close()
    assert resident < 80 * 2**20, f"{resident / 2**20:.1f} MiB"


async def test_killed_and_started_again_it_keeps_sessions_and_ids(agent: ClusterAgent) -> None:
    sockets = {name: await agent.pod(name) for name in ("ada", "ben")}
    folders = {path: os.stat(path).st_ino for path in agent.host_dir.glob("pods/*")}
    held = {uid: dict(held) for uid, held in agent.kubelet.devices.held.items()}
    await agent.cluster.admin.patch(
        path("pods", agent.cluster.namespace, "ada"),
        {"metadata": {"annotations": tier_patch(Tier.DOWNGRADED, time.time(), 10, time.time())}},
    )
    await agent.session("ada", lambda session: session.tier is Tier.DOWNGRADED)
    agent.end(signal.SIGKILL)
    # while it is down one pod goes and another comes, which nobody can serve
    await agent.cluster.admin.delete(path("pods", agent.cluster.namespace, "ben"), grace=0)
    await agent.cluster.wait_until_gone("ben")
    await agent.start()
    await agent.cluster.wait_for_allocatable(agent.kubelet.name, GPU_0, 115)
    for _ in range(200):
        report = await agent.client.report()
        if report.session("ben") is None:
            break
        await asyncio.sleep(0.05)
    (ada,) = report.sessions
    assert (ada.id, ada.tier, ada.effective_units) == ("ada", Tier.DOWNGRADED, 10)
    now = {uid: dict(held) for uid, held in agent.kubelet.devices.held.items()}
    assert all(held[uid] == of_pod for uid, of_pod in now.items())
    peer = Peer(sockets["ada"])
    assert (await peer.connect(Role.CUDA))[0].fields[:3] == (25, Tier.DOWNGRADED.depth, 10)
    peer.close()
    # where the agent was killed before it had written the session's record, the folder goes later, by the
    # kubelet's list
    deadline = time.monotonic() + 3 * GONE_AFTER
    while len(left := {path: os.stat(path).st_ino for path in agent.host_dir.glob("pods/*")}) > 1:
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.1)
    assert len(left) == 1
    assert left.items() <= folders.items()


async def test_the_library_in_a_container_reaches_the_agent(agent: ClusterAgent) -> None:
    """A CUDA program in a pod, with nothing but what the device plugin gave to it."""
    gpu = (await agent.client.report()).gpus[0]
    said = SessionAnnotations(
        session="ada", template="quarter-gpu", share_units=25, gpus=(gpu.uuid,), gpu_indices=(0,),
        tier_since=time.time(), effective_units=25,
    )  # fmt: skip
    manifest = a_pod(
        "ada", command=["python", "-c", HOLDS_A_CONTEXT], limits={GPU_0: 25}, annotations=said.annotations(),
        labels=labels(),
    )  # fmt: skip
    await agent.cluster.admin.create(path("pods", agent.cluster.namespace), manifest)
    await agent.cluster.wait_for_phase("ada", "Running")
    await agent.session("ada", lambda session: session.processes == 1)


HOLDS_A_CONTEXT = """
import ctypes, time
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
device, context = ctypes.c_int(), ctypes.c_void_p()
assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
assert cuda.cuCtxSetCurrent(context) == 0
memory = ctypes.c_uint64()
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)) == 0
time.sleep(300)
"""


def test_what_it_cannot_start_with(short_folder: Path) -> None:  # noqa: F811
    agent = AgentProcess(short_folder)
    host = ("--host-dir", str(short_folder / "host"))

    def said() -> str:
        command = agent.command("--kubernetes", *host, "--namespace", "hub")
        ended = subprocess.run(command, env=agent.environment, capture_output=True, timeout=30)
        assert ended.returncode in (1, 2)
        return ended.stderr.decode()

    assert "neither a service account" in said()
    agent.environment["NVIDIA_VISIBLE_DEVICES"] = "GPU-of-another-machine"
    assert "$NVIDIA_VISIBLE_DEVICES names GPU-of-another-machine" in said()
