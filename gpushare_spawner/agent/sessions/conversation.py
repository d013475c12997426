"""Handling of the frames from a session's processes, and sending of the agent's frames.

docs/reference/protocol.md describes every frame. `BurstFrames` delays BUSY and IDLE frames for the arbiter while the
session is over its CPU budget: the arbiter then gets the last state of each process, a little later. The connections
are still read, so no process loses its connection because the agent is slow. `Conversation.status` is the record that a
notebook server reads. session_socket.py implements the sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.arbitration import NANOSECONDS
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.session_limit import SHOWN_PROCESSES
from gpushare_spawner.agent.session_socket import MALFORMED, NOT_ALLOWED, Connection, FairReading, FrameRefused
from gpushare_spawner.agent.sessions.cells import CellReport
from gpushare_spawner.agent.sessions.registry import SessionRegistry
from gpushare_spawner.agent.sessions.session import Kernels, Session, cells_status
from gpushare_spawner.arbiter.recent_use import WINDOW
from gpushare_spawner.model.controls import AskAnswer
from gpushare_spawner.model.frames import (
    MAX_TEXT_LETTERS,
    CellEvent,
    Feature,
    Frame,
    Kind,
    QueryTopic,
    Role,
    SessionMemoryTopic,
    gpu_bytes,
)
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import SessionReport, shared_fields
from gpushare_spawner.model.share_status import (
    AgentRecord,
    ControlsStatus,
    DeliveredStatus,
    GpuStatus,
    GpuTimeStatus,
    LimitHit,
    PendingAction,
    ProcessMemory,
    ServiceAnswer,
    ShareStatus,
)

BURST_FRAMES = frozenset({Kind.BUSY, Kind.IDLE})

Key = TypeVar("Key")


class BurstFrames(Generic[Key]):
    """Frames from a session's processes that the arbiter has not received yet. ``Key``: a process on a GPU."""

    def __init__(
        self,
        budget: FairReading,
        pass_on: Callable[[Key, Frame], None],
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
    ) -> None:
        """Create an empty buffer. ``pass_on`` passes a frame to the arbiter."""
        self._budget = budget
        self._pass_on = pass_on
        self._call_later = call_later
        self._delayed: dict[Key, tuple[Frame, ...]] = {}
        """Longest delay first."""
        self._timer: asyncio.TimerHandle | None = None

    def received(self, key: Key, frame: Frame) -> None:
        """Send the arbiter a BUSY or IDLE frame, now or later."""
        if not self._delayed and not self._budget.spare_in():
            self._pass_on(key, frame)  # the reader charges the time
            return
        delayed = self._delayed.get(key, ())
        # IDLE contains the busy time of the whole lease, so an intermediate pair can be dropped
        self._delayed[key] = (frame,) if delayed and delayed[0].kind is frame.kind else (*delayed[:1], frame)
        self._schedule()

    def catch_up(self, key: Key) -> None:
        """Pass a process's delayed frames to the arbiter before passing its next frame."""
        for frame in self._delayed.pop(key, ()):
            self._pass_on(key, frame)

    def forget(self, key: Key) -> None:
        """Drop the frames of a process that has disconnected."""
        self._delayed.pop(key, None)

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = self._call_later(self._budget.spare_in(), self._next)

    def _next(self) -> None:
        """Pass one process's frames per event loop iteration, so that other sessions get their turn."""
        self._timer = None
        if self._delayed and not self._budget.spare_in():
            key = next(iter(self._delayed))
            self._budget.charge(lambda: self.catch_up(key))
        if self._delayed:
            self._schedule()


_FOR_ARBITER = frozenset({Kind.REQUEST, Kind.RELEASE, Kind.MEMORY, Kind.IDLE, Kind.BUSY, Kind.PAGED_IN, Kind.PAGED_OUT})
_FOR_MEMORY = frozenset({Kind.RESERVE, Kind.RETURN})
_FROM_NOTEBOOKS = frozenset({Kind.KERNELS, Kind.QUERY, Kind.ASK, Kind.CELL})
MEMORY_EVERY = 0.01
"""Seconds between the times at which each process's last MEMORY frame takes effect."""
MEMORY_AT_ONCE = 4
"""Number of a session's MEMORY frames that take effect each time, one per process; the others follow."""
CONTEXT_BYTES = 512 * 2**20
"""Bytes to allocate for a process that is short of memory if the call does not state a size. See protocol.md."""
AGENT_FEATURES = Feature.PACE | Feature.RESERVE | Feature.USE | Feature.SUSPEND
"""Features of this agent, for WELCOME."""
OBSERVED_FEATURES = AGENT_FEATURES | Feature.OBSERVE
"""Features for an observer of a session on GPUs that another layer shares."""
MOST_COUNT = 2**53
"""Maximum execution count: larger numbers are not exact in JSON."""
_OF_OBSERVED_PROCESSES = frozenset({Kind.MEMORY, Kind.BUSY, Kind.IDLE})


class SuspendedProcesses(Protocol):
    """The processes that can be suspended: `agent.suspend`."""

    def joined(self, session: Session, connection: Connection) -> None:
        """Handle the HELLO of a CUDA process."""

    def left(self, session: Session, connection: Connection) -> None:
        """Handle the end of a CUDA process's connection."""

    def ready(self, session: Session, connection: Connection, frame: Frame) -> None:
        """Handle SUSPEND_READY of a CUDA process."""


class AgentParts(Protocol):
    """The parts of the agent above the sessions that a conversation uses."""

    @property
    def suspensions(self) -> SuspendedProcesses:
        """Handler of processes in sessions with engine `suspend`."""

    def session_report(self, session: Session) -> SessionReport:
        """Return the session's report as of now."""


class Conversation:
    """The frame handler of one session's socket."""

    def __init__(self, session: Session, registry: SessionRegistry, agent: AgentParts) -> None:
        assert session.memory is not None
        self._session = session
        self._limits = session.memory
        self._registry = registry
        self._agent = agent
        # cuDeviceGetUuid returns the UUID of the whole GPU; cuDeviceGetUuid_v2 returns the MIG instance's UUID
        whole = {gpu_bytes(gpu.whole): gpu.uuid for gpu in session.gpus if gpu.mig is not None}
        self._uuids = whole | {gpu_bytes(gpu.uuid): gpu.uuid for gpu in session.gpus}
        self._loop = asyncio.get_running_loop()
        self._memory_at = 0.0
        """Event loop time at which MEMORY frames last took effect."""
        self._memory: dict[tuple[Connection, str], Frame] = {}
        """MEMORY frames received since then, oldest first."""
        self._memory_timer: asyncio.TimerHandle | None = None
        self._bursts: BurstFrames[tuple[Connection, str]] | None = None
        """Created with the first connection: the session's connections share one budget."""

    def received(self, connection: Connection, frame: Frame) -> None:
        """Handle a frame. Raises FrameRefused before HELLO, for the wrong role, or for another session's GPU."""
        session = self._session
        if frame.kind is Kind.HELLO:
            self._hello(connection, frame)
        elif connection in session.cuda and frame.kind in _FOR_ARBITER | _FOR_MEMORY:
            uuid = self._uuids.get(frame.gpu)
            if uuid is None:
                raise FrameRefused(NOT_ALLOWED, f"{frame.kind.name} for a GPU that is not this session's")
            if session.observed:
                _check_observed(frame)
            session.has_new_frames = True
            if frame.kind in _FOR_MEMORY:
                self._limits.received(connection, uuid, frame)
                self.accept_again(uuid)
                return
            if frame.kind in (Kind.REQUEST, Kind.MEMORY):
                self._limits.states(connection, uuid, sum(frame.fields[:2]), frame.fields[1])
            if frame.kind is Kind.MEMORY:
                self._memory_stated(connection, uuid, frame)
                return
            if frame.kind is Kind.REQUEST:
                self._memory.pop((connection, uuid), None)  # this frame is newer
            if frame.kind in (Kind.REQUEST, Kind.BUSY):
                session.cell_history.worked(session.cells.pids(connection.number), self._loop.time())
                self._registry.tiers.work_begins(session)
            if frame.kind in BURST_FRAMES:
                self._burst_frames_of(connection).received((connection, uuid), frame)
                return
            if self._bursts is not None:
                self._bursts.catch_up((connection, uuid))
            self._pass_to_arbiter((connection, uuid), frame)
        elif connection in session.cuda and frame.kind is Kind.SUSPEND_READY and not session.observed:
            self._agent.suspensions.ready(session, connection, frame)
        elif connection in session.observers and frame.kind is Kind.QUERY:
            self._send_figures(connection)
        elif connection in session.notebooks and frame.kind in _FROM_NOTEBOOKS:
            if frame.kind is Kind.KERNELS:
                busy, alive, instant = frame.fields[:3]
                kernels = Kernels(
                    alive=min(alive, 100_000), busy=min(busy, alive, 100_000), last_activity=self._past(instant)
                )
                self._kernels_reported(connection, kernels)
            elif frame.kind is Kind.ASK:
                self._take_ask(connection, *frame.fields[:3])
            elif frame.kind is Kind.CELL:
                self._cell_event(connection, frame)
            elif frame.fields[0] == QueryTopic.CELLS:
                cells = cells_status(session, self._registry.arbitrations, self._registry.clock)
                connection.send_packet(AgentRecord(cells=cells).packet())
            else:
                connection.send_packet(AgentRecord(status=self.status()).packet())
        elif connection in session.connections:
            raise FrameRefused(NOT_ALLOWED, f"{frame.kind.name} is not allowed from this role")
        else:
            raise FrameRefused(MALFORMED, f"{frame.kind.name} before HELLO")

    def ended(self, connection: Connection) -> None:
        """Remove a process that has ended. Its leases go to other sessions."""
        session = self._session
        session.has_new_frames = True
        session.observers.discard(connection)
        if connection in session.notebooks:
            session.notebooks.discard(connection)
            self._kernels_reported(connection, None)
            session.cells.server_left(connection.number, self._loop.time())
            session.cell_history.abandoned()
        if connection in session.cuda:
            session.cuda.discard(connection)
            session.cells.process_left(connection.number)
            self._limits.leave(connection)
            for gpu in session.gpus:
                self._memory.pop((connection, gpu.uuid), None)
                if self._bursts is not None:
                    self._bursts.forget((connection, gpu.uuid))
                self._registry.arbitrations[gpu.uuid].leave(connection)
            self._agent.suspensions.left(session, connection)

    def send_tier(self) -> None:
        """Notify all processes of the session's tier."""
        record = self._session.record
        held = (record.effective_units, record.borrowed_units, self._session.guaranteed_units)
        for connection in self._session.connections - self._session.notebooks:
            connection.send(Kind.TIER, record.tier.depth, *held, record.request.share_units)
        self.send_changed()

    def send_memory(self) -> None:
        """Notify all processes of the session's memory limit and guarantee; CUDA shows the limit from then on."""
        for connection in self._session.cuda:
            self._send_devices(connection, Role.CUDA)
        for connection in self._session.observers:
            self._send_devices(connection, Role.OBSERVER)
        self.send_changed()

    def send_changed(self) -> None:
        """Notify the notebook servers that the session's status has changed."""
        self._send_record(AgentRecord())

    def send_answer(self, answer: AskAnswer) -> None:
        """Notify the notebook servers of the answer to an ask; the sender recognizes its number."""
        self._send_record(_answer_record(answer))

    def _send_record(self, record: AgentRecord) -> None:
        for connection in self._session.notebooks:
            connection.send_packet(record.packet())

    def accept_again(self, uuid: str) -> None:
        """Update the arbiter if the counted part of the stated memory has changed."""
        if not self._session.observed:
            for connection, managed, plain in self._limits.accepted_anew(uuid):
                self._registry.arbitrations[uuid].counts(connection, managed, plain)

    def _burst_frames_of(self, connection: Connection) -> BurstFrames[tuple[Connection, str]]:
        if self._bursts is None:
            self._bursts = BurstFrames(connection.reading, self._pass_to_arbiter, self._loop.call_later)
        return self._bursts

    def _pass_to_arbiter(self, process: tuple[Connection, str], frame: Frame) -> None:
        connection, uuid = process
        if frame.kind in (Kind.REQUEST, Kind.MEMORY) and not self._session.observed:
            # a process that is short of memory states the size of its next allocation, which can be a CUDA context
            spare = CONTEXT_BYTES if frame.kind is Kind.REQUEST and self._session.suspends else 0
            managed, plain, *others = frame.fields
            accepted = self._limits.accepted(connection, uuid, managed, plain, spare)
            frame = replace(frame, fields=(*accepted, *others))
        self._registry.arbitrations[uuid].receive(connection, frame)

    def _memory_stated(self, connection: Connection, uuid: str, frame: Frame) -> None:
        self._memory[connection, uuid] = frame
        if self._memory_timer is not None:
            return
        due = self._memory_at + MEMORY_EVERY
        if self._loop.time() >= due:
            self._pass_memory()
        else:
            self._memory_timer = self._loop.call_at(due, self._pass_memory)

    def _pass_memory(self) -> None:
        self._memory_timer = None
        self._memory_at = self._loop.time()
        for key in list(self._memory)[:MEMORY_AT_ONCE]:
            self._pass_to_arbiter(key, self._memory.pop(key))
        if self._memory:
            self._memory_timer = self._loop.call_at(self._memory_at + MEMORY_EVERY, self._pass_memory)

    def _kernels_reported(self, connection: Connection, kernels: Kernels | None) -> None:
        """Record a notebook server's report about the session's kernels. None if the server has disconnected."""
        session = self._session
        worked = any(reported.busy for reported in session.reported_kernels.values())
        if kernels is None:
            session.reported_kernels.pop(connection, None)
        else:
            session.reported_kernels[connection] = kernels
        works = any(reported.busy for reported in session.reported_kernels.values())
        if worked != works:
            self._registry.changed()

    def _take_ask(self, connection: Connection, number: int, kind: int, value: int) -> None:
        """Accept a notebook server's ask for the service, or answer it here."""
        if not 0 < number < 2**32:
            raise FrameRefused(MALFORMED, f"ASK with the number {number}")
        answer = self._session.asks.take(number, kind, value)
        if answer is not None:
            # only to this notebook server, because it can ask without limit
            connection.send_packet(_answer_record(answer).packet())
        else:
            self._registry.ask_came()

    def _cell_event(self, connection: Connection, frame: Frame) -> None:
        """Record an execution's event, and pass it to the listeners. Events of newer notebook servers are ignored."""
        event, number, kernel, text, pid, count, instant = frame.fields[:7]
        if not number:
            raise FrameRefused(MALFORMED, "CELL with the number 0")
        if event in list(CellEvent):
            at = self._past(instant)
            ago = self._registry.clock() - at if at is not None else 0.0
            report = CellReport(CellEvent(event), number, kernel, text, pid, min(count, MOST_COUNT), ago)
            cell = self._session.cells.received(report, connection.number, self._loop.time())
            if cell is not None:
                for listener in self._registry.cell_listeners:
                    listener(self._session, cell, report.event)

    def _hello(self, connection: Connection, frame: Frame) -> None:
        session, record = self._session, self._session.record
        if connection in session.connections:
            raise FrameRefused(MALFORMED, "a second HELLO")
        try:
            role = Role(frame.fields[0])
        except ValueError:
            raise FrameRefused(MALFORMED, f"HELLO with role {frame.fields[0]}") from None
        connection.greeted(frame.fields[3])
        if session.observed and role is Role.CUDA and Feature.OBSERVE not in connection.features:
            raise FrameRefused(
                NOT_ALLOWED, "HELLO without OBSERVE although another layer shares the GPU: is GPUSHARE_ENGINE unset?"
            )
        connection.send(
            Kind.WELCOME,
            record.request.share_units,
            record.tier.depth,
            record.effective_units,
            record.borrowed_units,
            int(session.converts_memory),
            # an observer awaits this many DEVICE and STATUS frames, and gets one frame without a GPU if
            # no GPU is left
            max(len(self._names(role)), role is Role.OBSERVER),
            self._features(role),
        )
        self._send_devices(connection, role)
        if role is Role.CUDA:
            session.cuda.add(connection)
            self._limits.join(connection, frame.fields[1])
            for gpu in session.gpus:
                paced, early = Feature.PACE in connection.features, Feature.PAGE_IN in connection.features
                self._registry.arbitrations[gpu.uuid].join(
                    connection, session.id, connection.peer.process, paced, early
                )
            self._agent.suspensions.joined(session, connection)
            # the pid in the process's own numbering is a statement, but it only divides the session's own work
            seen = processes.ancestry(connection.peer.pid) if connection.peer.process is not None else ()
            session.cells.process_joined(connection.number, seen or (frame.fields[1],))
        else:
            (session.observers if role is Role.OBSERVER else session.notebooks).add(connection)

    def _features(self, role: Role) -> Feature:
        """Return this agent's features for a process with that role."""
        cells = Feature.CELLS if role is Role.NOTEBOOK else Feature(0)
        if not self._session.observed:
            return AGENT_FEATURES | cells
        return Feature.OBSERVE if role is Role.CUDA else OBSERVED_FEATURES | cells

    def _names(self, role: Role) -> dict[bytes, str]:
        """Return the GPU UUIDs that a process with that role can know, each with its UUID in the report."""
        if role is Role.CUDA:
            return self._uuids
        gpus = self._session.gpus if role is Role.OBSERVER else ()
        return {gpu_bytes(gpu.uuid): gpu.uuid for gpu in gpus}

    def _send_devices(self, connection: Connection, role: Role) -> None:
        gpus = {gpu.uuid: gpu for gpu in self._session.gpus}
        for raw, uuid in self._names(role).items():
            gpu = gpus[uuid]
            amounts = self._session.memory_limit(gpu), self._session.memory_guarantee(gpu)
            connection.send(Kind.DEVICE, *amounts, gpu=raw)
        if role is Role.OBSERVER and not gpus:
            connection.send(Kind.DEVICE, 0, 0)

    def status(self) -> ShareStatus:
        """Return the session's share in the form that its notebook server reads."""
        session, record, now = self._session, self._session.record, self._registry.clock()
        report, largest_share = self._agent.session_report(session), self._registry.tiers.largest_share(session)
        last = now if report.gpu_busy else report.last_gpu_activity
        uses, hit, got = self._uses(), self._limits.hits.last, report.delivered
        native = report.layer is LayerName.NATIVE
        gpus = [self._gpu_status(gpu, uses[gpu.uuid].seconds) for gpu in session.gpus]
        return replace(
            ShareStatus(**shared_fields(report, ShareStatus)),
            layer="" if native else report.layer,
            layer_gpus=0 if native else len(report.gpus),
            layer_trouble=(report.layer_trouble or "")[:MAX_TEXT_LETTERS],
            guaranteed_each=tuple(here.guaranteed_units for here in report.each) if len(report.gpus) > 1 else (),
            borrowed_now_each=tuple(here.borrowed_now for here in report.each) if len(report.gpus) > 1 else (),
            idle_seconds=None if last is None else max(0.0, now - last),
            gpus=tuple(gpus) if native else own_gpus(gpus, len(report.gpus)),
            notice=None if record.notice is None else PendingAction.of(record.notice),
            not_suspendable=(session.not_suspendable or "")[:MAX_TEXT_LETTERS],
            processes=tuple(
                ProcessMemory(pid, uuid, size, utilisation=_part_of_window(use.of_process.get(process, 0.0)))
                for uuid, use in uses.items()
                for process, pid, size in self._limits.largest(uuid, use.of_process)
            ),
            limit_hit=None
            if hit is None
            else LimitHit(
                hit.limit, max(0.0, now - hit.at), hit.requested_bytes, hit.allocated_bytes, hit.pid,
                self._limits.hits.count,
            ),
            delivered=DeliveredStatus(
                got.entitled_seconds, got.delivered_seconds, got.waits, got.wait_p50_seconds, got.wait_p95_seconds,
                tuple(GpuTimeStatus(gpu.entitled_seconds, gpu.delivered_seconds) for gpu in got.gpus),
            ),
            controls=ControlsStatus.of(record.controls, record.messages, now, largest_share),
            takes_asks=True,
        )  # fmt: skip

    def _gpu_status(self, gpu: Gpu, used_seconds: float) -> GpuStatus:
        arbitration = self._registry.arbitrations[gpu.uuid]
        snapshot = arbitration.snapshot(self._session.id)
        sessions = [arbitration.snapshot(other.id) for other in self._registry.sessions.values() if gpu in other.gpus]
        return GpuStatus(
            uuid=gpu.uuid,
            memory_bytes=snapshot.memory_bytes,
            resident_bytes=snapshot.resident_bytes,
            limit_bytes=self._session.memory_limit(gpu),
            lease="held" if snapshot.held else "waiting" if snapshot.waiting else "none",
            sessions=len(sessions),
            sessions_with_work=sum(other.running or other.waiting for other in sessions),
            utilisation=_part_of_window(used_seconds),
        )

    def _send_figures(self, observer: Connection) -> None:
        """Answer a QUERY from a process that shows NVML's figures for the session."""
        for uuid, use in self._uses().items():
            gpu, pids = gpu_bytes(uuid), dict(self._limits.processes())
            if Feature.RESERVE in observer.features:
                for _, pid, size in self._limits.largest(uuid, use.of_process):
                    observer.send(Kind.SESSION_MEMORY, SessionMemoryTopic.PROCESS, pid, size, gpu=gpu)
            if Feature.USE in observer.features:
                # pid 0 is the session
                of_processes = [(pids[process], seconds) for process, seconds in use.of_process.items()]
                for pid, seconds in [(0, use.seconds), *(entry for entry in of_processes if entry[0])]:
                    observer.send(Kind.USE, pid, round(seconds * NANOSECONDS), round(WINDOW * NANOSECONDS), gpu=gpu)
        for gpu_of_session in self._session.gpus:
            status = self._gpu_status(gpu_of_session, 0.0)
            fields = (0, 0, 0, 0, 0, status.memory_bytes, 0, status.limit_bytes)
            observer.send(Kind.STATUS, *fields, gpu=gpu_bytes(gpu_of_session.uuid))
        if not self._session.gpus:
            observer.send(Kind.STATUS)

    def _uses(self) -> dict[str, _Use]:
        """Return the GPU time of the session and of its busiest processes in the last second, by GPU."""
        processes = {process.number: process for process, _ in self._limits.processes()}
        uses = {}
        for gpu in self._session.gpus:
            use = self._registry.arbitrations[gpu.uuid].recent_use(self._session.id)
            busiest = sorted(use.by_client, key=lambda entry: -entry[1])
            shown = [(processes[client], seconds) for client, seconds in busiest if client in processes]
            uses[gpu.uuid] = _Use(use.seconds, dict(shown[:SHOWN_PROCESSES]))
        return uses

    def _past(self, instant: int) -> float | None:
        """Convert an instant stated by a process to seconds since the epoch, never in the future; None for 0."""
        return min(instant / NANOSECONDS, self._registry.clock()) if instant else None


@dataclass(frozen=True)
class _Use:
    """GPU time in the last second on one GPU."""

    seconds: float
    """GPU seconds of the session."""
    of_process: Mapping[Connection, float]
    """GPU seconds of its busiest processes."""


def _part_of_window(seconds: float) -> float:
    return min(1.0, seconds / WINDOW)


def _answer_record(answer: AskAnswer) -> AgentRecord:
    return AgentRecord(answer=ServiceAnswer(answer.number, answer.done, answer.text))


def own_gpus(gpus: Sequence[GpuStatus], layer_gpus: int) -> tuple[GpuStatus, ...]:
    """Return the node's GPUs that are the session's own, if another layer assigned `layer_gpus` unknown GPUs to it.

    The GPUs on which the session has memory are its own.
    """
    if not 0 < layer_gpus < len(gpus):
        return tuple(gpus)
    largest = sorted(gpus, key=lambda gpu: -gpu.memory_bytes)[:layer_gpus]
    return tuple(gpu for gpu in gpus if gpu in largest)


def _check_observed(frame: Frame) -> None:
    """Raise FrameRefused for a frame that a process must not send if another layer shares the GPU."""
    if frame.kind not in _OF_OBSERVED_PROCESSES:
        raise FrameRefused(NOT_ALLOWED, f"{frame.kind.name} where another layer shares the GPU")
    if frame.kind is not Kind.MEMORY and frame.fields[0]:
        raise FrameRefused(
            NOT_ALLOWED, f"{frame.kind.name} of a lease although another layer shares the GPU: there are no leases"
        )
