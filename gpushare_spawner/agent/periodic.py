"""The agent's periodic rounds: session checks, NVML, processes that bypass the library.

The checks themselves are in node.py and sessions/attribution.py. `Rounds` also decides whether a GPU may be
allocated, and why not. `InstanceWatch` detects MIG instances that an admin creates and destroys while the agent runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gpushare_spawner.agent.gpus.nvml import GONE, Gpu, GpuSource, GpuState
from gpushare_spawner.agent.gpus.samples import PatientQuery
from gpushare_spawner.agent.sessions.attribution import BypassWatch
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.background import Repeated
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.wording.layers import INSTANCE_GONE, instance_failed

log = logging.getLogger(__name__)


WELL = GpuState(healthy=True)
"""The state of a GPU before NVML's first answer."""
INSTANCES_EVERY = 5.0
"""Seconds between two queries for MIG instances."""
INSTANCES_WITHIN = 10.0
"""Seconds after which NVML counts as hung: the list of instances does not change until NVML answers."""


@dataclass(frozen=True)
class RoundSettings:
    """Intervals of the rounds."""

    check_every: float = 1.0
    """Seconds between checks of unconfirmed sessions, processes and records."""
    poll_every: float = 2.0
    """Seconds between queries of NVML."""
    answer_within: float = 10.0
    """Seconds after which NVML counts as hung: no GPU is healthy until NVML answers."""
    well_after: float = 10.0
    """Seconds for which an unhealthy GPU must answer before it counts as healthy again, so that its state does not
    flap."""
    reconnect_within: float = 10.0
    """Seconds after a restart in which processes may reconnect before they count as bypassing."""
    save_every: float = 10.0
    """Minimum seconds between writes of a record if only its activity has changed."""


class Rounds:
    """Runs the session checks, queries the GPUs' state, and detects processes that bypass the library."""

    def __init__(
        self,
        settings: RoundSettings,
        gpus: Mapping[str, Gpu],
        source: GpuSource,
        polled: Callable[[Mapping[str, GpuState]], None],
        bypass: BypassWatch,
    ) -> None:
        """Prepare the rounds. `polled` is called with each answer of NVML, keyed by GPU UUID, before `bypass`."""
        self._settings = settings
        self._polled = polled
        self.gpus = gpus
        self._source = source
        self._bypass = bypass
        self._reconnected_at = 0.0
        self._checks: list[Repeated] = []
        self._sick_at: dict[str, float] = {}
        """Event loop time at which each GPU was last unhealthy."""
        self._query: PatientQuery[dict[str, GpuState]] = PatientQuery()
        self.states: dict[str, GpuState] = dict.fromkeys(gpus, WELL)
        """NVML's last answers, keyed by GPU UUID."""
        self.withheld: Mapping[str, str] = {}
        """Reasons why GPUs must not be allocated, keyed by GPU UUID."""

    async def start(self, sessions: Mapping[str, Session], check: Callable[[], None]) -> None:
        """Query NVML once, and start the rounds. Each round rereads `sessions` and calls `check`."""
        if sessions:
            self._reconnected_at = asyncio.get_running_loop().time() + self._settings.reconnect_within
        await self._poll(sessions)
        self._checks = [
            Repeated(self._settings.check_every, check, log, "checking the sessions failed"),
            Repeated(self._settings.poll_every, lambda: self._poll(sessions), log, "querying the GPUs failed"),
        ]
        for repeated in self._checks:
            repeated.start()

    async def close(self) -> None:
        """Stop."""
        for repeated in self._checks:
            await repeated.close()

    def trouble(self, gpu: str) -> str | None:
        """Return a sentence with the reason why the GPU with this UUID may not be allocated; None if it may."""
        if gpu in self.withheld:
            return self.withheld[gpu]
        state = self.states[gpu]
        return None if state.healthy else f"{self.gpus[gpu].label} ({gpu}) {state.trouble}"

    def healthy(self, gpu: str) -> bool:
        """Return whether the GPU with this UUID may be allocated."""
        return self.trouble(gpu) is None

    async def _poll(self, sessions: Mapping[str, Session]) -> None:
        now = asyncio.get_running_loop().time()
        states = await self._ask()
        # the list of GPUs can change while the driver answers
        states = {uuid: states.get(uuid, WELL) for uuid in self.gpus}
        for uuid, state in states.items():
            before = self.states.get(uuid, WELL)
            if not state.healthy:
                self._sick_at[uuid] = now
                if before.healthy:
                    log.error("GPU %s %s; its sessions stay, new sessions are refused", uuid, state.trouble)
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
        gpus = dict(self.gpus)  # the list can change meanwhile
        within = self._settings.answer_within
        states = await self._query.answer(lambda: {uuid: self._source.state(gpu) for uuid, gpu in gpus.items()}, within)
        hangs = GpuState(healthy=False, trouble=f"has not answered its driver for {within:g} s")
        return states if states is not None else dict.fromkeys(self.gpus, hangs)


class InstanceWatch:
    """Keeps the agent's list of instances in sync with the machine's. An instance with a session stays in the list."""

    def __init__(
        self,
        query: Callable[[], tuple[Gpu, ...] | None] | None,
        rounds: Rounds,
        sessions: Mapping[str, Session],
        add: Callable[[Gpu], None],
        drop: Callable[[Gpu], None],
    ) -> None:
        """Store the parts of the agent.

        `query` returns the current instances, or None if NVML does not answer; without it, there are no queries.
        `sessions`, keyed by ID, may change. `add` adds an instance to the list; `drop` removes an instance without
        sessions.
        """
        self._query = query
        self._rounds = rounds
        self._sessions = sessions
        self._add, self._drop = add, drop
        self._answers: PatientQuery[tuple[Gpu, ...] | None] = PatientQuery()
        self._checking = Repeated(INSTANCES_EVERY, self.check, log, "cannot query the MIG instances")

    async def start(self) -> None:
        """Query once, and start the periodic queries. The sessions have been restored."""
        if self._query is None:
            return
        await self.check()
        self._checking.start()

    async def close(self) -> None:
        """Stop the queries."""
        await self._checking.close()

    def trouble(self, session: Session) -> str | None:
        """Return sentences about the fault of a session's instance; None if there is none."""
        if session.record.request.layer is not LayerName.MIG or session.record.gpus_unknown:
            return None
        if not session.gpus:
            return INSTANCE_GONE
        for gpu in session.gpus:
            state = self._rounds.states.get(gpu.uuid)
            if state is not None and not state.healthy:
                return instance_failed(gpu.label, state.trouble)
        return None

    async def check(self) -> None:
        """Query the driver, and update the list."""
        instances = await self._answers.answer(self._query, INSTANCES_WITHIN) if self._query is not None else None
        if instances is None:
            return
        now = {gpu.uuid for gpu in instances}
        used = {gpu.uuid for session in self._sessions.values() for gpu in session.gpus}
        for gpu in instances:
            recorded = self._rounds.gpus.get(gpu.uuid)
            if recorded is not None and recorded != gpu and gpu.uuid not in used:
                # the driver derives UUIDs from the GPU and instance IDs, which a later instance can reuse
                log.info("%s (%s) is a different instance now", recorded.label, gpu.uuid)
                self._drop(recorded)
                recorded = None
            if recorded is None:
                log.info("%s (%s) has appeared", gpu.label, gpu.uuid)
                self._add(gpu)
        for gpu in [gpu for gpu in self._rounds.gpus.values() if gpu.mig is not None]:
            # the instances of a GPU that does not answer still exist
            gone = gpu.uuid not in now and self._rounds.states[gpu.uuid].trouble == GONE
            if gone and gpu.uuid not in used:
                log.info("%s (%s) is gone", gpu.label, gpu.uuid)
                self._drop(gpu)
