"""The folders that pods get mounted: what a container can do in one, and what the agent does with what it finds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gpushare_spawner.agent.kubernetes.devices import owners
from gpushare_spawner.model.frames import Role
from tests.agent.conftest import short_folder  # noqa: F401
from tests.agent.peers import Peer

from .agent_account import agent_token
from .node_agent import NodeAgent
from .standin.cluster import Cluster

DEPTH, FILES = 3000, 2000
NO_STALL = 1.0
"""Seconds for which the event loop may stand still, on a busy machine. A walk over all of it takes longer."""

IN_THE_CONTAINER = """
import os, socket, subprocess, sys
path, uid = sys.argv[1], int(sys.argv[2])
folder = os.path.dirname(os.path.dirname(path))
subprocess.run(["mount", "--bind", folder, folder], check=True)
subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
# nobody but the agent passes through its own folder: a container sees no more than the mount
os.chdir(folder)
if uid:
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
tries = {
    "make a folder": lambda: os.mkdir("nested"),
    "make a folder below": lambda: os.mkdir("s/nested"),
    "make a file": lambda: open("s/file", "w"),
    "remove the socket": lambda: os.unlink("s/gpu"),
    "replace the socket": lambda: os.rename("s/gpu", "s/other"),
    "replace the folder": lambda: os.rename("s", "t"),
    "open it to others": lambda: os.chmod("s", 0o777),
    "take the socket": lambda: os.chown("s/gpu", 1000, 1000),
    "listen beside it": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).bind("s/mine"),
}
for what, attempt in tries.items():
    try:
        attempt()
    except OSError:
        continue
    sys.exit(f"uid {uid} could {what}")
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.connect("s/gpu")
print("connected")
"""


def may_mount() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


@pytest.fixture
def emptied(short_folder: Path) -> Iterator[Path]:  # noqa: F811
    """The agent's folder, removed by rm, which goes to any depth, once the agent has stopped."""
    yield short_folder
    subprocess.run(["rm", "-rf", str(short_folder)], check=True)


@pytest.fixture
async def agent(cluster: Cluster, emptied: Path) -> AsyncIterator[NodeAgent]:
    kubelet = await cluster.make_node()
    agent = NodeAgent(cluster, kubelet, await agent_token(cluster, kubelet.name), emptied)
    await agent.start()
    await agent.ready()
    yield agent
    await agent.stop()


@pytest.mark.skipif(os.geteuid() != 0 or not may_mount(), reason="needs root, and a mount namespace of its own")
@pytest.mark.parametrize("uid", [0, 1000], ids=["root", "a user"])
async def test_a_container_connects_through_its_read_only_mount_and_can_change_nothing_there(
    agent: NodeAgent, uid: int
) -> None:
    await agent.running("ada")
    socket = agent.environment("ada")["GPUSHARE_SOCKET"]
    worker = agent.kubelet.worker(agent.cluster.namespace, "ada")
    given = agent.kubelet.plugins.given(worker.pod["metadata"]["uid"], "notebook")
    (mount,) = [mount for mount in given.mounts if socket.startswith(mount.host_path)]
    assert mount.read_only
    command = ["unshare", "--mount", sys.executable, "-c", IN_THE_CONTAINER, socket, str(uid)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.returncode) == ("connected\n", 0), done.stderr


async def test_all_folders_above_and_below_the_socket_are_closed_to_writers(agent: NodeAgent) -> None:
    await agent.running("ada")
    socket = Path(agent.environment("ada")["GPUSHARE_SOCKET"])
    for folder in (socket.parent, socket.parent.parent):
        state = folder.stat()
        assert (state.st_uid, state.st_mode & 0o777) == (os.geteuid(), 0o755)
    assert socket.parents[2] == agent.folder / "pods"
    assert socket.parents[2].stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
async def test_a_pods_end_takes_no_longer_for_whatever_lies_in_its_folder(agent: NodeAgent) -> None:
    await agent.running("ada")
    await agent.running("bob")
    devices = agent.held("ada")
    below = Path(agent.environment("ada")["GPUSHARE_SOCKET"]).parent
    await asyncio.to_thread(fill, below)
    stalls = asyncio.create_task(longest_stall())
    await agent.delete("ada")
    await agent.until(lambda: agent.node.report().session("ada") is None)
    await agent.until(lambda: not below.exists())
    stalls.cancel()
    assert await stalls < NO_STALL

    # the next pod with the same devices has a folder of its own, and so has the neighbour still
    await agent.running("eve")
    assert agent.held("eve") == devices
    for name in ("eve", "bob"):
        socket = Path(agent.environment(name)["GPUSHARE_SOCKET"])
        assert os.listdir(socket.parent.parent) == [owners.BELOW]
        assert os.listdir(socket.parent) == [socket.name]
        peer = Peer(socket)
        await peer.connect(Role.CUDA)
        peer.close()


@pytest.mark.slow
async def test_the_folder_of_a_pod_that_ended_while_no_agent_ran_is_gone_at_once(agent: NodeAgent) -> None:
    stranger = agent.folder / "pods" / owners.grant_name(["gone"])
    owners.make(stranger)
    (stranger / "s").mkdir()
    await asyncio.to_thread(fill, stranger / "s")
    stalls = asyncio.create_task(longest_stall())
    agent.on_kubernetes.allocated.remove_unknown_folders([])
    await asyncio.sleep(0.1)
    stalls.cancel()
    assert await stalls < NO_STALL
    assert not stranger.exists()


def test_a_link_in_a_folder_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "gpu").touch()
    folder = tmp_path / "pods" / "grant"
    owners.make(folder)
    (folder / "s").symlink_to(other)
    owners.make_fresh(folder)
    assert (other / "gpu").exists()
    assert os.listdir(folder) == []


def fill(folder: Path) -> None:
    """Deeper than recursion goes, and more files than a turn of the event loop may look at."""
    for number in range(FILES):
        (folder / str(number)).touch()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


async def longest_stall() -> float:
    """Seconds for which nothing else ran, at the longest, until this is cancelled."""
    longest, last = 0.0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return longest
