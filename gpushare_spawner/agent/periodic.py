"""The periodic rounds of the agent: session checks, NVML, processes that bypass the library.

The checks themselves are in node.py, sessions/processes.py and mig.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gpushare_spawner.agent.gpus.nvml import Gpu, GpuSource, GpuState
from gpushare_spawner.agent.gpus.samples import PatientQuery
from gpushare_spawner.agent.sessions.processes import BypassWatch
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.background import Repeated

log = logging.getLogger(__name__)


WELL = GpuState(healthy=True)
"""The state of a GPU before the first answer of NVML."""


@dataclass(frozen=True)
class RoundSettings:
    """Intervals of the rounds."""

    check_every: float = 1.0
    """Seconds between checks of unconfirmed sessions, processes and records."""
    poll_every: float = 2.0
    """Seconds between queries of NVML."""
    answer_within: float = 10.0
    """Seconds after which NVML counts as hung: no GPU is healthy until it answers."""
    well_after: float = 10.0
    """Seconds for which an unhealthy GPU has to answer before it is healthy again, so that its state does not
    alternate.
    """
    reconnect_within: float = 10.0
    """Seconds from a restart in which processes may connect again before they count as bypassing."""
    save_every: float = 10.0
    """Least seconds between two writes of a record for newer activity alone."""


class Rounds:
    """Runs the session checks, queries the state of GPUs, and detects processes that bypass the library."""

    def __init__(
        self,
        settings: RoundSettings,
        gpus: Mapping[str, Gpu],
        source: GpuSource,
        polled: Callable[[Mapping[str, GpuState]], None] = lambda states: None,
        context_bytes: int = 0,
    ) -> None:
        """Prepare the rounds.

        `polled` is called with each answer of NVML, by the GPU's UUID. `context_bytes`: see ArbiterSettings.
        """
        self._settings = settings
        self._polled = polled
        self._gpus = gpus
        self._source = source
        simulated = any(gpu.simulated for gpu in gpus.values())
        self._bypass = BypassWatch(0 if simulated else context_bytes)
        self._reconnected_at = 0.0
        self._checks: list[Repeated] = []
        self._sick_at: dict[str, float] = {}
        """Time of the event loop at which a GPU was last unhealthy."""
        self._query: PatientQuery[dict[str, GpuState]] = PatientQuery()
        self.states: dict[str, GpuState] = dict.fromkeys(gpus, WELL)
        """Last answers of NVML, by the GPU's UUID."""

    async def start(self, sessions: Mapping[str, Session], check: Callable[[], None]) -> None:
        """Query NVML once, and begin. Each round reads `sessions` anew and calls `check`."""
        if sessions:
            self._reconnected_at = asyncio.get_running_loop().time() + self._settings.reconnect_within
        await self._poll(sessions)
        self._checks = [
            Repeated(self._settings.check_every, check, log, "a check of the sessions failed"),
            Repeated(self._settings.poll_every, lambda: self._poll(sessions), log, "a query of the GPUs failed"),
        ]
        for repeated in self._checks:
            repeated.start()

    async def close(self) -> None:
        """Stop."""
        for repeated in self._checks:
            await repeated.close()

    async def _poll(self, sessions: Mapping[str, Session]) -> None:
        now = asyncio.get_running_loop().time()
        states = await self._ask()
        # the list of GPUs can change while the driver answers
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
            await self._bypass.update(states, sessions)

    async def _ask(self) -> dict[str, GpuState]:
        gpus = dict(self._gpus)  # it can change meanwhile
        within = self._settings.answer_within
        states = await self._query.answer(lambda: {uuid: self._source.state(gpu) for uuid, gpu in gpus.items()}, within)
        hangs = GpuState(healthy=False, trouble=f"has not answered its driver for {within:g} s")
        return states if states is not None else dict.fromkeys(self._gpus, hangs)
