"""The sessions of this machine: restored, entered, written to disk, ended.

Does not decide whether a share fits (node.py). Only the endpoint factory distinguishes processes and pods.
`ProcessWatch` detects the end of a session's notebook server. `SessionControls` stores the service's decisions for
users and admins, and notifies the notebook server. It neither takes nor restores units; see tiers.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.agent.session_limit import ExclusiveMemory, SessionLimit
from gpushare_spawner.agent.session_records import Clock, SessionRecord, Store, short_name
from gpushare_spawner.agent.session_socket import SESSION_CLOSED, SessionEndpoints
from gpushare_spawner.agent.sessions.cells import Cell
from gpushare_spawner.agent.sessions.session import (
    Activity,
    Past,
    PendingAsks,
    Session,
    SessionFrameHandler,
    activity,
    cells_status,
    counted,
)
from gpushare_spawner.agent.sessions.tiers import Shares, Tiers
from gpushare_spawner.agent.state_folder import PathTooLong, StateFolder
from gpushare_spawner.background import set_within
from gpushare_spawner.clocks import STEP, WallClock
from gpushare_spawner.model.control import MessageRequest, OpenRequest
from gpushare_spawner.model.controls import NO_CONTROLS, AskAnswer, Controls, Message
from gpushare_spawner.model.frames import CellEvent, ReserveKind
from gpushare_spawner.model.report import NO_HITS
from gpushare_spawner.model.share import MemoryLimit, Tier

log = logging.getLogger(__name__)


class ProcessWatch:
    """Watches one process per session, with a pidfd if the kernel supports it; `poll` checks the others."""

    def __init__(self, gone: Callable[[str], None]) -> None:
        """Store the callback. `gone` is called once per session, with the session's ID, on the event loop."""
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._watched: dict[str, tuple[ProcessName, int | None]] = {}

    def begin(self, session: str, process: ProcessName) -> None:
        """Watch this process for the session, replacing any other."""
        self.end(session)
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            pidfd = None
        self._watched[session] = (process, pidfd)
        if pidfd is not None:
            self._loop.add_reader(pidfd, self._died, session)
        # opened after the name was read: the kernel may have reused the pid in the meantime
        if not processes.alive(process):
            self._loop.call_soon(self._died, session)

    def end(self, session: str) -> None:
        """Stop watching this session's process."""
        _process, pidfd = self._watched.pop(session, (None, None))
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def poll(self) -> None:
        """Poll the processes that have no pidfd."""
        for session, (process, pidfd) in list(self._watched.items()):
            if pidfd is None and not processes.alive(process):
                self._died(session)

    def close(self) -> None:
        """Stop watching all processes."""
        for session in list(self._watched):
            self.end(session)

    def _died(self, session: str) -> None:
        if session in self._watched:
            self.end(session)
            self._gone(session)


class SessionControls:
    """Keeps, exemptions and messages of sessions, and the answers to their asks."""

    def __init__(self, save: Callable[[Session], None], changed: Callable[[], None]) -> None:
        """Store the callbacks: `save` writes a session's record; `changed` is called if only the report changes."""
        self._save = save
        self._changed = changed

    def replace(self, session: Session, controls: Controls) -> None:
        """Set the session's keep and exemption."""
        if session.record.controls == controls:
            return
        session.record.controls = controls
        log.info("session %s: keep %s, exemption %s", session.id, controls.keep, controls.exemption)
        if session.conversation is not None:
            session.conversation.send_changed()
        self._save(session)

    def message(self, session: Session, request: MessageRequest) -> None:
        """Show the session's user a message, or withdraw a message."""
        self._show(session, request.messages(session.record.messages))

    def _show(self, session: Session, messages: tuple[Message, ...]) -> None:
        """Set the messages of the session's user."""
        if session.record.messages == messages:
            return
        session.record.messages = messages
        if session.conversation is not None:
            session.conversation.send_changed()
        self._save(session)

    def follow(
        self, session: Session, controls: Controls, messages: tuple[Message, ...], answers: Iterable[AskAnswer]
    ) -> None:
        """Adopt the controls that the service wrote elsewhere, as read by each poll. Only waiting asks are answered."""
        self.replace(session, controls)
        self._show(session, messages)
        waiting = {ask.number for ask in session.asks.waiting()}
        for answer in answers:
            if answer.number in waiting:
                self.answer(session, answer)

    def answer(self, session: Session, answer: AskAnswer) -> None:
        """Pass an answer to the session's notebook servers, once."""
        if not session.asks.answered(answer):
            return
        if session.conversation is not None:
            session.conversation.send_answer(answer)
        # the report no longer contains the ask
        self._changed()


class SessionRegistry:
    """The sessions, with their records on disk, their sockets and their watched processes."""

    def __init__(
        self,
        sessions: dict[str, Session],
        shares: Shares,
        folder: StateFolder,
        endpoints: SessionEndpoints,
        memory_left: Callable[[Session, str, ReserveKind], tuple[int, MemoryLimit]],
        exclusive_memory: ExclusiveMemory,
        converse: Callable[[Session], SessionFrameHandler],
        clock: WallClock,
        changed: Callable[[], None],
    ) -> None:
        """Store the parts of the agent. `sessions`, keyed by ID, is empty now and only changes here.

        `memory_left` returns how many more bytes a session may allocate on a GPU, and the budget that limits them.
        `exclusive_memory`: the exclusive use of free GPU memory. `converse` creates the handler of a session's
        frames. `clock` calls back when it is set. `changed` is called when a session was added or ended, or its record
        changed.
        """
        self.sessions: Mapping[str, Session] = sessions
        self._sessions = sessions
        self.arbitrations = shares.arbitrations
        self._shares = shares
        self._folder = folder
        self._endpoints = endpoints
        self._memory_left = memory_left
        self._exclusive_memory = exclusive_memory
        self._converse = converse
        self.clock = clock
        clock.was_set = self.clock_was_set
        self._boot = processes.boot_id()
        self.changed = changed
        self.store = Store(folder.records, changed)
        self.tiers = Tiers(shares, self.activity, self.save, clock)
        self.controls = SessionControls(self.save, changed)
        self.came: Callable[[Session], None] = _nothing
        """Callback for each new session, after it was added to its arbiters."""
        self.went: Callable[[Session], None] = _nothing
        """Callback for each session that has ended, before its sockets are closed."""
        self.left: Callable[[SessionRecord], None] = _nothing
        """Callback for the record of each session that ended while no agent was running."""
        self.cell_listeners: list[Callable[[Session, Cell, CellEvent], None]] = [self._expect_launch]
        """Callbacks for each event of a cell, after the session's `cells` were updated."""
        self._ask_event = asyncio.Event()
        self.watch = ProcessWatch(lambda name: self.end(name, "its server's process has ended"))

    def _expect_launch(self, session: Session, cell: Cell, event: CellEvent) -> None:
        """Learn from a cell's event, and tell the arbiters which launch the kernel's cells lead to."""
        history, now = session.cell_history, asyncio.get_running_loop().time()
        if session.observed or not cell.pid:
            return
        if event is CellEvent.ENDED:
            history.ended(cell.kernel, cell.number, now)
        else:
            history.submitted(cell.kernel, cell.pid, cell.number, cell.text)
            if event is CellEvent.STARTED:
                history.started(cell.kernel, cell.number, now)
        expected = history.expected(cell.kernel, now)
        for client in session.cells.clients(cell):
            for gpu in session.gpus:
                self.arbitrations[gpu.uuid].expect(client, expected)

    def restore(self) -> None:
        """Restore the sessions from the state folder. A failure affects only one session."""
        now = self.clock()
        with self.restoring():
            for record in self._folder.records.load():
                try:
                    self._follow_clock(record)
                    self._restore_session(record, now)
                except Exception:
                    log.exception("session %s cannot be restored", record.request.id)
                    self._sessions.pop(record.request.id, None)
        if self._sessions:
            log.info("Restored %d sessions", len(self._sessions))
        self._folder.remove_unknown_sockets({short_name(name) for name in self._sessions})

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Add several sessions. Until all are added, borrowed units stay borrowed: their owner may be added last."""
        with self._shares.restoring():
            yield
        self.tiers.changed(self._shares.recount_restored())

    def clock_was_set(self, by: float) -> None:
        """Shift the instants of all sessions by a step of the clock, so that idle times stay the same."""
        log.warning("the clock was set by %+.0f s: durations of %d sessions do not change", by, len(self._sessions))
        for session in self._sessions.values():
            session.clock_was_set(by)
        for session in self._sessions.values():
            self.save(session)

    def _follow_clock(self, record: SessionRecord) -> None:
        """Shift a record's instants by a step that the clock made while no agent was running, within the same boot."""
        recorded = record.clock
        if recorded is not None and recorded.boot == self._boot and abs(self.clock.offset - recorded.offset) >= STEP:
            record.clock_was_set(self.clock.offset - recorded.offset)

    def _restore_session(self, record: SessionRecord, now: float) -> None:
        if record.process is not None and not processes.alive(record.process):
            log.info("session %s ended while no agent was running", record.request.id)
            self.left(record)
            self.store.remove(record.request.id)
            return
        here = () if record.gpus_unknown else record.request.gpus
        if any(uuid not in self.arbitrations for uuid in here):
            log.error("session %s has a share of a GPU that this machine no longer has", record.request.id)
            here = tuple(uuid for uuid in here if uuid in self.arbitrations)
        session = Session(record, self._possible_gpus(record, here), past=Past.recorded(record, restarted_at=now))
        self._enter(session)
        self._listen_or_log(session)

    def add(self, record: SessionRecord) -> Session:
        """Add a session and write its record. Ends an older session with that ID.

        The caller has checked that it fits; `listen` creates its socket. Raises KeyError for a GPU of another machine.
        """
        session = Session(record, self._possible_gpus(record, record.request.gpus))
        # after its GPUs were resolved, so that an unknown GPU changes nothing
        self.end(session.id, "another session replaced it")
        if lacking := self._shares.own_what_is_unowned(session):
            log.warning("session %s borrows %d units: others own them already", session.id, lacking)
        self._enter(session)
        self.save(session)
        return session

    def _possible_gpus(self, record: SessionRecord, uuids: Iterable[str]) -> tuple[Gpu, ...]:
        """Return the GPUs with these UUIDs; all GPUs if another layer's choice is unknown. Raises KeyError."""
        return tuple(self.arbitrations[uuid].gpu for uuid in (self.arbitrations if record.gpus_unknown else uuids))

    def add_and_listen(self, record: SessionRecord) -> Session:
        """Add a pod's session and create its sockets: the kubelet has already assigned the devices to it.

        Raises KeyError for a GPU of another machine.
        """
        session = self.add(record)
        self.listen_again(session)
        return session

    def reopen(self, session: Session, request: OpenRequest) -> None:
        """Restart a session with the same ID and share: active, without a past, and unconfirmed."""
        self.watch.end(session.id)
        record = session.record
        record.request = request
        record.process = None
        record.opened_at, record.clock_moved = self.clock(), 0.0
        session.cells.clear()
        session.past = Past(
            gpu_seconds=session.past.gpu_seconds - self.activity(session).gpu_seconds,
            delivered_before=counted(
                {gpu.uuid: self.arbitrations[gpu.uuid].snapshot(session.id) for gpu in session.gpus}
            ),
        )
        record.controls, record.messages = NO_CONTROLS, ()
        session.asks = PendingAsks(self.clock)
        session.reported_kernels.clear()
        if session.memory is not None:
            session.memory.set_limits(session.memory_limits)
            session.memory.hits = NO_HITS
        self.tiers.withdraw_notice(session)
        self.tiers.change_tier(session, Tier.ACTIVE, request.share_units, "it was reopened")

    def confirm(self, session: Session, process: ProcessName) -> None:
        """Associate a session with its server's process: both end together."""
        session.record.process = process
        self.watch.begin(session.id, process)
        self.save(session)

    def end(self, name: str, reason: str, keep_folders: bool = False) -> None:
        """End a session and free its units. Does nothing for an unknown ID.

        With `keep_folders`, the mounted folders stay: the session's processes continue as another session.
        """
        session = self._sessions.get(name)
        if session is None:
            return
        log.info("session %s ends: %s", name, reason)
        self.watch.end(name)
        self.went(session)
        if session.socket is not None:
            session.socket.close(None if keep_folders else SESSION_CLOSED)
            if not keep_folders:
                try:
                    session.socket.remove()
                except OSError as error:
                    log.warning("the folder of session %s stays: %s", name, error)
        if session.memory is not None:
            session.memory.close()
        for gpu in session.gpus:
            self.arbitrations[gpu.uuid].listeners.pop(name, None)
        del self._sessions[name]
        self.store.remove(name)
        self.tiers.changed(self._shares.leave(session))
        self.changed()

    def listen(self, session: Session) -> str | None:
        """Create the session's sockets. Returns the reason if this fails."""
        assert session.conversation is not None
        try:
            session.socket = self._endpoints.listen(session.record, session.conversation)
        except (OSError, OverflowError, PathTooLong) as error:
            return str(error)
        return None

    def listen_again(self, session: Session) -> None:
        """Recreate the session's sockets: its record may name different folders than before."""
        if session.socket is not None:
            session.socket.close()
            session.socket = None
        self._listen_or_log(session)

    def _listen_or_log(self, session: Session) -> None:
        if (reason := self.listen(session)) is not None:
            log.error("cannot create the socket of session %s: %s", session.id, reason)

    def ask_came(self) -> None:
        """Wake the waiter: a notebook server has sent an ask for the service."""
        self._ask_event.set()
        self.changed()

    async def wait_for_ask(self, within: float) -> bool:
        """Return whether an ask waits for the service: immediately if one does, or after at most `within` seconds."""
        if not self._has_ask():
            self._ask_event.clear()
            await set_within(self._ask_event, within)
        return self._has_ask()

    def _has_ask(self) -> bool:
        return any(session.asks.waiting() for session in self._sessions.values())

    def activity(self, session: Session) -> Activity:
        """Return the session's current activity on its GPUs."""
        return activity(session, self.arbitrations, self.clock)

    def save(self, session: Session) -> None:
        """Write the session's record to disk, with its activity."""
        doing, record = self.activity(session), session.record
        record.gpu_busy, record.last_gpu_activity, record.gpu_seconds = doing.busy, doing.last, doing.gpu_seconds
        record.delivered = doing.delivered
        record.cells = cells_status(session, self.arbitrations, self.clock)
        record.memory_hits = session.memory_hits
        record.clock = Clock(boot=self._boot, offset=self.clock.offset)
        session.saved_at = self.clock()
        self.store.put(record)
        self.changed()

    async def close(self) -> None:
        """Close all sockets. The sessions stay on disk; their processes keep running without the agent."""
        for session in self._sessions.values():
            self.save(session)
        self.watch.close()
        for session in self._sessions.values():
            if session.socket is not None:
                session.socket.close()
            if session.memory is not None:
                session.memory.close()

    def _enter(self, session: Session) -> None:
        self._sessions[session.id] = session
        session.memory = SessionLimit(
            session.memory_limits,
            self.clock,
            session.record.memory_hits,
            left=lambda gpu, kind: self._memory_left(session, gpu, kind),
            excluded=lambda gpu: self._exclusive_memory.excludes(gpu, session.id),
        )
        session.asks = PendingAsks(self.clock)
        session.conversation = self._converse(session)
        session.cells.restore(session.record.cells)
        for gpu in session.gpus:
            self.arbitrations[gpu.uuid].listeners[session.id] = session.cells
        self.tiers.changed(other for other in self._shares.enter(session) if other is not session)
        in_vain = [other for other in self._shares.yielding_in_vain(session.gpus) if other is not session]
        self.tiers.stop_yielding(in_vain, f"session {session.id} has received the units that it gave up")
        if session.record.process is not None:
            self.watch.begin(session.id, session.record.process)
        self.came(session)


def _nothing(session: object) -> None:
    pass
