"""The agent of one machine, composed of its parts: GPUs, sessions, requests, checks and reports.

`SessionChecks` checks each session about once per second: confirmation, socket, memory budget, use, record. The
cluster's part is in agent/kubernetes; the command is in command.py.

`ControlRequests` answers the hub's requests: open, confirm and close sessions, change their tiers, report.
control_socket.py implements their socket.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuSource, GpuState
from gpushare_spawner.agent.gpus.samples import Energy
from gpushare_spawner.agent.mps import MpsDaemons, MpsFailed
from gpushare_spawner.agent.periodic import WELL, InstanceWatch, Rounds, RoundSettings
from gpushare_spawner.agent.session_limit import ExclusiveMemory
from gpushare_spawner.agent.session_records import Cordons, SessionRecord
from gpushare_spawner.agent.session_socket import ProcessEndpoints, SessionEndpoints
from gpushare_spawner.agent.sessions.attribution import BypassWatch, UnconnectedProcesses, UnstatedMemory
from gpushare_spawner.agent.sessions.conversation import Conversation
from gpushare_spawner.agent.sessions.enforcer import Enforcer
from gpushare_spawner.agent.sessions.environment import Libraries, mig_environment, mps_environment, session_environment
from gpushare_spawner.agent.sessions.host_memory import GpuMemoryBudget, HostMemorySettings, NodeMemory, inform_arbiters
from gpushare_spawner.agent.sessions.registry import SessionRegistry
from gpushare_spawner.agent.sessions.session import Activity, Session, update_bursts
from gpushare_spawner.agent.sessions.tiers import Shares
from gpushare_spawner.agent.state_folder import StateFolder
from gpushare_spawner.agent.suspend.checkpoints import DriverCheckpoints
from gpushare_spawner.agent.suspend.progress import SuspendParts
from gpushare_spawner.agent.suspend.suspender import Suspender
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.clocks import WallClock
from gpushare_spawner.model.control import (
    AnswerRequest,
    AskedAnswer,
    AskedRequest,
    CloseRequest,
    ConfirmRequest,
    ControlRefused,
    ControlsRequest,
    CordonRequest,
    MessageRequest,
    NoticeRequest,
    Opened,
    OpenRequest,
    ReportRequest,
    Request,
    ResizeRequest,
    StopProcessesRequest,
    TierRequest,
)
from gpushare_spawner.model.controls import MessageCause
from gpushare_spawner.model.layers import LAYERS, LayerName, Where, engine_environment
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.report import (
    ENDED_SECONDS,
    MAX_TROUBLE,
    MOST_ENDED,
    BypassingProcess,
    DeliveredReport,
    EndedSession,
    GpuReport,
    HostUseReport,
    Report,
    SessionReport,
    shared_fields,
)
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.wording.amounts import memory

log = logging.getLogger(__name__)


MAX_UID = 2**32 - 2
"""Largest uid. The kernel's uids have 32 bits, and the highest number means no user."""


class ControlRequests:
    """Checks the requests of the control socket and carries them out. Its methods raise ControlRefused."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._registry = node.registry
        self._gpus = node.gpus

    async def answer(self, request: Request) -> dict[str, Any]:
        """Carry out a request. The result is on disk before the answer.

        After a disk failure, no session is opened. Changes of open sessions remain in memory, and the report includes
        the failure.
        """
        result: dict[str, Any] = {}
        match request:
            case ReportRequest():
                return self._node.report().model_dump(mode="json")
            case OpenRequest():
                result = (await self._open_when_ready(request)).model_dump()
                await self._check_kept(request.id)
            case ConfirmRequest():
                self.confirm(request)
            case CordonRequest():
                await self.cordon(request)
            case CloseRequest():
                self._registry.end(request.id, "closed")
            case TierRequest():
                self.tier(request)
            case ResizeRequest():
                self._registry.tiers.resize(self._changeable(request.id), request)
            case NoticeRequest():
                self.notify(request)
            case ControlsRequest():
                await self._set_controls(request)
            case MessageRequest():
                self._registry.controls.message(self._session(request.id), request)
                if request.changed_cause is MessageCause.BYPASS:
                    self._session(request.id).to_stop = ()  # the notice names other processes now
            case StopProcessesRequest():
                self._node.enforcer.stop(self._session(request.id), request.processes)
            case AskedRequest():
                return AskedAnswer(asked=await self._registry.wait_for_ask(request.within)).model_dump()
            case AnswerRequest():
                self._registry.controls.answer(self._session(request.id), request.answer)
        await self._registry.store.flush()
        return result

    async def _open_when_ready(self, request: OpenRequest) -> Opened:
        """Open a session as soon as the layer's daemons are running on the GPUs."""
        if request.layer is not LayerName.MPS:
            return self.open(request)
        self._checked(request)
        try:
            async with self._node.mps.running(request.gpus):
                return self.open(request)
        except MpsFailed as error:
            raise ControlRefused("internal", f"the MPS daemon does not run: {error}") from None

    def open(self, request: OpenRequest) -> Opened:
        """Open or reopen a session. A refused request changes nothing."""
        gpus = self._checked(request)
        session = self._registry.sessions.get(request.id)
        is_new = session is None
        if session is not None:
            self._open_again(session, request)
        else:
            for gpu in gpus:
                units = request.on(gpu.uuid, request.share_units)
                owned = request.on(gpu.uuid, request.share_units - request.borrowed_units)
                self._node.shares.check_free_units(gpu, units, units - owned)
            session = self._registry.add(SessionRecord.opened(request, self._node.wall_clock()))
            indices = ", ".join(str(gpu.index) for gpu in gpus)
            log.info("session %s opened: %s on GPU %s", session.id, request.share, indices)
            if request.uid != os.geteuid() and (barrier := self._node.state_folder.barrier()) is not None:
                log.warning(
                    "uid %d cannot reach its socket: other users cannot enter %s (chmod o+x)", request.uid, barrier
                )
        reason = self._registry.listen(session) if session.socket is None else None
        if session.socket is None:
            if is_new:
                self._registry.end(session.id, "it has no socket")
            raise ControlRefused("internal", f"cannot create the socket of session {request.id}: {reason}")
        return Opened(environment=self._environment(session, session.socket.path))

    def _environment(self, session: Session, socket: Path) -> dict[str, str]:
        request = session.record.request
        if request.layer is LayerName.NATIVE:
            return session_environment(session.gpus, socket, self._node.libraries) | engine_environment(request.engine)
        gpu = session.gpus[0]
        if request.layer is LayerName.MIG:
            return mig_environment(gpu, socket, self._node.libraries)
        pipes, memory = self._node.mps.pipes(gpu.uuid), session.memory_limit(gpu)
        return mps_environment(gpu, socket, pipes, request.share_units, memory, self._node.libraries)

    async def _check_kept(self, name: str) -> None:
        """End a session that was just opened and is not on disk, and raise ControlRefused."""
        reason = await self._registry.store.missing(name)
        if reason is not None:
            self._registry.end(name, "its record cannot be written")
            raise ControlRefused(
                "internal",
                f"cannot store session {name} on disk: {reason}. It would be lost if the agent stopped. Free space "
                "for the agent's state folder, then start the server again",
            )

    def confirm(self, request: ConfirmRequest) -> None:
        """Associate a session with its server's process."""
        session = self._session(request.id)
        process = processes.named(request.pid)
        if process is None:
            raise ControlRefused(
                "bad-request",
                f"there is no process {request.pid} on this machine: session {request.id} stays unconfirmed",
            )
        self._registry.confirm(session, process)

    def tier(self, request: TierRequest) -> None:
        """Change the tier of a session."""
        self._registry.tiers.apply_request(self._changeable(request.id), request)

    def notify(self, request: NoticeRequest) -> None:
        """Send a notice to a session's user, or withdraw it."""
        self._registry.tiers.notify(self._session(request.id), request)

    async def _set_controls(self, request: ControlsRequest) -> None:
        """Set a session's controls. The user gets the answer when the controls are on disk, where they survive a crash.

        After a disk failure, the report includes the failure.
        """
        session = self._session(request.id)
        self._registry.controls.replace(session, request.controls)
        if request.answer is not None:
            await self._registry.store.flush()
            self._registry.controls.answer(session, request.answer)

    async def cordon(self, request: CordonRequest) -> None:
        """Cordon a GPU or the node, or end the cordon."""
        if request.gpu and request.gpu not in self._gpus:
            raise _unknown_gpu(request.gpu, self._gpus)
        if request.cordon is not None and request.cordon.gpu != request.gpu:
            raise ControlRefused(
                "bad-request", f"the cordon is for {request.cordon.gpu or 'the node'}, not for {request.gpu}"
            )
        try:
            await self._node.cordons.put(request.gpu, request.cordon)
        except OSError as error:
            raise ControlRefused("internal", f"cannot store the cordon on disk: {error.strerror or error}") from None
        place = f"GPU {self._gpus[request.gpu].index}" if request.gpu else "the node"
        if request.cordon is None:
            log.info("new sessions can be placed on %s again", place)
        else:
            log.info("no new sessions are placed on %s, by %s: %s", place, request.cordon.by, request.cordon.reason)

    def _checked(self, request: OpenRequest) -> tuple[Gpu, ...]:
        """Return the GPUs of a valid request."""
        try:
            _ = request.share
            if request.borrowed_units > request.share_units:
                raise ValueError(
                    f"borrowed_units: {request.borrowed_units} is more than the share of {request.share_units}"
                )
            if len(set(request.gpus)) < len(request.gpus):
                raise ValueError("gpus: the same GPU is listed twice")
            if not 0 <= request.uid <= MAX_UID:
                raise ValueError(f"uid: {request.uid} is not a user; a uid is a number from 0 to {MAX_UID}")
            if os.geteuid() not in (0, request.uid):
                raise ValueError(
                    f"uid: this agent runs as uid {os.geteuid()} and cannot give a socket to uid {request.uid}; "
                    "run it as root"
                )
            if Where.ONE_MACHINE not in LAYERS[request.layer].where:
                raise ValueError(f"layer: {LAYERS[request.layer].title} does not work on one machine")
            if request.layer is LayerName.MPS and len(request.gpus) > 1:
                raise ValueError("gpus: each GPU has its own MPS daemon, and a session can use only one of them")
            if request.layer is LayerName.MIG and len(request.gpus) > 1:
                raise ValueError("gpus: CUDA uses only one MIG instance")
            for uuid in request.gpus:
                if uuid in self._gpus and resolve_bytes(request.memory_limit, self._gpus[uuid].memory_bytes) <= 0:
                    raise ValueError(f"memory_limit: {request.memory_limit} leaves no memory")
        except ValueError as error:
            raise ControlRefused("bad-request", str(error)) from None
        for uuid in request.gpus:
            if uuid not in self._gpus:
                raise _unknown_gpu(uuid, self._gpus)
            if (trouble := self._node.rounds.trouble(uuid)) is not None:
                raise ControlRefused("unhealthy-gpu", trouble)
            self._check_layer(self._gpus[uuid], request)
        return tuple(self._gpus[uuid] for uuid in request.gpus)

    def _check_layer(self, gpu: Gpu, request: OpenRequest) -> None:
        if (request.layer is LayerName.MIG) is (gpu.mig is None):
            kind = "is a whole GPU" if gpu.mig is None else "is a MIG instance"
            raise ControlRefused(
                "no-capacity", f"{gpu.label} ({gpu.uuid}) {kind}: the layer {request.layer} cannot share it"
            )
        for session in self._registry.sessions.values():
            layer = session.record.request.layer
            if session.id != request.id and gpu in session.gpus and layer is not request.layer:
                raise ControlRefused(
                    "no-capacity",
                    f"GPU {gpu.index} ({gpu.uuid}) has sessions of the layer {layer}; a session of the layer "
                    f"{request.layer} needs a GPU without them",
                )

    def _open_again(self, session: Session, request: OpenRequest) -> None:
        before = session.record.request
        if any(getattr(before, name) != getattr(request, name) for name in ("share", "gpus", "uid", "engine", "layer")):
            raise ControlRefused(
                "exists",
                f"session {request.id} is open already, with {before.share} on {', '.join(before.gpus)} "
                f"for uid {before.uid}, the layer {before.layer} and the memory engine {before.engine}; close it first",
            )
        self._registry.reopen(session, request)

    def _changeable(self, name: str) -> Session:
        session = self._session(name)
        layer = LAYERS[session.record.request.layer]
        if not layer.reach:
            raise ControlRefused(
                "bad-request", f"with {layer.title} the share of session {name} is fixed until it stops"
            )
        return session

    def _session(self, name: str) -> Session:
        session = self._registry.sessions.get(name)
        if session is None:
            raise ControlRefused("unknown-session", f"no session {name} is open on this machine")
        return session


def _unknown_gpu(uuid: str, current: Iterable[str]) -> ControlRefused:
    return ControlRefused("unknown-gpu", f"this machine has no GPU {uuid}; it has {', '.join(current)}")


class SessionChecks:
    """Checks of all sessions: ends unconfirmed sessions, retries failed actions, and saves activity."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._registry = node.registry
        self._draining: asyncio.Future[None] | None = None

    def check(self) -> None:
        """Check all sessions once. An error affects only one session."""
        now = self._node.wall_clock()
        for session in list(self._registry.sessions.values()):
            try:
                self._check_session(session, now)
            except Exception:
                log.exception("cannot check session %s; retrying", session.id)
        self._registry.watch.poll()
        self._registry.store.retry()
        discarded = self._node.state_folder.discarded
        if not discarded.empty and (self._draining is None or self._draining.done()):
            self._draining = asyncio.get_running_loop().run_in_executor(None, discarded.drain)

    def _check_session(self, session: Session, now: float) -> None:
        if overdue(session, now):
            confirm_within = session.record.request.confirm_within
            self._registry.end(session.id, f"not confirmed within {confirm_within:g} s")
            return
        if session.record.yields_until is not None and now >= session.record.yields_until:
            unused = "no spawn in quota used the units that it gave up"
            why = "its budget is not checked" if session.record.background else unused
            self._registry.tiers.stop_yielding([session], why)
        if session.socket is None and self._registry.listen(session) is None:
            log.info("session %s: its socket was created", session.id)
        if session.memory is not None:
            session.memory.trim()
        if session.cuda and not session.budget_checked:
            session.budget_checked = True
            self._check_budget(session)
        if session.has_new_frames or session.record.gpu_busy or session.works_on_lent_units:
            self._registry.tiers.check_use(session)
            doing = self._registry.activity(session)
            if now >= session.saved_at + self._node.settings.rounds.save_every and record_is_behind(session, doing):
                self._registry.save(session)
            # a burst is still running, or its end must be written later
            session.has_new_frames = doing.busy or record_is_behind(session, doing)

    def _check_budget(self, session: Session) -> None:
        """Log a guarantee shown on the form that the server's memory limit does not allow."""
        shortage = self._node.memory.shortage(session)
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
    """Return whether the session's confirmation is overdue. `now`: seconds since the epoch."""
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


class Node:
    """One machine. Everything runs on the event loop, except calls that may block: they run in threads."""

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
        """Compose the parts. `endpoints` creates the sessions' sockets; None: the sockets for processes.

        `instances` returns the current MIG instances, or None if the driver does not answer; without `instances`, the
        list of GPUs never changes.
        """
        self.settings = settings
        self.wall_clock = clock if clock is not None else WallClock()
        """Seconds since the epoch."""
        self.state_folder = folder
        self.libraries = libraries
        self.source = source
        sessions: dict[str, Session] = {}
        self._unconnected = UnconnectedProcesses(sessions)
        self.gpus: dict[str, Gpu] = {gpu.uuid: gpu for gpu in gpus}
        self.arbitrations = {uuid: self._arbitration(gpu) for uuid, gpu in self.gpus.items()}
        context_bytes = settings.arbiter.context_bytes
        self.memory = NodeMemory(settings.host_memory, self.gpus, sessions, context_bytes, self._paged_out)
        self.exclusive_memory = ExclusiveMemory(asyncio.get_running_loop().time, self._exclusive_ended)
        self.shares = Shares(self.gpus.values(), settings.capacity_units, self.arbitrations)
        self.registry = SessionRegistry(
            sessions,
            self.shares,
            folder,
            endpoints if endpoints is not None else ProcessEndpoints(folder),
            memory_left=self.memory.left_for,
            exclusive_memory=self.exclusive_memory,
            converse=lambda session: Conversation(session, self.registry, self),
            clock=self.wall_clock,
            changed=self.news,
        )
        self._checkpoints = DriverCheckpoints()
        self.suspensions = Suspender(
            SuspendParts(
                checkpoints=self._checkpoints,
                arbitrations=self.arbitrations,
                sessions=sessions,
                source=source,
                exclusive_memory=self.exclusive_memory,
                records=self.registry.store,
                lacks_host_memory=self.memory.lacks_host_memory,
                save=self._save,
                news=self.news,
            )
        )
        self.registry.came, self.registry.went = self.suspensions.opened, self._went
        self.registry.left = self._left_suspended
        whole = {uuid: gpu for uuid, gpu in self.gpus.items() if gpu.mig is None}
        self.mps = MpsDaemons(whole, folder.mps, sessions, self.wall_clock, self.news)
        self._unstated = UnstatedMemory(self.gpus, context_bytes)
        self.enforcer = Enforcer(sessions, self.gpus.values(), self.news)
        self._energy = Energy()
        self._ended: deque[EndedSession] = deque(maxlen=MOST_ENDED)
        bypass = BypassWatch(self._unstated, self.enforcer.check)
        self.rounds = Rounds(settings.rounds, self.gpus, source, self._memory_seen, bypass)
        self.instances = InstanceWatch(instances, self.rounds, sessions, self._add_gpu, self._drop_gpu)
        self.cordons = Cordons(folder.cordons, self.wall_clock)
        self.requests = ControlRequests(self)
        self.checks = SessionChecks(self)
        self.changed: Callable[[], None] = _nothing
        """Callback for sessions that were opened, ended or have other units, and at intervals for activity alone."""

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
        """Stop. The sessions stay in the state folder; their processes keep running until the next agent starts."""
        await self.instances.close()
        await self.rounds.close()
        await self.enforcer.close()
        await self.mps.close()
        await self.suspensions.close()
        await self._checkpoints.close()
        await self.registry.close()
        for arbitration in self.arbitrations.values():
            arbitration.close()
        await self.registry.store.close()

    @property
    def sessions(self) -> Mapping[str, Session]:
        """The open sessions, by ID."""
        return self.registry.sessions

    def report(self) -> Report:
        """Return the current report of this node."""
        self.wall_clock()  # shifts the instants that the report contains
        on_gpus = self.memory.on_gpus()
        sessions = [self._session_report(session, on_gpus) for session in self.sessions.values()]
        trouble = self.registry.store.failure
        return Report(
            node=self.settings.name,
            published_at=self.wall_clock(),
            gpus=tuple(map(self._gpu_report, self.arbitrations.values())),
            sessions=tuple(sorted(sessions, key=lambda session: (session.begun, session.id))),  # oldest first
            ended=self._recently_ended(self.wall_clock()),
            host_memory=self.memory.report(on_gpus),
            state_trouble=trouble[:MAX_TROUBLE] if trouble is not None else None,
            supports_budgets=True,
            stop_trouble=self.enforcer.trouble,
        ).with_cordons(self.cordons.now)

    def _gpu_report(self, arbitration: GpuArbitration) -> GpuReport:
        gpu = arbitration.gpu
        now = {
            "healthy": self.rounds.healthy(gpu.uuid),
            "capacity_units": gpu.capacity(self.settings.capacity_units),
            "waiting": len(arbitration.waiting()),
        }
        measured = shared_fields(self.rounds.states[gpu.uuid], GpuReport)
        return GpuReport(**shared_fields(gpu, GpuReport) | measured | now)

    def session_report(self, session: Session) -> SessionReport:
        """Return the current report of one session."""
        self.wall_clock()
        return self._session_report(session, self.memory.on_gpus())

    def _session_report(self, session: Session, on_gpus: Mapping[str, GpuMemoryBudget]) -> SessionReport:
        update_bursts(session, self.arbitrations, self.wall_clock)
        return report_of_session(
            session,
            self.registry.activity(session),
            self.memory.of_session(session, on_gpus),
            self.memory.host_use(session),
            self.mps.trouble(session) or self.instances.trouble(session),
        )

    # -- changes of the GPU list --

    def _add_gpu(self, gpu: Gpu) -> None:
        self.gpus[gpu.uuid] = gpu
        self.arbitrations[gpu.uuid] = self._arbitration(gpu)
        self.rounds.states[gpu.uuid] = WELL
        self._gpus_changed()

    def _drop_gpu(self, gpu: Gpu) -> None:
        self.arbitrations.pop(gpu.uuid).close()
        del self.gpus[gpu.uuid]
        self.rounds.states.pop(gpu.uuid, None)
        self._gpus_changed()

    def _gpus_changed(self) -> None:
        self.shares.set_gpus(self.gpus.values())
        self.news()

    def _arbitration(self, gpu: Gpu) -> GpuArbitration:
        return GpuArbitration(
            gpu,
            self.settings.arbiter,
            source=self.source,
            sessions_of=self._unconnected.sessions_of,
            memory_seen=self._memory_seen,
        )

    def news(self) -> None:
        """Call `changed` for a changed session."""
        self.changed()

    # -- answers of the driver -----------------------------------------------------------------------------------------

    def _memory_seen(self, states: Mapping[str, GpuState]) -> None:
        sessions = self.sessions.values()
        for uuid, state in states.items():
            if state.power_watts is not None and uuid in self.arbitrations:
                self._count_energy(uuid, state.power_watts)
        self._unstated.update(states, sessions)
        inform_arbiters(states, self.gpus, self.arbitrations, sessions, self._unstated.amounts)
        for session in sessions:
            for gpu in session.gpus:
                if gpu.uuid in states and session.conversation is not None:
                    session.conversation.accept_again(gpu.uuid)

    def _count_energy(self, gpu: str, watts: float) -> None:
        arbitration = self.arbitrations[gpu]
        here = {name: session for name, session in self.sessions.items() if arbitration.gpu in session.gpus}
        used = {name: arbitration.recent_use(name).seconds for name in here}
        units = {name: session.record.request.on(gpu, session.record.effective_units) for name, session in here.items()}
        for name, joules in self._energy.divided(gpu, watts, arbitration.now(), used, units).items():
            record = here[name].record
            record.energy_joules += joules

    def _recently_ended(self, now: float) -> tuple[EndedSession, ...]:
        while self._ended and not now - ENDED_SECONDS <= self._ended[0].ended_at <= now + ENDED_SECONDS:
            self._ended.popleft()
        return tuple(self._ended)

    def _went(self, session: Session) -> None:
        if session.record.owner is not None:
            last = self.session_report(session)
            figures = shared_fields(last, EndedSession)
            self._ended.append(EndedSession(**figures | {"ended_at": self.wall_clock()}))
        self.suspensions.ended(session)
        self.mps.check_soon()

    def _exclusive_ended(self, gpu: str) -> None:
        for session in self.sessions.values():
            if session.memory is not None and any(other.uuid == gpu for other in session.gpus):
                session.memory.exclusive_ended(gpu)

    def _left_suspended(self, record: SessionRecord) -> None:
        """Resume processes that were suspended when their session ended."""
        gpu = self.gpus.get(next(iter(record.request.gpus), ""))
        if record.suspension is not None and gpu is not None:
            self.suspensions.resume_leftover(record, gpu)

    async def _save(self, session: Session) -> None:
        """Write a session's record to disk. Raises OSError if this fails."""
        self.registry.save(session)
        await self.registry.store.flush()
        if self.registry.store.failure is not None:
            raise OSError(self.registry.store.failure)

    def _paged_out(self, session: Session) -> int:
        return sum(self.arbitrations[gpu.uuid].snapshot(session.id).paged_out_bytes for gpu in session.gpus)


def report_of_session(
    session: Session,
    now: Activity,
    host_memory: tuple[int, int | None],
    host_use: HostUseReport | None,
    layer_trouble: str | None,
) -> SessionReport:
    """Return the report of a session with the activity `now`.

    `host_memory`: the bytes that the session can need, and its budget. `layer_trouble`: see SessionReport.
    """
    record, request = session.record, session.record.request
    stored = shared_fields(request, SessionReport) | shared_fields(record, SessionReport) | dict(record.controls)
    guaranteed = tuple(session.guaranteed.get(gpu, 0) for gpu in request.gpus)
    same = tuple(request.on(gpu, session.guaranteed_units) for gpu in request.gpus)
    current = {
        "time_limit_units": session.time_limit_units,
        "gpu_busy": now.busy,
        "last_gpu_activity": now.last,
        "gpu_seconds": now.gpu_seconds,
        "bursts": tuple(session.bursts),
        "delivered": DeliveredReport.of(now.delivered, request.gpus),
    }
    return SessionReport(
        **stored | current,
        layer_trouble=layer_trouble,
        guaranteed_units=session.guaranteed_units,
        guaranteed_each=() if guaranteed == same else guaranteed,
        yields=record.yields_until is not None,
        confirmed=record.owner is not None,
        pid=record.process.pid if record.process is not None else None,
        memory_bytes=now.memory_bytes,
        resident_bytes=now.resident_bytes,
        memory_limit_bytes=session.memory_limit(session.gpus[0]) if session.gpus and not record.gpus_unknown else 0,
        early_page_ins_used=now.early_page_ins_used,
        early_page_ins_unused=now.early_page_ins_unused,
        suspended=session.suspended,
        not_suspendable=session.not_suspendable,
        context_bytes=session.context_bytes,
        host_memory_needed_bytes=host_memory[0],
        host_memory_budget_bytes=host_memory[1],
        waiting=now.waiting,
        kernels=session.kernels.alive if session.kernels else None,
        kernels_busy=session.kernels.busy if session.kernels else None,
        last_kernel_activity=session.kernels.last_activity if session.kernels else None,
        processes=len(session.cuda),
        bypassing_pids=session.bypassing,
        exceeding=tuple(BypassingProcess(pid=process.pid, started=process.started) for process in session.exceeding),
        memory_limit_hits=session.memory_hits,
        host_use=host_use,
        lacks_requests=session.lacks_requests,
        asks=session.asks.waiting(),
    )


def _nothing() -> None:
    pass
