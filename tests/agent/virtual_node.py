"""A whole agent in virtual time: its node, with connections and a GPU that exist only as numbers.

Frames go through the real conversations, memory limits and arbiters. Only sockets, threads and the driver are replaced.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpushare_spawner import background
from gpushare_spawner.agent.gpus import samples as gpu_samples
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState, Utilisation
from gpushare_spawner.agent.node import Node, NodeSettings
from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.agent.session_socket import Peer
from gpushare_spawner.agent.sessions.host_memory import HostMemorySettings
from gpushare_spawner.agent.state_folder import StateFolder
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.frames import NO_GPU, Feature, Frame, Kind, Role, gpu_bytes
from tests.agent.conftest import LIBRARIES, request_for

GIB = 2**30
NO_FEATURES = Feature(0)
BANDWIDTH = 12e9
"""Bytes per second of paging, in each direction."""
NO_PID = 2**23
"""Pids from here on are no process's: the kernel has 2^22 at most."""
DRAIN = 0.001
"""Seconds after which an honest process has stopped its work."""
LOOK_EVERY = 2.0
"""Seconds between two looks of the agent at the memory of all processes."""


class _Jump(selectors.DefaultSelector):
    """Waits for nothing: the time of the loop goes on by what it would have waited."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += max(0.0, timeout or 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while nothing is left to be done."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


class _Clock:
    """Stands in for the wall clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.was_set: Callable[[float], None]

    def __call__(self) -> float:
        return self._loop.time()


class _AtOnce:
    """Stands in for `threading.Thread`."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self.start = target


class _Endpoints:
    """Sessions without sockets."""

    def listen(self, record: object, listener: object) -> Any:
        return SimpleNamespace(path=Path("/nowhere"), close=lambda reason=None: None, remove=lambda: None)


@dataclass(eq=False)
class Process:
    """A process of a session that says what it likes, and runs nothing."""

    number: int
    agent: VirtualNode
    listener: Any
    features: Feature = NO_FEATURES
    reading: Any = field(default_factory=lambda: SimpleNamespace(spare_in=lambda: 0.0, charge=lambda work: work()))
    shown: int | None = None
    """Bytes that the driver shows of it; None: it does not show the process."""
    lease: int = 0
    busy: float = 0.0
    """GPU seconds."""

    def __post_init__(self) -> None:
        self.peer = Peer(self.number, 0, ProcessName(self.number, 1, "boot"))

    def greeted(self, features: int) -> None:
        self.features = Feature(features)

    def say(self, kind: Kind, *fields: int) -> None:
        frame = Frame(kind, (*fields, *(0 for _ in range(12 - len(fields)))), gpu_bytes(self.agent.gpu.uuid))
        self.listener.received(self, frame)

    def send(self, kind: Kind, *fields: int, gpu: bytes = NO_GPU, flags: int = 0) -> None:
        """The agent says something to the process. What it does then comes later: it is another process."""
        self.agent.loop.call_soon(self.told, kind, (*fields, 0, 0, 0, 0))

    def told(self, kind: Kind, fields: tuple[int, ...]) -> None:
        if kind is Kind.GRANT and fields[0]:
            self.lease = fields[0]


@dataclass(eq=False)
class Worker(Process):
    """An honest process that has work all the time, with a working set of managed memory."""

    managed: int = 0
    open: bool = False

    def begin(self) -> None:
        self.shown = 0
        self.say(Kind.MEMORY, self.managed, 0)
        self.say(Kind.REQUEST, self.managed, 0, 1)

    def told(self, kind: Kind, fields: tuple[int, ...]) -> None:
        if kind is Kind.GRANT and fields[0] and fields[0] != self.lease:
            self.lease = fields[0]
            seconds = fields[2] / BANDWIDTH
            self.agent.loop.call_later(seconds, self._opened, self.lease, fields[2], seconds)
        elif kind is Kind.REVOKE and fields[0] == self.lease:
            self.agent.loop.call_later(DRAIN, self._gives_back, fields[0], fields[1])
        elif kind is Kind.PAGE_OUT:
            self._pages_out(fields[0])

    def _opened(self, lease: int, amount: int, seconds: float) -> None:
        if self.lease == lease:
            self.agent.settle()
            self.open, self.shown = True, self.managed
            if amount:
                self.say(Kind.PAGED_IN, amount, int(seconds * 1e9))

    def _gives_back(self, lease: int, page_out: int) -> None:
        self.agent.settle()
        self.open, self.lease = False, 0
        self.say(Kind.RELEASE, lease, 0, 1)
        if page_out:
            self._pages_out(page_out)
        self.say(Kind.REQUEST, self.managed, 0, 1)

    def _pages_out(self, amount: int) -> None:
        def done() -> None:
            moved = min(amount, self.shown or 0)
            self.shown = (self.shown or 0) - moved
            self.say(Kind.PAGED_OUT, moved, int(amount / BANDWIDTH * 1e9))

        self.agent.loop.call_later(amount / BANDWIDTH, done)


class VirtualNode:
    """The agent of one machine with one GPU. Also its driver."""

    def __init__(
        self,
        loop: VirtualLoop,
        folder: Path,
        gpu: Gpu,
        samples: bool,
        real_figures: bool = False,
        arbiter: ArbiterSettings = ArbiterSettings(),  # noqa: B008 (frozen)
    ) -> None:
        """`samples`: whether the driver tells the GPU time of processes. `real_figures`: it shows no managed memory of
        processes, as on hardware; the arbiter goes by what is in use on the whole GPU."""
        self.loop, self.gpu, self._samples, self._real = loop, gpu, samples, real_figures
        self.processes: list[Process] = []
        self._settled_at = 0.0
        self._busy: list[tuple[float, dict[int, float]]] = []
        self._folder = StateFolder(folder)
        settings = NodeSettings(name="here", arbiter=arbiter, host_memory=HostMemorySettings(node="off"))
        self.node = Node(settings, (gpu,), self, self._folder, LIBRARIES, _Endpoints())
        self._look()

    # -- the driver --

    def state(self, gpu: Gpu) -> GpuState:
        used = sum(one.shown or 0 for one in self.processes)
        shown = {one.peer.pid: 0 if self._real else one.shown for one in self.processes if one.shown is not None}
        return GpuState(healthy=True, memory_used_bytes=used, processes=shown)

    memory = state

    def utilisation(self, gpu: Gpu, since: float) -> tuple[Utilisation, ...] | None:
        if not self._samples:
            return None
        self.settle()
        before = next((busy for at, busy in reversed(self._busy) if at <= since), {})
        self._busy = [*self._busy[-50:], (self.loop.time(), {one.number: one.busy for one in self.processes})]
        length = max(1e-9, self.loop.time() - since)
        parts = {one: round((one.busy - before.get(one.number, 0.0)) / length, 2) for one in self.processes}
        # as NVML: processes that did not compute are left out
        return tuple(Utilisation(pid=one.number, at=self.loop.time(), busy=part) for one, part in parts.items() if part)

    def settle(self) -> None:
        """Divide the time since the last call evenly between the processes that compute."""
        now = self.loop.time()
        running = [one for one in self.processes if isinstance(one, Worker) and one.open]
        for one in running:
            one.busy += (now - self._settled_at) / len(running)
        self._settled_at = now

    def _look(self) -> None:
        self.node._memory_seen({self.gpu.uuid: self.state(self.gpu)})
        self.loop.call_later(LOOK_EVERY, self._look)

    # -- sessions --

    def session(self, id: str, units: int, memory_limit: str = "100%", **changes: Any) -> None:
        request = request_for(id, gpus=(self.gpu.uuid,), share_units=units, memory_limit=memory_limit, **changes)
        self.node.requests.open(request)

    def process(
        self, session: str, make: Callable[..., Process] = Process, features: Feature = NO_FEATURES, **more: Any
    ) -> Any:
        listener = self.node.sessions[session].conversation
        made = make(NO_PID + len(self.processes), self, listener, **more)
        self.processes.append(made)
        made.say(Kind.HELLO, Role.CUDA, made.number, 100, features)
        return made

    def run(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))
        self.settle()

    def close(self) -> None:
        for arbitration in self.node.arbitrations.values():
            arbitration.close()
        self._folder.close()


@contextmanager
def virtual_node(
    folder: Path,
    gpu: Gpu,
    samples: bool = True,
    real_figures: bool = False,
    arbiter: ArbiterSettings = ArbiterSettings(),  # noqa: B008 (frozen)
) -> Iterator[VirtualNode]:
    """An agent that ends with the block."""
    loop = VirtualLoop()
    with pytest.MonkeyPatch.context() as patch:
        thread = SimpleNamespace(Thread=_AtOnce)
        patch.setattr(background, "threading", thread)
        patch.setattr(gpu_samples, "WallClock", lambda: _Clock(loop))
        asyncio.set_event_loop(loop)

        async def made() -> VirtualNode:
            return VirtualNode(loop, folder, gpu, samples, real_figures, arbiter)

        agent = loop.run_until_complete(made())
        try:
            yield agent
        finally:
            agent.close()
            loop.run_until_complete(agent.node.registry.store.close())
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            asyncio.set_event_loop(None)
            loop.close()
