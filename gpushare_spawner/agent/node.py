"""The agent itself: the sessions of one machine, what the hub asks for them, and what they do."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.activity import Activity, Past, activity
from gpushare_spawner.agent.arbitration import GpuArbitration
from gpushare_spawner.agent.bypass import bypassing
from gpushare_spawner.agent.conversation import Conversation
from gpushare_spawner.agent.environment import Libraries, session_environment
from gpushare_spawner.agent.gpus import Gpu, GpuState
from gpushare_spawner.agent.report import gpu_report, node_report, session_report
from gpushare_spawner.agent.session_folder import PathTooLong, SessionFolder
from gpushare_spawner.agent.session_socket import SESSION_CLOSED, SessionSocket
from gpushare_spawner.agent.sessions import Session, SessionRecord
from gpushare_spawner.agent.shares import Shares
from gpushare_spawner.agent.state_folder import StateFolder
from gpushare_spawner.agent.store import Store, short_name
from gpushare_spawner.agent.watch import ProcessWatch
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
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.report import Announcement, Report, SessionReport
from gpushare_spawner.model.share import UNITS_PER_GPU, Share
from gpushare_spawner.model.tier import Tier

log = logging.getLogger(__name__)


class GpuSource(Protocol):
    """Where the state of GPUs comes from: NVML."""

    def state(self, gpu: Gpu) -> GpuState:
        """What it says now; may block for milliseconds."""


@dataclass(frozen=True)
class NodeSettings:
    """How an agent works."""

    name: str
    capacity_units: int = UNITS_PER_GPU
    """Units of 1 % that may be guaranteed on each GPU."""
    arbiter: ArbiterSettings = field(default_factory=ArbiterSettings)
    look_every: float = 1.0
    """Seconds between looks at unconfirmed sessions and processes."""
    poll_every: float = 5.0
    """Seconds between questions to NVML."""
    worth_writing: float = 10.0
    """Seconds of newer activity after which a session's record is written again."""


class Node:
    """One machine. All methods run on the event loop; what may block runs elsewhere."""

    def __init__(
        self, settings: NodeSettings, gpus: Iterable[Gpu], source: GpuSource, folder: StateFolder, libraries: Libraries
    ) -> None:
        self.settings = settings
        self.gpus: dict[str, Gpu] = {gpu.uuid: gpu for gpu in gpus}
        self.arbitrations: Mapping[str, GpuArbitration] = {
            uuid: GpuArbitration(gpu, settings.arbiter) for uuid, gpu in self.gpus.items()
        }
        self._source = source
        self._folder = folder
        self._libraries = libraries
        self._states = {uuid: GpuState(healthy=True) for uuid in self.gpus}
        self._sessions: dict[str, Session] = {}
        self._conversations: dict[str, Conversation] = {}
        self._pasts: dict[str, Past] = {}
        self._shares = Shares(self.gpus.values(), settings.capacity_units, self.arbitrations)
        self._store = Store(folder.records)
        self._watch = ProcessWatch(self._server_gone)
        self._suspects: dict[str, set[int]] = {}
        self._rounds: list[asyncio.Task[None]] = []

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take up the sessions that the state folder knows, and begin to look around."""
        now = self.wall_clock()
        for record in self._folder.records.load():
            if record.process is not None and not processes.alive(record.process):
                log.info("session %s ended while no agent ran", record.request.id)
                self._forget_on_disk(record.request.id)
                continue
            gpus = tuple(self.gpus[uuid] for uuid in record.request.gpus if uuid in self.gpus)
            if len(gpus) < len(record.request.gpus):
                log.error("session %s has a share of a GPU that this machine no longer has", record.request.id)
            self._take_up(Session(record, gpus), restarted_at=now)
        if self._sessions:
            log.info("%d sessions taken up again", len(self._sessions))
        self._folder.remove_strangers({short_name(name) for name in self._sessions})
        await self._poll()
        self._rounds = [
            asyncio.create_task(self._every(self.settings.look_every, self._look)),
            asyncio.create_task(self._every(self.settings.poll_every, self._poll)),
        ]

    async def close(self) -> None:
        """Stop. The sessions stay in the state folder; their processes run on unarbitrated until an agent is back."""
        for task in self._rounds:
            task.cancel()
        await asyncio.gather(*self._rounds, return_exceptions=True)
        for session in self._sessions.values():
            self._save(session)
        self._watch.close()
        for session in self._sessions.values():
            if session.socket is not None:
                session.socket.close()
        for arbitration in self.arbitrations.values():
            arbitration.close()
        await self._store.close()

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
        await self._store.flush()
        return result

    def open(self, request: OpenRequest) -> Opened:
        """Reserve a share. Raises ControlRefused and has changed nothing then."""
        gpus = self._checked(request)
        known = self._sessions.get(request.id)
        if known is not None:
            self._open_again(known, request)
            session = known
        else:
            for gpu in gpus:
                self._shares.check_room(gpu, request.share_units, request.borrowed_units)
            session = Session(SessionRecord.opened(request, self.wall_clock()), gpus)
            self._take_up(session)
            self._save(session)
            log.info(
                "session %s opened: %d units on GPU %s",
                request.id,
                request.share_units,
                _listed(gpu.index for gpu in gpus),
            )
        if session.socket is None:
            reason = self._listen(session)
            if session.socket is None:
                if known is None:
                    self.end_session(request.id, "it has no socket")
                raise _refused("internal", f"the socket of session {request.id} cannot be made: {reason}")
        return Opened(environment=session_environment(session.gpus, session.socket.folder.socket_path, self._libraries))

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
        """Move a session to a tier. Raises ControlRefused: `busy` if it worked after what the service had seen."""
        session = self._known(request.id)
        share = session.record.request.share_units
        right = {Tier.ACTIVE: share, Tier.RELEASED: 0}.get(request.tier)
        if request.effective_units > share or right not in (None, request.effective_units):
            raise _refused(
                "bad-request",
                f"effective_units: {request.effective_units} does not go with tier {request.tier} of {share} units",
            )
        if request.if_idle_since is not None:
            now = self._activity(session)
            if now.busy or (now.last is not None and now.last > request.if_idle_since):
                raise _refused("busy", f"session {request.id} has worked on the GPU in the meantime")
        self._move(session, request.tier, request.effective_units, request.reason)

    def announce(self, request: AnnounceRequest) -> None:
        """Tell the user what comes. Raises ControlRefused."""
        session = self._known(request.id)
        if request.tier is None:
            session.record.announcement = None
        else:
            session.record.announcement = Announcement(
                tier=request.tier, at=request.at, reason=request.reason, effective_units=request.effective_units
            )
        self._conversations[session.id].tell_announcement()
        self._save(session)

    def report(self) -> Report:
        """Everything, as it is now."""
        gpus = [
            gpu_report(gpu, self._states[uuid], self.settings.capacity_units, len(self.arbitrations[uuid].waiting()))
            for uuid, gpu in self.gpus.items()
        ]
        sessions = {name: self.session_report(session) for name, session in self._sessions.items()}
        return node_report(self.settings.name, self.wall_clock(), gpus, sessions)

    # -- what conversations need --------------------------------------------------------------------------------------

    def work_begins(self, session: Session) -> None:
        """Up is the agent's decision, at once: whoever works has its whole share, and is not about to lose it."""
        record = session.record
        if record.tier is not Tier.ACTIVE:
            self._move(session, Tier.ACTIVE, record.request.share_units, "it has work again")
        elif record.announcement is not None:
            record.announcement = None
            self._conversations[session.id].tell_announcement()
            self._save(session)

    def session_report(self, session: Session) -> SessionReport:
        """What is known about a session now."""
        return session_report(session, self._activity(session))

    def sessions_on(self, gpu: str) -> tuple[int, int]:
        """Sessions on a GPU, and those of them with work."""
        views = [
            self.arbitrations[gpu].view(name) for name, one in self._sessions.items() if self.gpus[gpu] in one.gpus
        ]
        return len(views), sum(view.running or view.waiting for view in views)

    def wall_clock(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    # -- sessions come and go -----------------------------------------------------------------------------------------

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
            if request.uid < 0:
                raise ValueError(f"uid: {request.uid} is no user")
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
            if not self._states[uuid].healthy:
                raise _refused("unhealthy-gpu", f"GPU {self.gpus[uuid].index} ({uuid}) does not answer its driver")
        return tuple(self.gpus[uuid] for uuid in request.gpus)

    def _open_again(self, session: Session, request: OpenRequest) -> None:
        """As if it were new: active, and to be confirmed."""
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
        self._move(session, Tier.ACTIVE, request.share_units, "it was opened again")

    def _take_up(self, session: Session, restarted_at: float | None = None) -> None:
        self._sessions[session.id] = session
        self._conversations[session.id] = Conversation(session, self)
        self._pasts[session.id] = Past(session, restarted_at)
        self._tell(self._shares.enter(session), but=session)
        if session.record.process is not None:
            self._watch.begin(session.id, session.record.process)
        if restarted_at is not None and (reason := self._listen(session)):
            log.error("the socket of session %s cannot be made: %s", session.id, reason)

    def _listen(self, session: Session) -> str | None:
        """Make the session's socket; why not, if it cannot be made."""
        try:
            folder = SessionFolder(self._folder.sockets, short_name(session.id))
            session.socket = SessionSocket(folder, session.record.request.uid, self._conversations[session.id])
        except (OSError, PathTooLong) as error:
            return str(error)
        return None

    def end_session(self, name: str, reason: str) -> None:
        """A session is over, its units are free. One that is not there is no error."""
        session = self._sessions.get(name)
        if session is None:
            return
        log.info("session %s ends: %s", name, reason)
        self._watch.end(name)
        if session.socket is not None:
            session.socket.close(SESSION_CLOSED)
            session.socket.folder.remove()
        del self._sessions[name], self._conversations[name], self._pasts[name]
        self._suspects.pop(name, None)
        self._forget_on_disk(name)
        self._tell(self._shares.leave(session))

    def _move(self, session: Session, tier: Tier, units: int, reason: str) -> None:
        record = session.record
        if (record.tier, record.effective_units) != (tier, units):
            log.info(
                "session %s: %s -> %s, %d of %d units: %s",
                session.id,
                record.tier,
                tier,
                units,
                record.request.share_units,
                reason,
            )
            record.tier, record.effective_units, record.tier_since = tier, units, self.wall_clock()
        if record.announcement is not None and (tier is Tier.ACTIVE or record.announcement.tier.depth <= tier.depth):
            record.announcement = None
            self._conversations[session.id].tell_announcement()
        self._tell([session, *(other for other in self._shares.change(session) if other is not session)])

    def _tell(self, sessions: Iterable[Session], but: Session | None = None) -> None:
        for session in sessions:
            if session is not but:
                self._conversations[session.id].tell_tier()
                self._save(session)

    def _server_gone(self, name: str) -> None:
        self.end_session(name, "its server's process is gone")

    # -- looking around -----------------------------------------------------------------------------------------------

    async def _every(self, seconds: float, look: Any) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await look()
            except Exception:
                log.exception("looking around failed; trying again in %g s", seconds)

    async def _look(self) -> None:
        now = self.wall_clock()
        for name, session in list(self._sessions.items()):
            record = session.record
            if record.process is None and now > record.opened_at + record.request.confirm_within:
                self.end_session(name, f"nobody confirmed it within {record.request.confirm_within:g} s")
                continue
            doing = self._activity(session)
            news = (doing.last or 0.0) - (record.last_gpu_activity or 0.0)
            if doing.busy != record.gpu_busy or news >= self.settings.worth_writing:
                self._save(session)
        self._watch.look()
        self._store.retry()

    async def _poll(self) -> None:
        states = await asyncio.to_thread(lambda: {uuid: self._source.state(gpu) for uuid, gpu in self.gpus.items()})
        for uuid, state in states.items():
            if state.healthy != self._states[uuid].healthy:
                log.log(
                    logging.INFO if state.healthy else logging.ERROR,
                    "GPU %s %s",
                    uuid,
                    "answers again" if state.healthy else "does not answer its driver",
                )
        self._states = states
        await self._look_for_bypassing({pid for state in states.values() for pid in state.pids})

    async def _look_for_bypassing(self, gpu_pids: set[int]) -> None:
        sessions = self._sessions.values()
        connected = {connection.peer.pid for session in sessions for connection in session.cuda}
        roots = {session.id: session.record.process.pid for session in sessions if session.record.process is not None}
        sockets = {
            session.id: str(session.socket.folder.socket_path) for session in sessions if session.socket is not None
        }
        found: Mapping[str, tuple[int, ...]] = {}
        if sockets and gpu_pids - connected:
            found = await asyncio.to_thread(bypassing, gpu_pids, connected, roots, sockets)
        for name, session in self._sessions.items():
            # seen twice in a row: a process that has just called cuInit is about to connect
            pids = set(found.get(name, ()))
            sure = tuple(sorted(pids & self._suspects.get(name, set())))
            if set(sure) - set(session.bypassing):
                log.warning("session %s uses the GPU without the library, in processes %s", name, _listed(sure))
            session.bypassing = sure
            self._suspects[name] = pids

    # -- records ------------------------------------------------------------------------------------------------------

    def _activity(self, session: Session) -> Activity:
        return activity(session, self._pasts[session.id], self.arbitrations, self.wall_clock())

    def _save(self, session: Session) -> None:
        doing, record = self._activity(session), session.record
        record.gpu_busy, record.last_gpu_activity, record.gpu_seconds = doing.busy, doing.last, doing.gpu_seconds
        self._store.put(record)

    def _forget_on_disk(self, name: str) -> None:
        self._store.remove(name)

    def _known(self, name: str) -> Session:
        session = self._sessions.get(name)
        if session is None:
            raise _refused("unknown-session", f"no session {name} is open on this machine")
        return session


def _refused(code: ErrorCode, message: str) -> ControlRefused:
    return ControlRefused(Failure(code=code, message=message))


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
