"""The agent of one machine, composed of its parts: GPUs, sessions, requests, checks and reports.

`SessionChecks` checks each session every second or so: confirmation, socket, memory budget, use, record. A cluster's
part is in agent/kubernetes; the command is in command.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from gpushare_spawner.agent.control_requests import ControlRequests
from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState
from gpushare_spawner.agent.gpus.samples import MemoryQueries
from gpushare_spawner.agent.memory import host_memory
from gpushare_spawner.agent.memory.host_memory import HostMemorySettings, MemorySession, NodeMemory
from gpushare_spawner.agent.memory.session_limit import MemoryHolds
from gpushare_spawner.agent.mig import InstanceSettings, InstanceWatch
from gpushare_spawner.agent.mps import MpsDaemons, MpsSettings
from gpushare_spawner.agent.periodic import GpuSource, Rounds, RoundSettings
from gpushare_spawner.agent.report import GpuHealth, NodeReports
from gpushare_spawner.agent.sessions.conversation import Conversation
from gpushare_spawner.agent.sessions.environment import Libraries
from gpushare_spawner.agent.sessions.processes import (
    ContextMemory,
    UnclaimedMemory,
    UnconnectedProcesses,
    claimed_bytes,
)
from gpushare_spawner.agent.sessions.registry import SessionRegistry
from gpushare_spawner.agent.sessions.session import Activity, Session
from gpushare_spawner.agent.sessions.tiers import Shares
from gpushare_spawner.agent.sockets.session_socket import ProcessEndpoints, SessionEndpoints
from gpushare_spawner.agent.state.cordons import Cordons
from gpushare_spawner.agent.state.folder import Discarded, StateFolder
from gpushare_spawner.agent.state.records import SessionRecord
from gpushare_spawner.agent.suspend.driver import DriverCheckpoints
from gpushare_spawner.agent.suspend.suspender import Suspender
from gpushare_spawner.arbiter import ArbiterSettings
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.wall_clock import WallClock
from gpushare_spawner.wording.amounts import memory

log = logging.getLogger(__name__)


class SessionChecks:
    """Checks of all sessions: ends unconfirmed sessions, retries failed actions, and keeps activity on disk."""

    def __init__(
        self,
        registry: SessionRegistry,
        memory: NodeMemory,
        discarded: Discarded,
        save_every: float,
        clock: Callable[[], float],
    ) -> None:
        """Store the parts of the agent. `save_every`: see RoundSettings. `clock` gives seconds since the epoch."""
        self._registry = registry
        self._memory = memory
        self._discarded = discarded
        self._save_every = save_every
        self._clock = clock
        self._draining: asyncio.Future[None] | None = None

    def check(self) -> None:
        """Check all sessions once. An error affects one session only."""
        now = self._clock()
        for session in list(self._registry.sessions.values()):
            try:
                self._check_session(session, now)
            except Exception:
                log.exception("cannot check session %s; retrying", session.id)
        self._registry.watch.poll()
        self._registry.store.retry()
        if not self._discarded.empty and (self._draining is None or self._draining.done()):
            self._draining = asyncio.get_running_loop().run_in_executor(None, self._discarded.drain)

    def _check_session(self, session: Session, now: float) -> None:
        if overdue(session, now):
            confirm_within = session.record.request.confirm_within
            self._registry.end(session.id, f"not confirmed within {confirm_within:g} s")
            return
        if session.record.yields_until is not None and now >= session.record.yields_until:
            self._registry.tiers.stop_yielding([session], "no spawn in quota came for the units that it gave up")
        if session.socket is None and self._registry.listen(session) is None:
            log.info("session %s: its socket was created", session.id)
        if session.memory is not None:
            session.memory.trim()
        if session.cuda and not session.budget_checked:
            session.budget_checked = True
            self._check_budget(session)
        if session.moved or session.record.gpu_busy or session.lent_units:
            self._registry.tiers.check_use(session)
            doing = self._registry.activity(session)
            if now >= session.saved_at + self._save_every and record_is_behind(session, doing):
                self._registry.save(session)
            # a burst still runs, or its end is to be written later
            session.moved = doing.busy or record_is_behind(session, doing)

    def _check_budget(self, session: Session) -> None:
        """Log a promise of the form that the server's memory limit does not allow."""
        shortage = self._memory.shortage(session)
        if shortage is None:
            return
        budget, guaranteed = (memory(amount) for amount in shortage)
        log.warning(
            "session %s: the memory limit of its server leaves %s for GPU memory that is paged out, and its share "
            "guarantees %s; allocations beyond that fail. Raise resources.memory.limit of template %s",
            session.id,
            budget,
            guaranteed,
            session.record.request.template,
        )


def overdue(session: Session, now: float) -> bool:
    """Return whether the session's time for the confirmation is over (`now`: seconds since the epoch)."""
    record = session.record
    return record.owner is None and now > record.begun + record.request.confirm_within


def record_is_behind(session: Session, doing: Activity) -> bool:
    """Return whether the session's record differs from its activity."""
    record = session.record
    return (doing.busy, doing.last, session.memory_hits) != (
        record.gpu_busy,
        record.last_gpu_activity,
        record.memory_hits,
    )


@dataclass(frozen=True)
class NodeSettings:
    """Settings of an agent."""

    name: str
    capacity_units: int = UNITS_PER_GPU
    """Units of 1 % that may be guaranteed on each GPU."""
    arbiter: ArbiterSettings = field(default_factory=ArbiterSettings)
    rounds: RoundSettings = field(default_factory=RoundSettings)
    host_memory: HostMemorySettings = field(default_factory=HostMemorySettings)
    mps: MpsSettings = field(default_factory=MpsSettings)
    instances: InstanceSettings = field(default_factory=InstanceSettings)


class Node:
    """One machine. Everything runs on the event loop; calls that may block run in threads."""

    def __init__(
        self,
        settings: NodeSettings,
        gpus: Iterable[Gpu],
        source: GpuSource,
        folder: StateFolder,
        libraries: Libraries,
        endpoints: SessionEndpoints | None = None,
        instances: Callable[[], tuple[Gpu, ...] | None] | None = None,
        clock: WallClock | None = None,
    ) -> None:
        """Compose the parts. `endpoints` makes the sockets of sessions; None: those of processes.

        `instances` returns the present MIG instances, or None where the driver does not answer; without it the
        list of GPUs never changes.
        """
        self.settings = settings
        self.wall_clock = clock if clock is not None else WallClock()
        """Seconds since the epoch."""
        self.state_folder = folder
        self._source = source
        sessions: dict[str, Session] = {}
        self._unconnected = UnconnectedProcesses(sessions)
        self.gpus: dict[str, Gpu] = {gpu.uuid: gpu for gpu in gpus}
        self.arbitrations: dict[str, GpuArbitration] = {uuid: self._arbitration(gpu) for uuid, gpu in self.gpus.items()}
        context_bytes = settings.arbiter.context_bytes
        memory = NodeMemory(settings.host_memory, self.gpus, sessions, context_bytes, self._paged_out)
        self.holds = MemoryHolds(asyncio.get_running_loop().time)
        self.holds.over = self._hold_over
        self._shares = shares = Shares(self.gpus.values(), settings.capacity_units, self.arbitrations)
        self.registry = SessionRegistry(
            sessions,
            self.gpus,
            self.arbitrations,
            shares,
            folder,
            endpoints if endpoints is not None else ProcessEndpoints(folder),
            memory_left=memory.left_for,
            holds=self.holds,
            converse=lambda session: Conversation(session, self),
            clock=self.wall_clock,
            changed=self.news,
        )
        self._checkpoints = DriverCheckpoints()
        self.suspensions = Suspender(
            self._checkpoints,
            self.arbitrations,
            sessions,
            source,
            memory.lacks_host_memory,
            self._save,
            self.news,
            self.registry.store,
            self.holds,
        )
        self._contexts = ContextMemory()
        self.registry.came, self.registry.went = self.suspensions.opened, self._went
        self.registry.left = self._left_suspended
        whole = {uuid: gpu for uuid, gpu in self.gpus.items() if gpu.mig is None}
        self.mps = MpsDaemons(settings.mps, whole, folder.mps, sessions, self.wall_clock, self.news)
        self._unclaimed = UnclaimedMemory(self.gpus, context_bytes)
        self.rounds = Rounds(settings.rounds, self.gpus, source, self._memory_seen, context_bytes)
        self.health = GpuHealth(self.gpus, lambda: self.rounds.states)
        self.instances = InstanceWatch(
            settings.instances, instances, self.gpus, sessions, lambda: self.rounds.states, self
        )
        self.cordons = Cordons(folder.cordons, self.wall_clock)
        self._reports = NodeReports(
            settings.name,
            settings.capacity_units,
            self.registry,
            self.arbitrations,
            lambda: self.rounds.states,
            self.health,
            memory,
            self.cordons,
            lambda session: self.mps.trouble(session) or self.instances.trouble(session),
            self.wall_clock,
        )
        self.requests = ControlRequests(
            self.registry,
            self.gpus,
            shares,
            self.health,
            self.cordons,
            self.mps,
            folder,
            libraries,
            self.report,
            self.wall_clock,
        )
        self.checks = SessionChecks(
            self.registry, memory, folder.discarded, settings.rounds.save_every, self.wall_clock
        )
        self.changed: Callable[[], None] = _nothing
        """Called when a session was opened, ended or has other units, and at intervals for activity alone."""

    async def start(self) -> None:
        """Restore the sessions of the state folder, and start the periodic checks."""
        left = self.state_folder.records.left()
        self.registry.restore()
        for record in left:
            self._left_suspended(record)
        await self.mps.start()
        await self.rounds.start(self.registry.sessions, self.checks.check)
        await self.instances.start()

    async def close(self) -> None:
        """Stop. The sessions stay in the state folder; their processes run on until the next agent starts."""
        await self.instances.close()
        await self.rounds.close()
        await self.mps.close()
        await self.suspensions.close()
        await self._checkpoints.close()
        await self.registry.close()
        for arbitration in self.arbitrations.values():
            arbitration.close()
        await self.registry.store.close()

    @property
    def sessions(self) -> Mapping[str, Session]:
        """The open sessions, by their ids."""
        return self.registry.sessions

    def report(self) -> Report:
        """Return the current report of this node."""
        self.wall_clock()  # moves the instants that the report reads
        return self._reports.node()

    # -- changes of the GPU list --

    def add_gpu(self, gpu: Gpu) -> None:
        """Add a new MIG instance."""
        self.gpus[gpu.uuid] = gpu
        self.arbitrations[gpu.uuid] = self._arbitration(gpu)
        self.rounds.add_gpu(gpu)
        self._gpus_changed()

    def drop_gpu(self, gpu: Gpu) -> None:
        """Remove a MIG instance without sessions."""
        self.arbitrations.pop(gpu.uuid).close()
        del self.gpus[gpu.uuid]
        self.rounds.drop_gpu(gpu)
        self._gpus_changed()

    def _gpus_changed(self) -> None:
        self._shares.set_gpus(self.gpus.values())
        self.news()

    def _arbitration(self, gpu: Gpu) -> GpuArbitration:
        made = GpuArbitration(gpu, self.settings.arbiter, source=self._source)
        made.memory_queries = MemoryQueries(gpu, self._source, made, self._memory_seen)
        made.attribute_unconnected(self._unconnected.sessions_of)
        return made

    # -- for conversations
    # ---------------------------------------------------------------------------------------------

    def work_begins(self, session: Session) -> None:
        """Restore a session's share: a burst is about to start."""
        self.registry.tiers.work_begins(session)

    def session_report(self, session: Session) -> SessionReport:
        """Return the current report of one session."""
        self.wall_clock()
        return self._reports.session(session)

    def sessions_on(self, gpu: str) -> tuple[int, int]:
        """Return the number of sessions on a GPU (UUID), and the number of those with work."""
        return self._reports.sessions_on(gpu)

    def largest_share(self, session: Session) -> int:
        """Return the largest share that a session can be changed to now, in units; 0: it cannot be changed."""
        if session.record.request.layer is not LayerName.NATIVE:
            return 0
        return self.registry.share_changes.largest(session)

    def ask_came(self) -> None:
        """Notify the service, and the listener of `changed`, of an observer's ask."""
        self.registry.ask_came()

    def news(self) -> None:
        """Notify the listener of `changed` that a session changed."""
        self.changed()

    # -- answers of the driver
    # -----------------------------------------------------------------------------------------

    def _memory_seen(self, states: Mapping[str, GpuState]) -> None:
        sessions = self.registry.sessions.values()
        claimed = claimed_bytes(states, sessions)
        self._contexts.update(states, sessions, claimed)
        unclaimed = self._unclaimed.update(states, claimed)
        host_memory.tell_arbiters(states, self.gpus, self.arbitrations, sessions, unclaimed)
        for session in sessions:
            for gpu in session.gpus:
                if gpu.uuid in states and session.conversation is not None:
                    session.conversation.believe_again(gpu.uuid)

    def _went(self, session: Session) -> None:
        self.suspensions.ended(session)
        self.mps.check_soon()

    def _hold_over(self, gpu: str) -> None:
        for session in self.sessions.values():
            if session.memory is not None and any(other.uuid == gpu for other in session.gpus):
                session.memory.hold_over(gpu)

    def _left_suspended(self, record: SessionRecord) -> None:
        """Resume processes that were suspended when their session ended."""
        gpu = self.gpus.get(next(iter(record.request.gpus), ""))
        if record.suspension is not None and gpu is not None:
            self.suspensions.resume_leftover(record, gpu)

    async def _save(self, session: Session) -> None:
        """Write a session's record to the disk. Raises OSError where the disk fails."""
        self.registry.save(session)
        await self.registry.store.flush()
        if self.registry.store.failure is not None:
            raise OSError(self.registry.store.failure)

    def _paged_out(self, session: MemorySession) -> int:
        return sum(self.arbitrations[gpu.uuid].snapshot(session.id).paged_out_bytes for gpu in session.gpus)


def _nothing() -> None:
    pass
