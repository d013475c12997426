"""The periodic rounds of the agent: session checks, NVML, processes that bypass the library."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState, Utilisation
from gpushare_spawner.agent.gpus.samples import in_daemon_thread
from gpushare_spawner.agent.sessions.processes import BypassWatch
from gpushare_spawner.agent.sessions.session import Session

log = logging.getLogger(__name__)


WELL = GpuState(healthy=True)
"""The state of a GPU of which NVML has not been asked yet."""


class GpuSource(Protocol):
    """Where the state of GPUs comes from: NVML."""

    def state(self, gpu: Gpu) -> GpuState:
        """What it says now; may block for milliseconds."""

    def memory(self, gpu: Gpu) -> GpuState | None:
        """Only what is in use and by whom; None where the GPU does not answer. From any thread; may block."""

    def utilisation(self, gpu: Gpu, since: float) -> tuple[Utilisation, ...] | None:
        """Each process's share of the GPU since an instant (seconds since the epoch); None where it never tells."""


@dataclass(frozen=True)
class RoundSettings:
    """How often."""

    look_every: float = 1.0
    """Seconds between looks at unconfirmed sessions, processes and records."""
    poll_every: float = 2.0
    """Seconds between questions to NVML."""
    answer_within: float = 10.0
    """Seconds after which NVML is taken to hang: no GPU is healthy until it answers."""
    well_after: float = 10.0
    """Seconds for which a GPU that was not healthy has to answer before it is again: one that comes and goes is not."""
    reconnect_within: float = 10.0
    """Seconds from a restart in which processes may connect again before they are taken for bypassing."""
    save_every: float = 10.0
    """Seconds at least between two writes of a record for no more than newer activity."""


class Rounds:
    """Runs the session checks, asks NVML for the state of GPUs, and finds processes that bypass the library."""

    def __init__(
        self,
        settings: RoundSettings,
        gpus: Mapping[str, Gpu],
        source: GpuSource,
        polled: Callable[[Mapping[str, GpuState]], None] = lambda states: None,
        context_bytes: int = 0,
    ) -> None:
        """`polled` is called with each answer of NVML, by the GPU's UUID. `context_bytes`: see
        ArbiterSettings."""
        self._settings = settings
        self._polled = polled
        self._gpus = gpus
        self._source = source
        simulated = any(gpu.simulated for gpu in gpus.values())
        self._bypass = BypassWatch(0 if simulated else context_bytes)
        self._reconnected_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._sick_at: dict[str, float] = {}
        """When a GPU was last found sick, the event loop's time."""
        self._asked: asyncio.Future[dict[str, GpuState]] | None = None
        self.states: dict[str, GpuState] = dict.fromkeys(gpus, WELL)
        """What NVML said last, by the GPU's UUID."""

    async def start(self, sessions: Mapping[str, Session], look: Callable[[], None]) -> None:
        """Ask NVML once, and begin. `sessions` is looked at again in each round; `look` is called in each."""
        if sessions:
            self._reconnected_at = asyncio.get_running_loop().time() + self._settings.reconnect_within
        await self._poll(sessions)
        self._tasks = [
            asyncio.create_task(_every(self._settings.look_every, lambda: _at_once(look))),
            asyncio.create_task(_every(self._settings.poll_every, lambda: self._poll(sessions))),
        ]

    def add_gpu(self, gpu: Gpu) -> None:
        """A GPU has come; it counts as well until NVML is asked."""
        self.states[gpu.uuid] = WELL

    def drop_gpu(self, gpu: Gpu) -> None:
        """A GPU has gone."""
        self.states.pop(gpu.uuid, None)

    async def close(self) -> None:
        """Stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _poll(self, sessions: Mapping[str, Session]) -> None:
        now = asyncio.get_running_loop().time()
        states = await self._ask()
        # GPUs come and go while the driver answers
        states = {uuid: states.get(uuid, WELL) for uuid in self._gpus}
        for uuid, state in states.items():
            before = self.states.get(uuid, WELL)
            if not state.healthy:
                self._sick_at[uuid] = now
                if before.healthy:
                    log.error("GPU %s %s; its sessions stay, new ones are refused", uuid, state.trouble)
            elif not before.healthy:
                if now - self._sick_at[uuid] < self._settings.well_after:
                    states[uuid] = replace(state, healthy=False, trouble="did not answer its driver a moment ago")
                else:
                    log.info("GPU %s answers again", uuid)
        self.states = states
        self._polled(states)
        if now >= self._reconnected_at:
            await self._bypass.look(states, sessions)

    async def _ask(self) -> dict[str, GpuState]:
        if self._asked is None:
            gpus = dict(self._gpus)  # it can change meanwhile
            self._asked = in_daemon_thread(lambda: {uuid: self._source.state(gpu) for uuid, gpu in gpus.items()})
        await asyncio.wait([self._asked], timeout=self._settings.answer_within)
        if not self._asked.done():
            hangs = f"has not answered its driver for {self._settings.answer_within:g} s"
            return {uuid: GpuState(healthy=False, trouble=hangs) for uuid in self._gpus}
        asked, self._asked = self._asked, None
        return asked.result()


async def _at_once(look: Callable[[], None]) -> None:
    look()


async def _every(seconds: float, look: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await look()
        except Exception:
            log.exception("a periodic check failed; retrying in %g s", seconds)
