"""An agent in this process, on GPUs that exist only as numbers, with real sockets and real files."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.node import Node, NodeSettings
from gpushare_spawner.agent.periodic import RoundSettings
from gpushare_spawner.agent.sessions.environment import Libraries
from gpushare_spawner.agent.state_folder import StateFolder
from gpushare_spawner.clocks import WallClock
from gpushare_spawner.model.control import OpenRequest
from gpushare_spawner.model.frames import Role
from tests.agent.peers import FIRST, SECOND, GpusOnPaper, Peer

LIBRARIES = Libraries(preload=Path("/opt/gpushare/libgpushare.so"), simulated_driver=Path("/opt/gpushare/simgpu"))


def request_for(id: str = "ada", **changes: Any) -> OpenRequest:
    """A quarter of the first GPU, unless told otherwise."""
    values: dict[str, Any] = {
        "id": id, "user": id, "uid": os.getuid(), "template": "quarter-gpu", "gpus": (FIRST.uuid,), "share_units": 25,
    }  # fmt: skip
    return OpenRequest(**values | changes)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets, which pytest's own is not."""
    path = Path(tempfile.mkdtemp(prefix="gs"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Agent:
    """A node that can be stopped and started anew on the same state folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.source = GpusOnPaper()
        self.settings = NodeSettings(
            name="here", rounds=RoundSettings(check_every=0.05, poll_every=0.05, well_after=0.0, reconnect_within=0.0)
        )
        self.gpus: tuple[Gpu, ...] = (FIRST, SECOND)
        self.node: Node
        self.state: StateFolder
        self.peers: list[Peer] = []
        self.clock_set = 0.0
        """Seconds by which the machine's clock was set."""

    async def start(self, **changes: Any) -> Node:
        self.settings = replace(self.settings, **changes)
        self.state = StateFolder(self.path)
        clock = WallClock(lambda: time.time() + self.clock_set)
        self.node = Node(self.settings, self.gpus, self.source, self.state, LIBRARIES, clock=clock)
        await self.node.start()
        return self.node

    async def stop(self) -> None:
        await self.node.close()
        self.state.close()

    def open(self, id: str = "ada", **changes: Any) -> str:
        """Open a session; the path of its socket."""
        return self.node.requests.open(request_for(id, **changes)).environment["GPUSHARE_SOCKET"]

    async def peer(self, path: str, role: Role | None = Role.CUDA) -> Peer:
        """A process that has said HELLO (where it has a role), its greeting read."""
        peer = Peer(path)
        self.peers.append(peer)
        await peer.connect(role)
        return peer


@pytest.fixture
async def agent(short_folder: Path) -> AsyncIterator[Agent]:
    agent = Agent(short_folder)
    await agent.start()
    yield agent
    for peer in agent.peers:
        peer.close()
    await agent.stop()


Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.fixture
def eventually() -> Eventually:
    """Wait until something holds, at most 10 s."""
    import asyncio

    async def wait(holds: Callable[[], bool]) -> None:
        for _ in range(1000):
            if holds():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it did not come about within 10 s")

    return wait
