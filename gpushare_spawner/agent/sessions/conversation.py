"""Handle the frames of a session's processes, and send the frames of the agent.

docs/reference/protocol.md describes every frame. `BurstFrames` delays BUSY and IDLE frames for the arbiter while the
session is over its CPU budget: the arbiter then gets the last state of each process, a little later. The connections
are still read, so no process loses its connection because the agent is slow. The `send_*` functions write the frames
CONTROLS and TEXT for observers. The sockets are in sockets/session_socket.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from gpushare_spawner.agent.gpus.arbitration import NANOSECONDS, GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.memory.session_limit import SHOWN_PROCESSES
from gpushare_spawner.agent.sessions.session import Kernels, Session
from gpushare_spawner.agent.sockets.connection import MALFORMED, NOT_ALLOWED, Connection, FrameRefused
from gpushare_spawner.arbiter.recent_use import WINDOW
from gpushare_spawner.model.controls import AskAnswer, Controls, Message
from gpushare_spawner.model.frames import (
    LACKS_REQUESTS,
    MAX_TEXT_LETTERS,
    NO_END,
    NO_GPU,
    SUSPENDED,
    YIELDS,
    Feature,
    Frame,
    Kind,
    LeaseState,
    Role,
    TextTopic,
    gpu_bytes,
    text_parts,
)
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import IdleCause, Tier

BURST_FRAMES = frozenset({Kind.BUSY, Kind.IDLE})

Key = TypeVar("Key")


class CpuBudget(Protocol):
    """The agent's CPU time that a session may use."""

    def spare_in(self) -> float:
        """Return the seconds until the budget exceeds what the session's connections need; 0 if it does now."""

    def charge(self, work: Callable[[], None]) -> None:
        """Do the work and count its CPU time."""


class BurstFrames(Generic[Key]):
    """Frames of a session's processes that the arbiter has not received. ``Key``: a process on a GPU."""

    def __init__(
        self,
        budget: CpuBudget,
        tell: Callable[[Key, Frame], None],
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
    ) -> None:
        """Create an empty buffer. ``tell`` passes a frame to the arbiter."""
        self._budget = budget
        self._tell = tell
        self._call_later = call_later
        self._held: dict[Key, tuple[Frame, ...]] = {}
        """Longest held first."""
        self._timer: asyncio.TimerHandle | None = None

    def received(self, key: Key, frame: Frame) -> None:
        """Send the arbiter a BUSY or IDLE frame, now or later."""
        if not self._held and not self._budget.spare_in():
            self._tell(key, frame)  # the reader counts the time
            return
        held = self._held.get(key, ())
        # IDLE has the busy time of the whole lease, so a pair in between can be left out
        self._held[key] = (frame,) if held and held[0].kind is frame.kind else (*held[:1], frame)
        self._schedule()

    def catch_up(self, key: Key) -> None:
        """Pass a process's held frames to the arbiter before passing its next frame."""
        for frame in self._held.pop(key, ()):
            self._tell(key, frame)

    def forget(self, key: Key) -> None:
        """Drop the frames of a process that has left."""
        self._held.pop(key, None)

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = self._call_later(self._budget.spare_in(), self._next)

    def _next(self) -> None:
        """Pass one process's frames per event loop iteration, so that other sessions get their turn."""
        self._timer = None
        if self._held and not self._budget.spare_in():
            key = next(iter(self._held))
            self._budget.charge(lambda: self.catch_up(key))
        if self._held:
            self._schedule()


MILLISECONDS = 1000


class Receiver(Protocol):
    """A connection of an observer."""

    @property
    def features(self) -> Feature:
        """The features that the process supports."""

    def send(self, kind: Kind, *fields: int) -> None:
        """Send a frame."""


def send_controls(to: Receiver, controls: Controls, largest_share: int) -> None:
    """Send the end of the keep, the end of the exemption and the largest share.

    `largest_share`: the largest share in units; 0 if the share cannot be changed.
    """
    if Feature.CONTROLS not in to.features:
        return
    keep, exemption = controls.keep, controls.exemption
    exempt_until = 0
    if exemption is not None:
        exempt_until = NO_END if exemption.until is None else _milliseconds(exemption.until)
    to.send(Kind.CONTROLS, 0 if keep is None else _milliseconds(keep.until), exempt_until, largest_share)


def send_message(to: Receiver, message: Message) -> None:
    """Send an admin's message."""
    _send_text(to, TextTopic.MESSAGE, _milliseconds(message.at), message.text)


def send_answer(to: Receiver, answer: AskAnswer) -> None:
    """Send the answer to an ask."""
    _send_text(to, TextTopic.ANSWER, answer.number, answer.text, answer.done)


def send_not_suspendable(to: Receiver, reason: str) -> None:
    """Send the reason why the session cannot be suspended."""
    _send_text(to, TextTopic.NOT_SUSPENDABLE, 1, reason[:MAX_TEXT_LETTERS])


def send_layer(to: Receiver, layer: LayerName, gpus: int, trouble: str | None) -> None:
    """Send the sharing layer of so many GPUs, and its fault. Nothing is sent for our own layer."""
    if layer is not LayerName.NATIVE:
        _send_text(to, TextTopic.LAYER, gpus, layer)
        if trouble is not None:
            _send_text(to, TextTopic.LAYER_TROUBLE, 1, trouble[:MAX_TEXT_LETTERS])


def _send_text(to: Receiver, topic: TextTopic, number: int, text: str, done: bool = False) -> None:
    if Feature.CONTROLS in to.features:
        for part in text_parts(topic, number, text, done):
            to.send(Kind.TEXT, *part.fields())


def _milliseconds(instant: float) -> int:
    return round(instant * MILLISECONDS)


_FOR_ARBITER = frozenset({Kind.REQUEST, Kind.RELEASE, Kind.MEMORY, Kind.IDLE, Kind.BUSY, Kind.PAGED_IN, Kind.PAGED_OUT})
_FOR_MEMORY = frozenset({Kind.RESERVE, Kind.RETURN})
_FROM_OBSERVERS = frozenset({Kind.KERNELS, Kind.QUERY, Kind.ASK})
_NEVER = 2**64 - 1
_NO_FIGURES = (0, 0, 0, LeaseState.NONE, 0)
"""Fields of STATUS for a session whose GPU is gone, see `Conversation._figures`."""
MEMORY_EVERY = 0.01
"""Seconds between the times at which each process's last MEMORY frame takes effect."""
MEMORY_AT_ONCE = 4
"""Number of a session's processes whose MEMORY frame takes effect each time; the others follow."""
CONTEXT_BYTES = 512 * 2**20
"""Bytes to allocate for a process that is short of memory if the call does not state a size, see protocol.md."""
AGENT_FEATURES = (
    Feature.PACE
    | Feature.DELIVERED
    | Feature.RESERVE
    | Feature.CAUSE
    | Feature.CONTROLS
    | Feature.USE
    | Feature.SUSPEND
)
"""Features of this agent, for WELCOME."""
OBSERVED_FEATURES = AGENT_FEATURES | Feature.OBSERVE
"""Features for an observer of a session on GPUs that another layer shares."""
_OF_OBSERVED_PROCESSES = frozenset({Kind.MEMORY, Kind.BUSY, Kind.IDLE})


class SuspendedProcesses(Protocol):
    """The processes that can be suspended: `agent.suspend`."""

    def joined(self, session: Session, connection: Connection) -> None:
        """Handle the HELLO of a CUDA process."""

    def left(self, session: Session, connection: Connection) -> None:
        """Handle the end of a CUDA process's connection."""

    def ready(self, session: Session, connection: Connection, frame: Frame) -> None:
        """Handle SUSPEND_READY of a CUDA process."""


class Surroundings(Protocol):
    """The parts of the agent that a conversation uses."""

    @property
    def arbitrations(self) -> Mapping[str, GpuArbitration]:
        """Keyed by GPU UUID."""

    def work_begins(self, session: Session) -> None:
        """Restore a downgraded or released session before the lease request of a burst."""

    @property
    def suspensions(self) -> SuspendedProcesses:
        """Suspends sessions of engine `suspend`."""

    def session_report(self, session: Session) -> SessionReport:
        """Return the session's report as of now."""

    def sessions_on(self, gpu: str) -> tuple[int, int]:
        """Return the number of sessions on a GPU, and the number of those with work."""

    def largest_share(self, session: Session) -> int:
        """Return the largest share that the session can be changed to now, in units; 0: it cannot be changed."""

    def wall_clock(self) -> float:
        """Return seconds since the epoch."""

    def ask_came(self) -> None:
        """Handle an ask that waits for the service."""

    def news(self) -> None:
        """Report a change of activity that the session's record does not contain."""


class Conversation:
    """The frame handler of one session's socket."""

    def __init__(self, session: Session, surroundings: Surroundings) -> None:
        assert session.memory is not None
        self._session = session
        self._limits = session.memory
        self._around = surroundings
        # cuDeviceGetUuid gives programs the UUID of the whole GPU; cuDeviceGetUuid_v2 gives that of the MIG instance
        whole = {gpu_bytes(gpu.whole): gpu.uuid for gpu in session.gpus if gpu.mig is not None}
        self._uuids = whole | {gpu_bytes(gpu.uuid): gpu.uuid for gpu in session.gpus}
        self._loop = asyncio.get_running_loop()
        self._memory_at = 0.0
        """Time of the event loop at which MEMORY frames last took effect."""
        self._memory: dict[tuple[Connection, str], Frame] = {}
        """MEMORY frames since then, oldest first."""
        self._memory_timer: asyncio.TimerHandle | None = None
        self._bursts: BurstFrames[tuple[Connection, str]] | None = None
        """Created with the first connection: the session's connections share one budget."""

    def received(self, connection: Connection, frame: Frame) -> None:
        """Handle a frame. Raises FrameRefused before HELLO, for another role, or for a GPU of another session."""
        session = self._session
        if frame.kind is Kind.HELLO:
            self._hello(connection, frame)
        elif connection in session.cuda and frame.kind in _FOR_ARBITER | _FOR_MEMORY:
            uuid = self._uuids.get(frame.gpu)
            if uuid is None:
                raise FrameRefused(NOT_ALLOWED, f"{frame.kind.name} for a GPU that is not this session's")
            if session.observed:
                _check_observed(frame)
            session.moved = True
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
                self._around.work_begins(session)
            if frame.kind in BURST_FRAMES:
                self._burst_frames_of(connection).received((connection, uuid), frame)
                return
            if self._bursts is not None:
                self._bursts.catch_up((connection, uuid))
            self._tell_arbiter((connection, uuid), frame)
        elif connection in session.cuda and frame.kind is Kind.SUSPEND_READY and not session.observed:
            self._around.suspensions.ready(session, connection, frame)
        elif connection in session.observers and frame.kind in _FROM_OBSERVERS:
            if frame.kind is Kind.KERNELS:
                busy, alive, instant = frame.fields[:3]
                kernels = Kernels(
                    alive=min(alive, 100_000), busy=min(busy, alive, 100_000), last_activity=self._past(instant)
                )
                self._kernels_reported(connection, kernels)
            elif frame.kind is Kind.ASK:
                self._take_ask(connection, *frame.fields[:3])
            else:
                self._status(connection)
        elif connection in session.connections:
            raise FrameRefused(NOT_ALLOWED, f"{frame.kind.name} is not allowed from this role")
        else:
            raise FrameRefused(MALFORMED, f"{frame.kind.name} before HELLO")

    def ended(self, connection: Connection) -> None:
        """Remove a process that has ended: its leases go to other sessions."""
        session = self._session
        session.moved = True
        if connection in session.observers:
            session.observers.discard(connection)
            self._kernels_reported(connection, None)
        if connection in session.cuda:
            session.cuda.discard(connection)
            self._limits.leave(connection)
            for gpu in session.gpus:
                self._memory.pop((connection, gpu.uuid), None)
                if self._bursts is not None:
                    self._bursts.forget((connection, gpu.uuid))
                self._around.arbitrations[gpu.uuid].leave(connection)
            self._around.suspensions.left(session, connection)

    def tell_tier(self) -> None:
        """Notify all processes of the session's tier."""
        record = self._session.record
        held = (record.effective_units, record.borrowed_units, self._session.guaranteed_units)
        for connection in self._session.connections:
            connection.send(Kind.TIER, record.tier.depth, *held, record.request.share_units)

    def tell_memory(self) -> None:
        """Notify all processes of the session's memory limit and guarantee; CUDA shows the limit from then on."""
        for connection in self._session.connections:
            self._say_memory(connection, Role.CUDA if connection in self._session.cuda else Role.OBSERVER)

    def tell_notice(self) -> None:
        """Tell the session's observers its notice, or that there is none."""
        for connection in self._session.observers:
            self._send_notice(connection)

    def tell_controls(self) -> None:
        """Notify the session's observers of its keep and exemption."""
        for connection in self._session.observers:
            self._controls(connection)

    def tell_messages(self) -> None:
        """Notify the session's observers of their user's messages.

        A withdrawn message is not in the next answer to QUERY.
        """
        for connection in self._session.observers:
            self._messages(connection)

    def tell_answer(self, answer: AskAnswer) -> None:
        """Notify the session's observers of the answer to an ask; the sender recognises its number."""
        for connection in self._session.observers:
            send_answer(connection, answer)

    def accept_again(self, uuid: str) -> None:
        """Update the arbiter if the counted part of the stated memory has changed."""
        if not self._session.observed:
            for connection, managed, plain in self._limits.accepted_anew(uuid):
                self._around.arbitrations[uuid].counts(connection, managed, plain)

    def _burst_frames_of(self, connection: Connection) -> BurstFrames[tuple[Connection, str]]:
        if self._bursts is None:
            self._bursts = BurstFrames(connection.reading, self._tell_arbiter, self._loop.call_later)
        return self._bursts

    def _tell_arbiter(self, process: tuple[Connection, str], frame: Frame) -> None:
        connection, uuid = process
        if frame.kind in (Kind.REQUEST, Kind.MEMORY) and not self._session.observed:
            # a process that is short of memory states the size of its next allocation, perhaps a CUDA
            # context
            spare = CONTEXT_BYTES if frame.kind is Kind.REQUEST and self._session.suspends else 0
            managed, plain, *others = frame.fields
            accepted = self._limits.accepted(connection, uuid, managed, plain, spare)
            frame = replace(frame, fields=(*accepted, *others))
        self._around.arbitrations[uuid].receive(connection, frame)

    def _memory_stated(self, connection: Connection, uuid: str, frame: Frame) -> None:
        self._memory[connection, uuid] = frame
        if self._memory_timer is not None:
            return
        due = self._memory_at + MEMORY_EVERY
        if self._loop.time() >= due:
            self._deal_with_memory()
        else:
            self._memory_timer = self._loop.call_at(due, self._deal_with_memory)

    def _deal_with_memory(self) -> None:
        self._memory_timer = None
        self._memory_at = self._loop.time()
        for key in list(self._memory)[:MEMORY_AT_ONCE]:
            self._tell_arbiter(key, self._memory.pop(key))
        if self._memory:
            self._memory_timer = self._loop.call_at(self._memory_at + MEMORY_EVERY, self._deal_with_memory)

    def _kernels_reported(self, connection: Connection, kernels: Kernels | None) -> None:
        """Record an observer's report about the session's kernels. None if the observer has left."""
        session = self._session
        worked = any(reported.busy for reported in session.reported_kernels.values())
        if kernels is None:
            session.reported_kernels.pop(connection, None)
        else:
            session.reported_kernels[connection] = kernels
        works = any(reported.busy for reported in session.reported_kernels.values())
        if worked != works:
            self._around.news()

    def _take_ask(self, connection: Connection, number: int, kind: int, value: int) -> None:
        """Take an observer's ask for the service, or answer it here."""
        if Feature.CONTROLS not in connection.features:
            raise FrameRefused(NOT_ALLOWED, "ASK without the feature CONTROLS")
        if not 0 < number < 2**32:
            raise FrameRefused(MALFORMED, f"ASK with the number {number}")
        assert self._session.asks is not None
        answer = self._session.asks.take(number, kind, value)
        if answer is not None:
            # only to this observer: it may ask without limit
            send_answer(connection, answer)
        else:
            self._around.ask_came()

    def _controls(self, connection: Connection) -> None:
        send_controls(connection, self._session.record.controls, self._around.largest_share(self._session))

    def _messages(self, connection: Connection) -> None:
        for message in self._session.record.messages:
            send_message(connection, message)

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
                NOT_ALLOWED, "HELLO without OBSERVE where another layer shares the GPU: is GPUSHARE_ENGINE unset?"
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
            len(self._names(role)) if role is Role.CUDA else max(1, len(session.gpus)),
            self._features(role),
        )
        self._say_memory(connection, role)
        if role is Role.CUDA:
            session.cuda.add(connection)
            self._limits.join(connection, frame.fields[1])
            for gpu in session.gpus:
                paced = Feature.PACE in connection.features
                self._around.arbitrations[gpu.uuid].join(connection, session.id, connection.peer.process, paced)
            self._around.suspensions.joined(session, connection)
        else:
            session.observers.add(connection)
            if record.notice is not None:
                self._send_notice(connection)

    def _features(self, role: Role) -> Feature:
        """Return the features of this agent for a process of that role."""
        if not self._session.observed:
            return AGENT_FEATURES
        return Feature.OBSERVE if role is Role.CUDA else OBSERVED_FEATURES

    def _names(self, role: Role) -> dict[bytes, str]:
        """Return the GPU UUIDs that a process of that role can know, each with the UUID in the report."""
        return self._uuids if role is Role.CUDA else {gpu_bytes(gpu.uuid): gpu.uuid for gpu in self._session.gpus}

    def _say_memory(self, connection: Connection, role: Role) -> None:
        gpus = {gpu.uuid: gpu for gpu in self._session.gpus}
        for raw, uuid in self._names(role).items():
            gpu = gpus[uuid]
            amounts = self._session.memory_limit(gpu), self._session.memory_guarantee(gpu)
            connection.send(Kind.DEVICE, *amounts, gpu=raw)
        if role is Role.OBSERVER and not gpus:
            connection.send(Kind.DEVICE, 0, 0)

    def _send_notice(self, connection: Connection) -> None:
        notice = self._session.record.notice
        if notice is None:
            connection.send(Kind.ANNOUNCE, Tier.ACTIVE.depth, 0, 0)
        else:
            connection.send(
                Kind.ANNOUNCE,
                notice.tier.depth,
                round(notice.at * NANOSECONDS),
                notice.effective_units,
                (notice.cause or IdleCause.IDLE).code,
                round(notice.after_seconds * NANOSECONDS),
            )

    def _status(self, connection: Connection) -> None:
        session, record, notice = self._session, self._session.record, self._session.record.notice
        report = self._around.session_report(session)
        since = _NEVER
        if report.gpu_busy:
            since = 0
        elif report.last_gpu_activity is not None:
            since = max(0, round((self._around.wall_clock() - report.last_gpu_activity) * NANOSECONDS))
        if Feature.CAUSE in connection.features and notice is not None:
            self._send_notice(connection)
        self._controls(connection)
        self._messages(connection)
        if session.not_suspendable is not None:
            send_not_suspendable(connection, session.not_suspendable)
        send_layer(connection, report.layer, len(report.gpus), report.layer_trouble)
        if Feature.DELIVERED in connection.features:
            got = report.delivered
            seconds = (got.entitled_seconds, got.delivered_seconds, got.wait_p50_seconds, got.wait_p95_seconds)
            entitled, delivered, half, most = (round(second * NANOSECONDS) for second in seconds)
            connection.send(Kind.DELIVERED, entitled, delivered, got.waits, half, most)
        uses = self._uses() if Feature.USE in connection.features else {}
        self._limits.send_processes(connection, {uuid: dict(busiest) for uuid, (_, busiest) in uses.items()})
        self._tell_use(connection, uses)
        figures = {gpu_bytes(gpu.uuid): self._figures(gpu) for gpu in session.gpus}
        for raw, (memory, resident, limit, lease, sessions) in (figures or {NO_GPU: _NO_FIGURES}).items():
            connection.send(
                Kind.STATUS,
                record.request.share_units,
                record.tier.depth,
                record.effective_units,
                record.borrowed_units,
                session.guaranteed_units,
                memory,
                resident,
                limit,
                lease,
                since,
                sessions,
                round(notice.at * NANOSECONDS) if notice is not None else 0,
                gpu=raw,
                flags=(notice.tier.depth | notice.effective_units << 8 if notice is not None else 0)
                | (LACKS_REQUESTS if session.lacks_requests else 0)
                | (YIELDS if record.yields_until is not None else 0)
                | (SUSPENDED if session.suspended else 0),
            )

    def _figures(self, gpu: Gpu) -> tuple[int, int, int, LeaseState, int]:
        """Return fields 5 to 8 and 10 of STATUS for a GPU of the session."""
        snapshot = self._around.arbitrations[gpu.uuid].snapshot(self._session.id)
        on_gpu, with_work = self._around.sessions_on(gpu.uuid)
        lease = LeaseState.HELD if snapshot.held else LeaseState.WAITING if snapshot.waiting else LeaseState.NONE
        limit = self._session.memory_limit(gpu)
        return snapshot.memory_bytes, snapshot.resident_bytes, limit, lease, on_gpu | with_work << 32

    def _uses(self) -> dict[str, tuple[float, list[tuple[Connection, float]]]]:
        """Return the GPU time of the session and its busiest processes in the last second, by GPU."""
        processes = {process.number: process for process, _ in self._limits.processes()}
        uses = {}
        for gpu in self._session.gpus:
            use = self._around.arbitrations[gpu.uuid].recent_use(self._session.id)
            busiest = sorted(use.by_client, key=lambda entry: -entry[1])
            shown = [(processes[client], seconds) for client, seconds in busiest if client in processes]
            uses[gpu.uuid] = use.seconds, shown[:SHOWN_PROCESSES]
        return uses

    def _tell_use(self, observer: Connection, uses: Mapping[str, tuple[float, list[tuple[Connection, float]]]]) -> None:
        pids = dict(self._limits.processes())
        for uuid, (session, busiest) in uses.items():
            # pid 0 is the session
            of_processes = [(pids[process], seconds) for process, seconds in busiest if pids[process]]
            for pid, seconds in [(0, session), *of_processes]:
                fields = pid, round(seconds * NANOSECONDS), round(WINDOW * NANOSECONDS)
                observer.send(Kind.USE, *fields, gpu=gpu_bytes(uuid))

    def _past(self, instant: int) -> float | None:
        """Convert an instant stated by a process to seconds since the epoch, never in the future; None for 0."""
        return min(instant / NANOSECONDS, self._around.wall_clock()) if instant else None


def _check_observed(frame: Frame) -> None:
    """Raise FrameRefused for a frame that a process must not send if another layer shares the GPU."""
    if frame.kind not in _OF_OBSERVED_PROCESSES:
        raise FrameRefused(NOT_ALLOWED, f"{frame.kind.name} where another layer shares the GPU")
    if frame.kind is not Kind.MEMORY and frame.fields[0]:
        raise FrameRefused(
            NOT_ALLOWED, f"{frame.kind.name} of a lease where another layer shares the GPU: there are none"
        )
