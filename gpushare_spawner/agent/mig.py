"""The MIG instances of one machine, which sessions can have.

`InstanceWatch` detects instances that an admin makes and destroys while the agent runs. NVML's queries are in
gpus/nvml.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from gpushare_spawner.agent.gpus.nvml import GONE, Gpu, GpuState
from gpushare_spawner.agent.gpus.samples import PatientQuery
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.background import Repeated
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.wording.layers import INSTANCE_GONE, instance_failed

log = logging.getLogger(__name__)


POLL_EVERY = 5.0
"""Seconds between two queries of NVML."""
ANSWER_WITHIN = 10.0
"""Seconds after which NVML counts as hung: the list of instances stays the same until it answers."""


class InstanceWatch:
    """Keeps the agent's list of instances in step with the machine's. An instance with a session stays in the list."""

    def __init__(
        self,
        query: Callable[[], tuple[Gpu, ...] | None] | None,
        gpus: Mapping[str, Gpu],
        sessions: Mapping[str, Session],
        states: Callable[[], Mapping[str, GpuState]],
        add: Callable[[Gpu], None],
        drop: Callable[[Gpu], None],
    ) -> None:
        """Store the parts of the agent.

        `query` returns the present instances, or None if NVML does not answer; without it there are no
        queries. `gpus` (by UUID) and `sessions` (by id) may change; `states`: the driver's last answers. `add` adds an
        instance to the list; `drop` removes an instance without sessions.
        """
        self._query = query
        self._gpus = gpus
        self._sessions = sessions
        self._states = states
        self._add, self._drop = add, drop
        self._answers: PatientQuery[tuple[Gpu, ...] | None] = PatientQuery()
        self._checking = Repeated(POLL_EVERY, self.check, log, "cannot look for MIG instances")

    async def start(self) -> None:
        """Query once, and begin. The sessions have been restored."""
        if self._query is None:
            return
        await self.check()
        self._checking.start()

    async def close(self) -> None:
        """Stop the queries."""
        await self._checking.close()

    def trouble(self, session: Session) -> str | None:
        """Return the fault of a session's instance, in sentences; None if there is none."""
        if session.record.request.layer is not LayerName.MIG or session.record.gpus_unknown:
            return None
        if not session.gpus:
            return INSTANCE_GONE
        for gpu in session.gpus:
            state = self._states().get(gpu.uuid)
            if state is not None and not state.healthy:
                return instance_failed(gpu.label, state.trouble)
        return None

    async def check(self) -> None:
        """Query the driver, and update the list."""
        instances = await self._answers.answer(self._query, ANSWER_WITHIN) if self._query is not None else None
        if instances is None:
            return
        now = {gpu.uuid for gpu in instances}
        used = {gpu.uuid for session in self._sessions.values() for gpu in session.gpus}
        for gpu in instances:
            recorded = self._gpus.get(gpu.uuid)
            if recorded is not None and recorded != gpu and gpu.uuid not in used:
                # the driver makes UUIDs of the ids of GPU and instance, which another instance can have
                # later
                log.info("%s (%s) is another instance now", recorded.label, gpu.uuid)
                self._drop(recorded)
                recorded = None
            if recorded is None:
                log.info("%s (%s) has come", gpu.label, gpu.uuid)
                self._add(gpu)
        for gpu in [gpu for gpu in self._gpus.values() if gpu.mig is not None]:
            # the instances of a GPU that does not answer still exist
            gone = gpu.uuid not in now and self._states()[gpu.uuid].trouble == GONE
            if gone and gpu.uuid not in used:
                log.info("%s (%s) is gone", gpu.label, gpu.uuid)
                self._drop(gpu)
