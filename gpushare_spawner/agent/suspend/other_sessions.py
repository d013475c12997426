"""The other sessions on a GPU, while one session is suspended or resumed there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping

from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.memory.memory_holds import MemoryHolds
from gpushare_spawner.agent.sessions.session import Session


class OtherSessions:
    """Asks the arbiters for memory, and keeps other sessions from taking it."""

    def __init__(
        self, arbitrations: Mapping[str, GpuArbitration], sessions: Mapping[str, Session], holds: MemoryHolds
    ) -> None:
        """`arbitrations` are by the GPU's UUID, `sessions` by their ids."""
        self._arbitrations = arbitrations
        self._sessions = sessions
        self._holds = holds

    def short_of_memory(self, session: str, gpu: Gpu, lacking: int) -> None:
        """So many bytes are missing on a GPU for a session. Nothing for one that has ended."""
        if session in self._sessions:
            self._arbitrations[gpu.uuid].short_of_memory(session, lacking)

    @contextlib.contextmanager
    def hold_grants(self, session: str, gpu: Gpu) -> Iterator[None]:
        """While this lasts no other session is granted more memory on the GPU. They may have some in advance."""
        self._holds.begin(gpu.uuid, session)
        try:
            yield
        finally:
            self._holds.end(gpu.uuid, session)

    @contextlib.asynccontextmanager
    async def hold_memory(self, session: str, gpu: Gpu) -> AsyncIterator[None]:
        """While this lasts no other session gets more memory on the GPU."""
        with self.hold_grants(session, gpu):
            others = [
                other.memory.recall_unused(gpu.uuid)
                for other in self._sessions.values()
                if other.id != session and gpu in other.gpus and other.memory is not None and not other.suspended
            ]
            await asyncio.gather(*others)
            yield
