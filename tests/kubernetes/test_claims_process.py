"""A real `gpushare agent --kubernetes dra`: killed and back, and where it ends with a reason."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpushare_spawner.model.kubernetes.objects import claim_folder
from tests.agent.conftest import short_folder  # noqa: F401
from tests.agent.peers import Peer

from .agent_account import agent_token
from .claims import make_class, published_slice, session_by_claim, units_of
from .cluster_agent import ClusterAgent
from .standin.cluster import Cluster


@pytest.fixture
async def agent(cluster: Cluster, short_folder: Path) -> AsyncIterator[ClusterAgent]:  # noqa: F811
    await make_class(cluster)
    kubelet = await cluster.make_node(driver_grace=0.3, prepare_retry=0.1)
    agent = ClusterAgent(short_folder, cluster, kubelet, await agent_token(cluster, kubelet.name, claims=True))
    yield agent
    if agent.process is not None and agent.process.poll() is None:
        agent.end(signal.SIGKILL)


@pytest.mark.slow
async def test_killed_and_started_again_it_keeps_sessions_and_their_folders(agent: ClusterAgent) -> None:
    await agent.start("--kubernetes", "dra")
    (gpu,) = (await agent.client.report()).gpus
    cluster, node = agent.cluster, agent.kubelet.name
    await published_slice(cluster, node, lambda item: units_of(item, gpu.uuid) == 100)
    await session_by_claim(cluster, node, "ada", [gpu])
    await cluster.wait_for_phase("ada", "Running")
    ada = await agent.session("ada", lambda session: True)
    report = await agent.published(lambda report: report.session("ada") is not None)
    assert report.claims is not None
    assert report.claims.environment.keys() == {"CUDA_DEVICE_ORDER", "LD_PRELOAD", "LD_LIBRARY_PATH", "SIMGPU_STATE"}
    assert all(Path(mount.host_path).exists() for mount in report.claims.mounts)
    agent.end(signal.SIGKILL)
    # pods run on; the kubelet removes the slice, and nothing new comes
    await published_slice(cluster, node, lambda item: item is None)
    await session_by_claim(cluster, node, "ben", [gpu], share=75)
    await agent.start("--kubernetes", "dra")
    await published_slice(cluster, node, lambda item: units_of(item, gpu.uuid) == 100)
    await cluster.wait_for_phase("ben", "Running")
    again = await agent.session("ada", lambda session: True)
    assert (again.opened_at, again.share_units) == (ada.opened_at, 25)
    folder = Path(report.claims.folder) / claim_folder(cluster.namespace, "ada-claim")
    peer = Peer(folder / report.claims.socket)
    await peer.connect()
    peer.close()
    assert agent.end() == 0


async def test_where_the_gate_is_off_it_ends_with_the_reason(agent: ClusterAgent) -> None:
    agent.cluster.standin("the feature gates of a real cluster stay as they are").gates = {"DRADeviceTaints"}
    ended = await asyncio.to_thread(
        subprocess.run, agent.command("--kubernetes", "dra"), env=agent.environment, capture_output=True, timeout=60
    )
    assert ended.returncode == 1
    said = ended.stderr.decode().splitlines()[-1]
    assert said.startswith("gpushare agent: --kubernetes dra: the API server drops allowMultipleAllocations, request")
    assert said.endswith("use --kubernetes device-plugin, the default, where this cannot be changed")
    assert not agent.kubelet.claims.calls
