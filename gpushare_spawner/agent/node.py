"""The agent itself: the sessions of one machine, and what the hub asks for them."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState
from gpushare_spawner.agent.gpus.unconnected_processes import Strangers
from gpushare_spawner.agent.kubernetes.pods.pod_sockets import PodSockets
from gpushare_spawner.agent.memory.gpu_memory_queries import MemoryLooks
from gpushare_spawner.agent.memory.node_memory import HostMemorySettings, NodeMemory
from gpushare_spawner.agent.memory.session_memory import SessionMemory
from gpushare_spawner.agent.periodic import GpuSource, Rounds, RoundSettings
from gpushare_spawner.agent.report import gpu_report, node_report, session_report
from gpushare_spawner.agent.sessions import processes
from gpushare_spawner.agent.sessions.activity import Activity, activity, counted
from gpushare_spawner.agent.sessions.conversation import Conversation
from gpushare_spawner.agent.sessions.environment import Libraries, session_environment
from gpushare_spawner.agent.sessions.guaranteed_units import Shares
from gpushare_spawner.agent.sessions.process_watch import ProcessWatch
from gpushare_spawner.agent.sessions.session import Past, Session, SessionRecord
from gpushare_spawner.agent.sessions.tiers import Tiers
from gpushare_spawner.agent.sockets.connection import SESSION_CLOSED
from gpushare_spawner.agent.sockets.session_folder import PathTooLong, SessionFolder
from gpushare_spawner.agent.sockets.session_socket import SessionSocket
from gpushare_spawner.agent.state.session_records import Store, short_name
from gpushare_spawner.agent.state.state_folder import StateFolder
from gpushare_spawner.arbiter import ArbiterSettings
from gpushare_spawner.model.control import (
    AnnounceRequest,
    CloseRequest,
    ConfirmRequest,
    ControlRefused,
    ErrorCode,
    Failure,
    Opened,
    OpenRequest,
    ReportRequest,
    Request,
    TierRequest,
)
from gpushare_spawner.model.quantity import format_bytes, resolve_bytes
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.share import UNITS_PER_GPU, Share
from gpushare_spawner.model.tier import Tier

log = logging.getLogger(__name__)

MAX_UID = 2**32 - 2
"""The kernel's uids have 32 bits, and the highest number means none."""


@dataclass(frozen=True)
class NodeSettings:
    """How an agent works."""

    name: str
    capacity_units: int = UNITS_PER_GPU
    """Units of 1 % that may be guaranteed on each GPU."""
    arbiter: ArbiterSettings = field(default_factory=ArbiterSettings)
    rounds: RoundSettings = field(default_factory=RoundSettings)
    host_memory: HostMemorySettings = field(default_factory=HostMemorySettings)


class Node:
    """One machine. Everything runs on the event loop; what may block runs elsewhere."""

    def __init__(
        self, settings: NodeSettings, gpus: Iterable[Gpu], source: GpuSource, folder: StateFolder, libraries: Libraries
    ) -> None:
        self.settings = settings
        self.gpus: dict[str, Gpu] = {gpu.uuid: gpu for gpu in gpus}
        self.arbitrations: Mapping[str, GpuArbitration] = {
            uuid: GpuArbitration(gpu, settings.arbiter, source=source) for uuid, gpu in self.gpus.items()
        }
        for uuid, gpu in self.gpus.items():
            self.arbitrations[uuid].looks = MemoryLooks(gpu, source, self.arbitrations[uuid], self._memory_seen)
        self.store = Store(folder.records)
        self._folder = folder
        self._libraries = libraries
        self._sessions: dict[str, Session] = {}
        for arbitration in self.arbitrations.values():
            arbitration.find_strangers(Strangers(self._sessions).sessions_of)
        self._memory = NodeMemory(
            settings.host_memory, self.gpus, self._sessions, settings.arbiter.context_bytes, self._paged_out
        )
        self._shares = Shares(self.gpus.values(), settings.capacity_units, self.arbitrations)
        self._tiers = Tiers(self._shares, self._activity, self._save, self.wall_clock)
        self._watch = ProcessWatch(self._server_gone)
        self._rounds = Rounds(settings.rounds, self.gpus, source, self._memory_seen, settings.arbiter.context_bytes)
        self._draining: asyncio.Future[None] | None = None
        self.withheld: Mapping[str, str] = {}
        """GPUs (UUIDs) that are not to be given out, each with the reason."""
        self.changed: Callable[[], None] = _nothing
        """Called when a session came, went or holds something else, and now and then for no more than activity."""

    async def start(self) -> None:
        """Take up the sessions that the state folder knows, and begin to look around."""
        now = self.wall_clock()
        for record in self._folder.records.load():
            try:
                self._recover(record, now)
            except Exception:
                # a fault of one session affects no other session
                log.exception("session %s cannot be restored", record.request.id)
                self._sessions.pop(record.request.id, None)
        if self._sessions:
            log.info("%d sessions restored", len(self._sessions))
        self._folder.remove_strangers({short_name(name) for name in self._sessions})
        await self._rounds.start(self._sessions, self._look)

    def _recover(self, record: SessionRecord, now: float) -> None:
        if record.process is not None and not processes.alive(record.process):
            log.info("session %s ended while no agent ran", record.request.id)
            self.store.remove(record.request.id)
            return
        gpus = tuple(self.gpus[uuid] for uuid in record.request.gpus if uuid in self.gpus)
        if len(gpus) < len(record.request.gpus):
            log.error("session %s has a share of a GPU that this machine no longer has", record.request.id)
        session = Session(record, gpus, past=Past.recorded(record, restarted_at=now))
        self._take_up(session)
        if (reason := self._listen(session)) is not None:
            log.error("the socket of session %s cannot be made: %s", session.id, reason)

    async def close(self) -> None:
        """Stop. The sessions stay in the state folder; their processes run on unarbitrated until an agent is back."""
        await self._rounds.close()
        for session in self._sessions.values():
            self._save(session)
        self._watch.close()
        for session in self._sessions.values():
            if session.socket is not None:
                session.socket.close()
            if session.memory is not None:
                session.memory.close()
        for arbitration in self.arbitrations.values():
            arbitration.close()
        await self.store.close()

    # -- what the hub asks --------------------------------------------------------------------------------------------

    async def answer(self, request: Request) -> dict[str, Any]:
        """Do what is asked; the result is on the disk before it is answered. Raises ControlRefused."""
        result: dict[str, Any] = {}
        match request:
            case ReportRequest():
                return self.report().model_dump(mode="json")
            case OpenRequest():
                result = self.open(request).model_dump()
            case ConfirmRequest():
                self.confirm(request)
            case CloseRequest():
                self.end_session(request.id, "closed")
            case TierRequest():
                self.tier(request)
            case AnnounceRequest():
                self.announce(request)
        await self.store.flush()
        return result

    def open(self, request: OpenRequest) -> Opened:
        """Reserve a share. Raises ControlRefused and has changed nothing then."""
        gpus = self._checked(request)
        session = self._sessions.get(request.id)
        is_new = session is None
        if session is not None:
            self._open_again(session, request)
        else:
            for gpu in gpus:
                self._shares.check_room(gpu, request.share_units, request.borrowed_units)
            session = Session(SessionRecord.opened(request, self.wall_clock()), gpus)
            self._take_up(session)
            self._save(session)
            indices = ", ".join(str(gpu.index) for gpu in gpus)
            log.info("session %s opened: %d units on GPU %s", session.id, request.share_units, indices)
            if request.uid != os.geteuid() and (barrier := self._folder.barrier()) is not None:
                log.warning(
                    "uid %d will not reach its socket: %s lets nobody through (chmod o+x)", request.uid, barrier
                )
        reason = self._listen(session) if session.socket is None else None
        if session.socket is None:
            if is_new:
                self.end_session(session.id, "it has no socket")
            raise _refused("internal", f"the socket of session {request.id} cannot be made: {reason}")
        return Opened(environment=session_environment(session.gpus, session.socket.path, self._libraries))

    def hold(self, record: SessionRecord) -> Session:
        """Take in the session of a pod: the kubelet has given it the devices, so there is nothing to refuse.

        Of an older session of that id nothing is left. Raises KeyError for a GPU that is not this machine's.
        """
        session = Session(record, tuple(self.gpus[uuid] for uuid in record.request.gpus))
        self.end_session(session.id, "another pod took its place")
        self._take_up(session)
        self._save(session)
        self.listen_again(session)
        return session

    def listen_again(self, session: Session) -> None:
        """Make a pod's sockets, which may now be in other folders than before."""
        if session.socket is not None:
            session.socket.close()
            session.socket = None
        if (reason := self._listen(session)) is not None:
            log.error("the socket of session %s cannot be made: %s", session.id, reason)

    def keep(self, session: Session) -> None:
        """Write down what has been changed in its record."""
        self._save(session)

    def confirm(self, request: ConfirmRequest) -> None:
        """The session's server runs; from now on the session ends with it. Raises ControlRefused."""
        session = self._known(request.id)
        process = processes.named(request.pid)
        if process is None:
            raise _refused(
                "bad-request",
                f"there is no process {request.pid} on this machine: session {request.id} stays unconfirmed",
            )
        session.record.process = process
        self._watch.begin(session.id, process)
        self._save(session)

    def tier(self, request: TierRequest) -> None:
        """Move a session to a tier. Raises ControlRefused."""
        self._tiers.decide(self._known(request.id), request)

    def announce(self, request: AnnounceRequest) -> None:
        """Tell the user what comes. Raises ControlRefused."""
        self._tiers.announce(self._known(request.id), request)

    @property
    def sessions(self) -> Mapping[str, Session]:
        """Those that are open, by their ids."""
        return self._sessions

    @property
    def state_folder(self) -> StateFolder:
        """Where it keeps what outlives it."""
        return self._folder

    def healthy(self, gpu: str) -> bool:
        """Whether the GPU of that UUID answers its driver and may be given out."""
        return self.trouble(gpu) is None

    def trouble(self, gpu: str) -> str | None:
        """Why the GPU of that UUID may not be given out, in a sentence; None: it may."""
        if gpu in self.withheld:
            return self.withheld[gpu]
        state = self._rounds.states[gpu]
        return None if state.healthy else f"GPU {self.gpus[gpu].index} ({gpu}) {state.trouble}"

    def activity(self, session: Session) -> Activity:
        """What a session does on its GPUs now."""
        return self._activity(session)

    def move(self, session: Session, tier: Tier, units: int, reason: str) -> None:
        """Put a session into a tier that has been decided on."""
        self._tiers.move(session, tier, units, reason)

    def report(self) -> Report:
        """Everything, as it is now."""
        gpus = [
            gpu_report(
                gpu,
                replace(self._rounds.states[uuid], healthy=self.healthy(uuid)),
                self.settings.capacity_units,
                len(self.arbitrations[uuid].waiting()),
            )
            for uuid, gpu in self.gpus.items()
        ]
        sessions = [self.session_report(session) for session in self._sessions.values()]
        return node_report(self.settings.name, self.wall_clock(), gpus, sessions, self._memory.report())

    # -- what conversations need --------------------------------------------------------------------------------------

    def work_begins(self, session: Session) -> None:
        """A burst is about to start."""
        self._tiers.work_begins(session)

    def session_report(self, session: Session) -> SessionReport:
        """What is known about a session now."""
        return session_report(session, self._activity(session), self._memory.of_session(session))

    def sessions_on(self, gpu: str) -> tuple[int, int]:
        """Sessions on a GPU, and those of them with work."""
        views = [
            self.arbitrations[gpu].view(name) for name, one in self._sessions.items() if self.gpus[gpu] in one.gpus
        ]
        return len(views), sum(view.running or view.waiting for view in views)

    def wall_clock(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def news(self) -> None:
        """A session does something else than before, of which its record says nothing."""
        self.changed()

    # -- sessions come and go -----------------------------------------------------------------------------------------

    def end_session(self, name: str, reason: str, keep_folders: bool = False) -> None:
        """A session is over, its units are free. One that is not there is no error.

        `keep_folders` where its processes go on, as another session: what they have mounted stays.
        """
        session = self._sessions.get(name)
        if session is None:
            return
        log.info("session %s ends: %s", name, reason)
        self._watch.end(name)
        if session.socket is not None:
            session.socket.close(None if keep_folders else SESSION_CLOSED)
            if not keep_folders:
                try:
                    session.socket.remove()
                except OSError as error:
                    log.warning("the folder of session %s stays: %s", name, error)
        if session.memory is not None:
            session.memory.close()
        del self._sessions[name]
        self.store.remove(name)
        self._tiers.changed(self._shares.leave(session))
        self.changed()

    def _checked(self, request: OpenRequest) -> tuple[Gpu, ...]:
        """The GPUs of a request that makes sense."""
        try:
            Share(request.share_units, len(request.gpus))
            if request.borrowed_units > request.share_units:
                raise ValueError(
                    f"borrowed_units: {request.borrowed_units} is more than the share of {request.share_units}"
                )
            if len(set(request.gpus)) < len(request.gpus):
                raise ValueError("gpus: the same GPU is named twice")
            if not 0 <= request.uid <= MAX_UID:
                raise ValueError(f"uid: {request.uid} is no user; a uid is a number from 0 to {MAX_UID}")
            if os.geteuid() not in (0, request.uid):
                raise ValueError(
                    f"uid: this agent runs as uid {os.geteuid()} and cannot give a socket to uid {request.uid}; "
                    "run it as root"
                )
            for uuid in request.gpus:
                if uuid in self.gpus and resolve_bytes(request.memory_limit, self.gpus[uuid].memory_bytes) <= 0:
                    raise ValueError(f"memory_limit: {request.memory_limit} leaves no memory")
        except ValueError as error:
            raise _refused("bad-request", str(error)) from None
        for uuid in request.gpus:
            if uuid not in self.gpus:
                raise _refused("unknown-gpu", f"this machine has no GPU {uuid}; it has {', '.join(self.gpus)}")
            if (trouble := self.trouble(uuid)) is not None:
                raise _refused("unhealthy-gpu", trouble)
        return tuple(self.gpus[uuid] for uuid in request.gpus)

    def _open_again(self, session: Session, request: OpenRequest) -> None:
        """As if it were new: active, without a past, and to be confirmed."""
        before = session.record.request
        if (before.share_units, before.gpus, before.uid) != (request.share_units, request.gpus, request.uid):
            raise _refused(
                "exists",
                f"session {request.id} is open already, with {before.share_units} units on {', '.join(before.gpus)} "
                f"for uid {before.uid}; close it first",
            )
        self._watch.end(session.id)
        record = session.record
        record.request = request
        record.process = None
        record.opened_at = self.wall_clock()
        session.past = Past(
            gpu_seconds=session.past.gpu_seconds - self._activity(session).gpu_seconds,
            delivered_before=counted(self.arbitrations[gpu.uuid].view(session.id) for gpu in session.gpus),
        )
        session.kernels_said.clear()
        if session.memory is not None:
            session.memory.begin_anew({gpu.uuid: session.memory_limit(gpu) for gpu in session.gpus})
        self._tiers.move(session, Tier.ACTIVE, request.share_units, "it was opened again")

    def _take_up(self, session: Session) -> None:
        self._sessions[session.id] = session
        limits = {gpu.uuid: session.memory_limit(gpu) for gpu in session.gpus}
        session.memory = SessionMemory(
            limits,
            self.wall_clock,
            session.record.memory_hits,
            room=lambda gpu, kind: self._memory.room(session, gpu, kind),
        )
        session.conversation = Conversation(session, self)
        self._tiers.changed(other for other in self._shares.enter(session) if other is not session)
        if session.record.process is not None:
            self._watch.begin(session.id, session.record.process)

    def _listen(self, session: Session) -> str | None:
        """Make the session's socket; why not, if it cannot be made."""
        assert session.conversation is not None
        try:
            if session.record.pod is not None:
                session.socket = PodSockets(self._folder.pods, session.record.pod.grants, session.conversation)
                return None
            folder = SessionFolder(self._folder.sockets, short_name(session.id), self._folder.discarded)
            session.socket = SessionSocket(folder, session.record.request.uid, session.conversation)
        except (OSError, OverflowError, PathTooLong) as error:
            return str(error)
        return None

    def _server_gone(self, name: str) -> None:
        self.end_session(name, "its server's process is gone")

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _memory_seen(self, states: Mapping[str, GpuState]) -> None:
        """Tell the arbiters how much device memory the driver shows for each connected process.

        It bounds what a process uses of what it has allocated. NVML of a real driver is not known to count managed
        memory for the process that has it: there the bound is what is in use on the whole GPU.
        """
        for uuid, state in states.items():
            amounts: dict[int, int | None] = {}
            bounds: dict[int, int] = {}
            told: set[int] = set()
            for session in self._sessions.values():
                for connection in sorted(session.cuda, key=lambda one: one.number):
                    pid = connection.peer.pid
                    shown = state.processes.get(pid)
                    amounts[connection.number] = (0 if pid in told else shown.memory_bytes) if shown else None
                    told.add(pid)
                    if not self.gpus[uuid].simulated:
                        bounds[connection.number] = state.memory_used_bytes
                    elif shown is not None and shown.memory_bytes is not None:
                        bounds[connection.number] = shown.memory_bytes
            self.arbitrations[uuid].device_memory(amounts)
            if state.healthy:
                self.arbitrations[uuid].working_sets(bounds)

    # -- records ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = self.wall_clock()
        for session in list(self._sessions.values()):
            try:
                self._look_at(session, now)
            except Exception:
                log.exception("session %s cannot be checked; trying again", session.id)
        self._watch.look()
        self.store.retry()
        if not self._folder.discarded.empty and (self._draining is None or self._draining.done()):
            self._draining = asyncio.get_running_loop().run_in_executor(None, self._folder.discarded.drain)

    def _look_at(self, session: Session, now: float) -> None:
        name = session.id
        if self._rounds.overdue(session, now):
            self.end_session(name, f"nobody confirmed it within {session.record.request.confirm_within:g} s")
            return
        if session.socket is None and session.record.pod is None and self._listen(session) is None:
            log.info("session %s: its socket has been made", name)
        if session.memory is not None:
            session.memory.trim()
        if session.cuda and not session.budget_checked:
            session.budget_checked = True
            self._check_budget(session)
        if session.moved or session.record.gpu_busy:
            doing = self._activity(session)
            if self._rounds.worth_saving(session, doing, now):
                self._save(session)
            # a burst goes on, or its end is to be written later
            session.moved = (
                doing.busy
                or doing.last != session.record.last_gpu_activity
                or session.memory_hits != session.record.memory_hits
            )

    def _check_budget(self, session: Session) -> None:
        """Log a promise of the form that the server's memory limit does not allow."""
        shortage = self._memory.shortage(session)
        if shortage is None:
            return
        budget, guaranteed = (format_bytes(amount) for amount in shortage)
        log.warning(
            "session %s: the memory limit of its server leaves %s for GPU memory that is paged out, and its share "
            "guarantees %s; allocations beyond that fail. Raise resources.memory.limit of template %s",
            session.id,
            budget,
            guaranteed,
            session.record.request.template,
        )

    def _paged_out(self, session: Session) -> int:
        return sum(self.arbitrations[gpu.uuid].view(session.id).paged_out_bytes for gpu in session.gpus)

    def _activity(self, session: Session) -> Activity:
        return activity(session, self.arbitrations, self.wall_clock())

    def _save(self, session: Session) -> None:
        doing, record = self._activity(session), session.record
        record.gpu_busy, record.last_gpu_activity, record.gpu_seconds = doing.busy, doing.last, doing.gpu_seconds
        record.delivered = doing.delivered
        record.memory_hits = session.memory_hits
        session.saved_at = self.wall_clock()
        self.store.put(record)
        self.changed()

    def _known(self, name: str) -> Session:
        session = self._sessions.get(name)
        if session is None:
            raise _refused("unknown-session", f"no session {name} is open on this machine")
        return session


def _nothing() -> None:
    pass


def _refused(code: ErrorCode, message: str) -> ControlRefused:
    return ControlRefused(Failure(code=code, message=message))
