"""GPU work of observed sessions as the driver counts it: the GPU time of each process, and its session by cgroup.

For processes that are not connected: those of layers that preload a library of their own, and those without any. What a
connected process reports itself is more exact, and its samples are left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.gpu_time_samples import Delivery
from gpushare_spawner.agent.node import Node
from gpushare_spawner.agent.periodic import GpuSource
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.sessions.unconnected_processes import UnconnectedProcesses

log = logging.getLogger(__name__)

EVERY = 1.0
"""Seconds between two readings. Ours: the culler thinks in minutes, and the driver remembers some seconds."""


class DriverUse:
    """Reads the driver's samples of all GPUs of a node while there are sessions to observe."""

    def __init__(self, node: Node, source: GpuSource) -> None:
        self._node = node
        # each has a memory of its own, for one thread at a time
        self._owners = UnconnectedProcesses(node.sessions)
        self._deliveries: dict[str, Delivery] = {}
        for uuid, arbitration in node.arbitrations.items():
            delivery = Delivery(arbitration.gpu, source, Samples(arbitration, node.sessions), every=EVERY)
            delivery.sessions_of = UnconnectedProcesses(node.sessions).sessions_of
            self._deliveries[uuid] = delivery
        self._unknown: set[str] = set()
        """GPUs that worked without being known for whom."""
        self._task: asyncio.Task[None] | None = None

    @property
    def tells(self) -> bool:
        """Whether GPU work is seen of every process on the node's GPUs."""
        return bool(self._deliveries) and not self._unknown

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for delivery in self._deliveries.values():
            delivery.close()

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                log.exception("cannot read the use of the GPUs; retrying")
            await asyncio.sleep(EVERY)

    async def _look(self) -> None:
        if not self._node.sessions:
            return
        for uuid, delivery in self._deliveries.items():
            processes = self._node.rounds.states[uuid].processes
            owners = await asyncio.to_thread(self._owners.sessions_of, processes)
            self._memory(uuid, {pid: processes[pid].memory_bytes or 0 for pid in owners}, owners)
            if delivery.tells:
                delivery.wanted()
            else:
                self._by_whole_gpu(uuid, set(owners.values()))

    def _memory(self, uuid: str, shown: Mapping[int, int], owners: Mapping[int, str]) -> None:
        """Count the GPU memory of processes that are not connected. `shown`: bytes by pid."""
        for name, session in self._node.sessions.items():
            connected = _connected(session)
            amount = sum(shown[pid] for pid, owner in owners.items() if owner == name and pid not in connected)
            self._node.arbitrations[uuid].driver_memory(name, amount)

    def _by_whole_gpu(self, uuid: str, sessions: set[str]) -> None:
        """Count the work of a GPU whose driver does not count by process, if one session alone is there."""
        state = self._node.rounds.states[uuid]
        if state.utilisation == 0.0:
            return
        if state.utilisation is None or len(sessions) != 1:
            if uuid not in self._unknown:
                log.warning(
                    "GPU %s: the driver does not count GPU work by process; only kernels show which sessions are idle",
                    uuid,
                )
            self._unknown.add(uuid)
            return
        Samples(self._node.arbitrations[uuid], self._node.sessions).add(
            (EVERY, 0.0), {sessions.pop(): EVERY * state.utilisation}
        )


class Samples:
    """Takes the samples of one GPU; see `gpu_time_samples.Competition`."""

    def __init__(self, arbitration: GpuArbitration, sessions: Mapping[str, Session]) -> None:
        self._arbitration = arbitration
        self._sessions = sessions

    @property
    def contended(self) -> bool:
        """Whether samples are wanted: while there is a session."""
        return bool(self._sessions)

    def delivered(
        self, seconds_ago: tuple[float, float], busy: Mapping[int, float], strangers: Mapping[int, str]
    ) -> None:
        """Beginning and end of the sample in seconds before now, and each process's seconds on the GPU by pid.

        `strangers`: the sessions of processes, by pid, whether or not they are connected.
        """
        seconds: dict[str, float] = {}
        for pid, name in strangers.items():
            session = self._sessions.get(name)
            if session is not None and pid not in _connected(session):
                seconds[name] = seconds.get(name, 0.0) + busy.get(pid, 0.0)
        self.add(seconds_ago, seconds)

    def add(self, seconds_ago: tuple[float, float], seconds: Mapping[str, float]) -> None:
        """Add seconds on the GPU, by session."""
        for name, amount in seconds.items():
            session = self._sessions.get(name)
            if session is not None and amount > 0:
                self._arbitration.sampled(name, seconds_ago, amount)
                session.moved = True


def _connected(session: Session) -> set[int]:
    return {connection.peer.pid for connection in session.cuda}
