"""The shell around one GPU's arbiter: it translates frames to events and decisions to frames, and runs the timers.

`ObservedSessions` adds up the GPU work that processes report for the sessions of a GPU that another layer shares. It
makes no decisions. These processes run with engine `observe` and need no lease; see "Observing only" in
docs/reference/protocol.md. Times are seconds on one clock and are passed as arguments. gpushare_spawner/arbiter
contains the arbiter's rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Protocol

from gpushare_spawner.agent.gpus.nvml import Gpu, GpuSource, GpuState
from gpushare_spawner.agent.gpus.samples import Delivery, MemoryQueries, Pids, SessionsOf, nobody
from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.arbiter.anticipation import Expected
from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.recent_use import RecentGpuUse, Use, UseSpan
from gpushare_spawner.arbiter.session import (
    ArbiterSettings,
    ClientId,
    Decision,
    LeaseGrant,
    PageIn,
    PageOut,
    Refuse,
    Revoke,
    SessionView,
)
from gpushare_spawner.model.frames import NO_GPU, Frame, Kind, gpu_bytes
from gpushare_spawner.model.report import Burst
from gpushare_spawner.model.share import UNITS_PER_GPU

SAMPLED_LATELY = 2.5
"""Seconds for which work counts as running after the end of a sample with GPU work.

Samples are read every second and end up to one second before the reading.
"""
MOST_MEASURED = 16
"""Maximum number of a session's processes with separate figures at an instant: each change is retained for 2 s."""


@dataclass
class _Process:
    """A connected process."""

    session: str
    joined_at: float
    busy_since: float | None = None
    """Reported start of its burst; None if there is no burst."""
    gpu_seconds: float = 0.0
    """Reported seconds with a burst on the GPU since it joined."""
    memory_bytes: int = 0


@dataclass
class _Session:
    news_at: float
    """Time at which one of its processes last joined, left, or reported that a burst began or ended."""
    processes: set[int] = field(default_factory=set)
    working: dict[int, None] = field(default_factory=dict)
    """Processes with a burst, earliest burst first."""
    ended_gpu_seconds: float = 0.0
    """GPU seconds of processes that have disconnected, and of unconnected processes."""
    any_worked: float = 0.0
    """Seconds until `news_at` in which at least one of its processes had a burst."""
    last_activity: float | None = None
    sampled_until: float | None = None
    """End of the last driver sample in which unconnected processes computed."""
    unconnected_bytes: int = 0
    """Memory of unconnected processes, according to the driver."""
    use: RecentGpuUse = field(default_factory=RecentGpuUse)


class ObservedSessions:
    """The sessions of one GPU, and their processes by number.

    A process's reports are capped by the time since it joined.
    """

    def __init__(self, memory_bytes: int, use_settled: Callable[[UseSpan], None] | None = None) -> None:
        """Create a GPU without sessions. `memory_bytes`: the GPU's memory, which is the limit for each process.

        `use_settled`: see `RecentGpuUse`.
        """
        self._gpu_bytes = memory_bytes
        self._use_settled = use_settled
        self._sessions: dict[str, _Session] = {}
        self._processes: dict[int, _Process] = {}

    def __contains__(self, session: str) -> bool:
        return session in self._sessions

    def session_of(self, process: int) -> str:
        """Return the session of a process that has joined."""
        return self._processes[process].session

    def has(self, process: int) -> bool:
        """Return whether the process with that number has joined."""
        return process in self._processes

    def add(self, session: str, now: float) -> None:
        """Add a session."""
        self._sessions[session] = _Session(now, use=RecentGpuUse(self._use_settled))

    def remove(self, session: str) -> None:
        """Remove a session and its processes."""
        for process in self._sessions.pop(session).processes:
            del self._processes[process]

    def join(self, process: int, session: str, now: float) -> None:
        """Add a process of the session."""
        self._advance(session, now)
        self._processes[process] = _Process(session, now)
        self._sessions[session].processes.add(process)

    def leave(self, process: int, now: float) -> None:
        """Remove a process. Its burst, if it has one, ends now."""
        left = self._processes[process]
        session = self._advance(left.session, now)
        if left.busy_since is not None:
            left.gpu_seconds += now - left.busy_since
            session.last_activity = now
        session.ended_gpu_seconds += left.gpu_seconds
        session.processes.discard(process)
        session.working.pop(process, None)
        del self._processes[process]

    def memory(self, process: int, allocated: int) -> None:
        """Record all bytes that a process states, of every kind."""
        self._processes[process].memory_bytes = min(allocated, self._gpu_bytes)

    def busy(self, process: int, now: float) -> None:
        """Record that a process's burst begins or is running."""
        working = self._processes[process]
        session = self._advance(working.session, now)
        session.last_activity = now
        if working.busy_since is None:
            working.busy_since = now
            session.working[process] = None

    def idle(self, process: int, gpu_seconds: float, quiet: float, now: float) -> None:
        """Record that a process's burst has ended.

        `gpu_seconds`: seconds with a burst since the process joined. `quiet`: seconds since its last work ended.
        """
        working = self._processes[process]
        session = self._advance(working.session, now)
        before, since = working.gpu_seconds, working.busy_since
        total = max(before, min(gpu_seconds, now - working.joined_at))
        working.gpu_seconds, working.busy_since = total, None
        session.working.pop(process, None)
        if since is not None:
            session.use.burst_ended((working.session, process), since, total - before, now - max(0.0, quiet))
        elif total == before:
            return  # there was no work
        begin = working.joined_at if since is None else since
        session.any_worked += max(0.0, total - before - (0.0 if since is None else now - since))
        session.last_activity = max(session.last_activity or begin, begin, now - quiet)

    def sampled(self, session: str, since: float, until: float, gpu_seconds: float) -> None:
        """Add a driver sample: GPU seconds of the session's unconnected processes."""
        record = self._sessions[session]
        record.ended_gpu_seconds += min(gpu_seconds, until - since)
        record.any_worked += min(gpu_seconds, until - since)
        record.last_activity = max(record.last_activity or until, until)
        record.sampled_until = max(record.sampled_until or until, until)

    def driver_memory(self, session: str, allocated: int) -> None:
        """Record the driver's figure for the memory of the session's unconnected processes."""
        self._sessions[session].unconnected_bytes = allocated

    def snapshot(self, session: str, now: float) -> SessionView:
        """Return the snapshot of a session."""
        record = self._sessions[session]
        processes = [self._processes[process] for process in record.processes]
        under_way = [now - process.busy_since for process in processes if process.busy_since is not None]
        any_worked = record.any_worked + (now - record.news_at if record.working else 0.0)
        memory = min(record.unconnected_bytes + sum(process.memory_bytes for process in processes), self._gpu_bytes)
        return SessionView(
            waiting=False,
            running=bool(record.working)
            or (record.sampled_until is not None and now - record.sampled_until < SAMPLED_LATELY),
            held=False,
            memory_bytes=memory,
            resident_bytes=memory,
            # processes that work at the same time share one GPU
            gpu_seconds=min(
                any_worked,
                record.ended_gpu_seconds + sum(process.gpu_seconds for process in processes) + sum(under_way),
            ),
            last_activity=record.last_activity,
        )

    def recent_use(self, session: str, now: float) -> Use:
        """Return the session's time with a burst within the last `WINDOW`.

        Processes of one session with simultaneous bursts, at most `MOST_MEASURED` of them, share this time evenly.
        Other sessions do not reduce it: their layer decides how their work shares the GPU.
        """
        record = self._sessions[session]
        return record.use.of(session, record.news_at, now, self._working(session))

    def unsettled_use(self, session: str, now: float) -> list[UseSpan]:
        """Return the session's use that is not settled, earliest first."""
        record = self._sessions[session]
        return record.use.unsettled(record.news_at, now, self._working(session))

    def _working(self, session: str) -> list[tuple[str, int]]:
        return [(session, process) for process in islice(self._sessions[session].working, MOST_MEASURED)]

    def _advance(self, session: str, now: float) -> _Session:
        """Add the work done until now, before a change."""
        record = self._sessions[session]
        record.use.advance(record.news_at, now, self._working(session))
        if record.working:
            record.any_worked += now - record.news_at
        record.news_at = now
        return record


NANOSECONDS = 1_000_000_000
CHECK_AGAIN, CHECK_SELDOM = 0.1, 5.0
"""First and longest interval, in seconds, between checks of a process that disconnected: a process closes its socket
before it ends."""
RENEW_EVERY = 10.0
"""Seconds between frames to a waiting client: a client that receives nothing for 30 s runs its work without a lease."""


class CudaClient(Protocol):
    """A connected CUDA process."""

    @property
    def number(self) -> int:
        """Number of the client, never reused while the agent runs."""

    def send(self, kind: Kind, *fields: int, gpu: bytes = NO_GPU, flags: int = 0) -> None:
        """Send a frame without waiting."""


class WorkListener(Protocol):
    """Receives the GPU use, waits and memory of one session's processes, by client number. Times are seconds."""

    def used(self, gpu: str, client: int | None, since: float, until: float, seconds: float) -> None:
        """Add GPU seconds of an interval. `client` None: processes without a connection."""

    def waited(self, client: int, since: float, until: float, memory: bool) -> None:
        """Add a wait: for memory, or for a lease."""

    def has_memory(self, gpu: str, client: int, on_gpu: int, paged_out: int) -> None:
        """Set a client's allocated bytes that are not paged out, and those that are."""


class Handle(Protocol):
    """A timer that can be cancelled."""

    def cancel(self) -> None: ...


@dataclass
class _Client:
    """A CUDA process that has joined the arbiter."""

    process: CudaClient
    session: str
    paced: bool
    """Whether it supports paces."""
    lease: int = 0
    """ID of the last lease."""
    granted_at: float = 0.0
    waits_since: float | None = None
    """Time of its lease request; None: it does not wait."""
    waits_for_memory: bool = False
    """Whether it waits for memory, or for the resumption of its session, and not for other sessions' leases."""
    shown: tuple[int | None, int] = (None, 0)
    """Bytes that the driver last reported for its process, and the part beyond its stated memory."""
    seen: bool = False
    """Whether its memory was once seen on the GPU."""


class GpuArbitration:
    """The arbitration of one GPU. Times are seconds on `clock`, by default the event loop's clock."""

    def __init__(
        self,
        gpu: Gpu,
        settings: ArbiterSettings,
        clock: Callable[[], float] | None = None,
        call_at: Callable[[float, Callable[[], None]], Handle] | None = None,
        source: GpuSource | None = None,
        sessions_of: SessionsOf = nobody,
        memory_seen: Callable[[Mapping[str, GpuState]], None] | None = None,
    ) -> None:
        """Create an arbiter without sessions.

        `source`: the driver's samples of GPU time per process; None: use only bursts. The GPU time of unconnected
        processes counts for the sessions that `sessions_of` returns; it is called in another thread. `memory_seen` is
        called with the driver's figures, keyed by GPU UUID, when they matter; None: use only the periodic query.
        """
        loop = asyncio.get_running_loop() if clock is None or call_at is None else None
        self.gpu = gpu
        # the simulator's contexts take no device memory
        self._arbiter = GpuArbiter(
            gpu.memory_bytes, replace(settings, context_bytes=0) if gpu.simulated else settings, self._use_settled
        )
        self.listeners: dict[str, WorkListener] = {}
        """Listeners by session."""
        self._observed = ObservedSessions(gpu.memory_bytes, self._use_settled)
        """Sessions on a GPU that another layer shares. The arbiter does not contain them."""
        self._raw = gpu_bytes(gpu.uuid)
        self._clock = clock or loop.time  # type: ignore[union-attr]
        self._call_at = call_at or loop.call_at  # type: ignore[union-attr]
        self._clients: dict[int, _Client] = {}
        """Clients by number."""
        self.suspend: Callable[[str], None] = _ignore
        """Callback for each session to suspend; the reply is `suspended` or `not_suspended`."""
        self.resume: Callable[[str], None] = _ignore
        """Callback for each suspended session with a client that was granted a lease; the reply is `resumed` or
        `not_resumed`."""
        self._suspended: dict[str, list[Decision] | None] = {}
        """Suspended sessions. Sessions that are being resumed have decisions to send to their clients afterwards."""
        self._waits: dict[int, float] = {}
        """Time of the last frame about each client's request, earliest first."""
        self._pids = Pids()
        self._ended_timer: Handle | None = None
        self._check_in = CHECK_AGAIN
        self._delivery = Delivery(gpu, source, self, sessions_of) if source is not None else None
        self._memory_queries: MemoryQueries | None = None
        if source is not None and memory_seen is not None:
            self._memory_queries = MemoryQueries(gpu, source, lambda: self._arbiter.memory_poll_interval, memory_seen)
        self._timer: Handle | None = None
        self._due: float | None = None

    def add_observed_session(self, session: str) -> None:
        """Add a session on a GPU that another layer shares: it needs no lease, and its weight has no effect."""
        self._observed.add(session, self._clock())

    def add_session(
        self,
        session: str,
        weight: int,
        suspends: bool = False,
        suspended: bool = False,
        time_limit: int = UNITS_PER_GPU,
    ) -> None:
        """Add a session. `weight`, `time_limit`: in share units.

        `suspends`: the session's memory leaves the GPU only by suspension. `suspended`: it is suspended now.
        """
        if suspended:
            self._suspended[session] = None
        now = self._clock()
        self._carry_out(
            self._arbiter.add_session(
                session, weight, now, suspends=suspends, suspended=suspended, time_limit=time_limit
            )
        )

    def set_time_limit(self, session: str, units: int) -> None:
        """Set the maximum units of the GPU's time that the session gets, even when it is alone."""
        if session not in self._observed:
            self._carry_out(self._arbiter.set_time_limit(session, units, self._clock()))

    def set_background(self, session: str, background: bool) -> None:
        """Set whether the session works only in GPU time and memory that no other session uses."""
        if session not in self._observed:
            self._carry_out(self._arbiter.set_background(session, background, self._clock()))

    def set_weight(self, session: str, weight: int) -> None:
        """Set the weight; 0 releases the session: it holds no lease until its next burst.

        Its pages leave the GPU only when another session needs the memory.
        """
        if session not in self._observed:
            self._carry_out(self._arbiter.set_weight(session, weight, self._clock()))

    def remove_session(self, session: str) -> None:
        """Remove a session. Its clients must have been removed."""
        if session in self._observed:
            self._observed.remove(session)
            return
        self._pids.forget(session)
        self._suspended.pop(session, None)
        self._carry_out(self._arbiter.remove_session(session, self._clock()))

    # -- suspendable sessions ----------------------------------------------------------------------------------------

    def suspended(self, session: str, amount: int, seconds: float) -> None:
        """Record that a session was suspended as requested: `amount` bytes became free within `seconds`."""
        self._suspended[session] = None
        self._carry_out(self._arbiter.suspended(session, amount, seconds, self._clock()))

    def not_suspended(self, session: str) -> None:
        """Record a failed suspension; the session keeps running."""
        self._carry_out(self._arbiter.not_suspended(session, self._clock()))

    def set_suspendable(self, session: str, suspendable: bool, for_a_moment: bool = False) -> None:
        """Set whether the session can be suspended from now on. `for_a_moment`: not now, but soon."""
        decisions = self._arbiter.set_suspendable(session, suspendable, self._clock(), for_a_moment=for_a_moment)
        self._carry_out(decisions)

    def resumed(self, session: str, amount: int, seconds: float) -> None:
        """Record that the session is running, after `resume` or without a suspension.

        Its clients now receive their held decisions.
        """
        pending = self._suspended.pop(session, None) or []
        decisions = self._arbiter.resumed(session, amount, seconds, self._clock())
        self._carry_out([*pending, *decisions])

    def not_resumed(self, session: str, retry_in: float) -> None:
        """Record a failed resumption; the session waits. The next attempt is made in `retry_in` seconds."""
        if session in self._suspended:
            self._suspended[session] = None
        self._carry_out(self._arbiter.not_resumed(session, retry_in, self._clock()))

    def short_of_memory(self, session: str, lacking: int) -> None:
        """Record the bytes that are missing on the GPU for a session's resumption."""
        self._carry_out(self._arbiter.short_of_memory(session, lacking, self._clock()))

    # -- clients -----------------------------------------------------------------------------------------------------

    def join(
        self,
        client: CudaClient,
        session: str,
        process: ProcessName | None = None,
        paced: bool = False,
        pages_in_early: bool = False,
    ) -> None:
        """Add a CUDA process of the session.

        `process` None: unknown. `paced`: it supports paces. `pages_in_early`: it obeys PAGE_IN.
        """
        if session in self._observed:
            self._observed.join(client.number, session, self._clock())
            return
        self._clients[client.number] = _Client(client, session, paced)
        self._pids.joined(client.number, session, process)
        now = self._clock()
        self._carry_out(self._arbiter.connect(client.number, session, now, pages_in_early=pages_in_early))

    def leave(self, client: CudaClient) -> None:
        """Remove a client; a waiting client gets its lease. Removing a client that never joined is not an error."""
        if self._observed.has(client.number):
            self._observed.leave(client.number, self._clock())
        elif (left := self._clients.pop(client.number, None)) is not None:
            self._waits.pop(client.number, None)
            if (pending := self._suspended.get(left.session)) is not None:
                self._suspended[left.session] = [decision for decision in pending if decision.client != client.number]
            alive = self._pids.left(client.number)
            self._carry_out(self._arbiter.disconnect(client.number, self._clock(), alive=alive))
            self._check_in = CHECK_AGAIN
            self._check_ended()

    def expect(self, number: int, expected: Expected | None) -> None:
        """Expect a launch of the client with this number; None: expect none any longer. Unknown clients are ignored."""
        if number not in self._clients:
            return
        if expected is None:
            self._carry_out(self._arbiter.expect_no_more(number, self._clock()))
        else:
            self._carry_out(self._arbiter.expect(number, expected, self._clock()))

    def device_memory(self, amounts: Mapping[int, int | None], unstated: Mapping[int, int]) -> None:
        """Set the driver's bytes for the clients' processes on this GPU, by client number; None: not shown.

        ``unstated``: the part of these bytes that the processes have not stated. The driver lists processes: if a
        process has several connections, one connection has the figures and the others have 0.
        """
        now = self._clock()
        for number, amount in amounts.items():
            client, figures = self._clients.get(number), (amount, unstated.get(number, 0))
            if client is not None and figures != client.shown:
                client.shown = figures
                self._carry_out(self._arbiter.device_memory(number, *figures, now))

    def working_sets(self, resident: Mapping[int, int]) -> None:
        """Set upper bounds on the clients' managed memory that is now on the GPU, in bytes, by client number."""
        now = self._clock()
        for number, amount in resident.items():
            client = self._clients.get(number)
            if client is not None:
                client.seen = client.seen or amount > 0  # otherwise it may have been paged in since
                self._carry_out(self._arbiter.working_set(number, amount, now))

    def counts(self, client: CudaClient, managed: int, plain: int) -> None:
        """Replace a joined client's stated bytes; its stated shortage does not change."""
        self._carry_out(self._arbiter.memory_counts(client.number, managed, plain, self._clock()))

    def receive(self, client: CudaClient, frame: Frame) -> None:
        """Handle a frame of a joined client: REQUEST, RELEASE, MEMORY, IDLE, BUSY, PAGED_IN, PAGED_OUT.

        A client of an observed session sends MEMORY, IDLE or BUSY.
        """
        now, number, fields = self._clock(), client.number, frame.fields
        if self._observed.has(number):
            self._receive_observed(number, frame, now)
            return
        arbiter = self._arbiter
        record = self._clients[number]
        if frame.kind in (Kind.IDLE, Kind.BUSY, Kind.RELEASE):
            record.waits_since = None
        if frame.kind in (Kind.IDLE, Kind.BUSY):
            self._waits.pop(number, None)  # it runs
        match frame.kind:
            case Kind.REQUEST:
                record.waits_since = now if record.waits_since is None else record.waits_since
                record.waits_for_memory = fields[3] > 0
                if self._memory_queries is not None and not record.seen:
                    self._memory_queries.at_once()
                self._waits.pop(number, None)
                self._waits[number] = now
                short = self._bytes(fields[3])
                decisions = arbiter.request(number, self._bytes(fields[0]), self._bytes(fields[1]), now, short)
            case Kind.MEMORY:
                short = self._bytes(fields[2])
                decisions = arbiter.memory(number, self._bytes(fields[0]), self._bytes(fields[1]), now, short)
            case Kind.RELEASE:
                decisions = arbiter.release(
                    number, fields[0], self._within_lease(number, fields[0], fields[1], now), now
                )
            case Kind.IDLE:
                busy = self._within_lease(number, fields[0], fields[1], now)
                quiet = self._within_lease(number, fields[0], fields[2], now)
                decisions = arbiter.idle(number, fields[0], busy, quiet, now)
            case Kind.BUSY:
                decisions = arbiter.busy(number, fields[0], now)
            case Kind.PAGED_IN:
                seconds = min(fields[1] / NANOSECONDS, now - record.granted_at)
                if seconds > 0 and (listener := self.listeners.get(record.session)) is not None:
                    listener.waited(number, now - seconds, now, memory=True)
                decisions = arbiter.paged_in(number, self._bytes(fields[0]), fields[1] / NANOSECONDS, now)
            case Kind.PAGED_OUT:
                decisions = arbiter.paged_out(number, self._bytes(fields[0]), fields[1] / NANOSECONDS, now)
            case _:
                raise ValueError(f"{frame.kind.name} is not a frame for the arbiter")
        self._note_memory(number, record.session)
        self._carry_out(decisions)

    def _receive_observed(self, number: int, frame: Frame, now: float) -> None:
        fields = frame.fields
        match frame.kind:
            case Kind.MEMORY:
                self._observed.memory(number, fields[0] + fields[1])
                session = self._observed.session_of(number)
                if (listener := self.listeners.get(session)) is not None:
                    listener.has_memory(self.gpu.uuid, number, self._bytes(fields[0] + fields[1]), 0)
            case Kind.BUSY:
                self._observed.busy(number, now)
            case Kind.IDLE:
                self._observed.idle(number, fields[1] / NANOSECONDS, fields[2] / NANOSECONDS, now)
            case _:
                raise ValueError(f"{frame.kind.name} is not a frame of an observed session")

    @property
    def contended(self) -> bool:
        """Whether several sessions have work or recently had work, or a session with a GPU time limit has work."""
        return self._arbiter.measured

    def delivered(
        self, seconds_ago: tuple[float, float], busy: Mapping[int, float], strangers: Mapping[int, str]
    ) -> None:
        """Add a driver sample: start and end in seconds before now, and GPU seconds by pid.

        `strangers`: the sessions of processes, by pid, whether or not they are connected.
        """
        now = self._clock()
        since, until = (now - seconds for seconds in seconds_ago)
        self._carry_out(self._arbiter.delivered(since, until, self._pids.by_session(busy, strangers), now))

    def sampled(self, session: str, seconds_ago: tuple[float, float], gpu_seconds: float) -> None:
        """Add a driver sample for an observed session's unconnected processes.

        `seconds_ago`: start and end in seconds before now. `gpu_seconds`: the processes' seconds on the GPU.
        """
        now = self._clock()
        if session in self._observed:
            since, until = now - seconds_ago[0], now - seconds_ago[1]
            self._observed.sampled(session, since, until, gpu_seconds)
            if (listener := self.listeners.get(session)) is not None:
                listener.used(self.gpu.uuid, None, since, until, min(gpu_seconds, until - since))

    def driver_memory(self, session: str, allocated: int) -> None:
        """Record the driver's figure for the memory of an observed session's unconnected processes."""
        if session in self._observed:
            self._observed.driver_memory(session, allocated)

    def snapshot(self, session: str) -> SessionView:
        """Return the snapshot of a session."""
        if session in self._observed:
            return self._observed.snapshot(session, self._clock())
        return self._arbiter.session_snapshot(session, self._clock())

    def recent_use(self, session: str) -> Use:
        """Return a session's GPU time in the last second."""
        if session in self._observed:
            return self._observed.recent_use(session, self._clock())
        return self._arbiter.recent_use(session, self._clock())

    def take_bursts(self, session: str) -> tuple[Burst, ...]:
        """Return the session's bursts that have ended since the last call. Their ends are on this clock."""
        return () if session in self._observed else self._arbiter.take_bursts(session, self._clock())

    def unsettled_use(self, session: str) -> list[tuple[int | None, float, float, float]]:
        """Return the session's use that its listener has not received yet: client, start, end, GPU seconds."""
        now, observed = self._clock(), session in self._observed
        spans = self._observed.unsettled_use(session, now) if observed else self._arbiter.unsettled_use(now)
        return [
            (_number(client), span.since, span.until, seconds)
            for span in spans
            for (name, client), seconds in span.used.items()
            if name == session
        ]

    def _use_settled(self, span: UseSpan) -> None:
        for (session, client), seconds in span.used.items():
            if seconds > 0 and (listener := self.listeners.get(session)) is not None:
                listener.used(self.gpu.uuid, _number(client), span.since, span.until, seconds)

    def _note_memory(self, number: int, session: str) -> None:
        if (listener := self.listeners.get(session)) is not None:
            listener.has_memory(self.gpu.uuid, number, *self._arbiter.memory_of(number))

    def _wait_over(self, number: int, client: _Client) -> None:
        """Record the end of a wait, or of its part for a lease."""
        since, client.waits_since = client.waits_since, None
        if since is not None and (listener := self.listeners.get(client.session)) is not None:
            listener.waited(number, since, self._clock(), client.waits_for_memory)

    def waiting(self) -> tuple[str, ...]:
        """Sessions that have work and no lease."""
        return self._arbiter.waiting()

    def now(self) -> float:
        """Return the time on the snapshots' clock."""
        return self._clock()

    def close(self) -> None:
        """Cancel all timers."""
        for timer in (self._timer, self._ended_timer):
            if timer is not None:
                timer.cancel()
        if self._delivery is not None:
            self._delivery.close()
        if self._memory_queries is not None:
            self._memory_queries.close()

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        resuming: list[str] = []
        for decision in decisions:
            assert isinstance(decision.client, int)
            client = self._clients.get(decision.client)
            if client is None:
                continue
            number, send = decision.client, partial(client.process.send, gpu=self._raw)
            if isinstance(decision, Refuse):  # suspended processes receive it too
                send(Kind.GRANT, 0, 0, 0, 0, 1)
                continue
            if client.session in self._suspended:
                pending = self._suspended[client.session]
                if pending is None:
                    pending = self._suspended[client.session] = []
                    resuming.append(client.session)
                if isinstance(decision, PageIn):  # the resumption carries it out
                    continue
                pending.append(decision)
                if isinstance(decision, LeaseGrant):
                    self._wait_over(number, client)
                    client.waits_since, client.waits_for_memory = self._clock(), True
                self._waits.setdefault(number, self._clock())
                continue
            match decision:
                case LeaseGrant(lease=lease, time_slice=time_slice, prefetch=prefetch, pace=pace):
                    self._waits.pop(number, None)
                    self._wait_over(number, client)
                    self._note_memory(number, client.session)
                    if client.lease != lease:  # otherwise this repeats the current lease
                        client.lease, client.granted_at = lease, self._clock()
                    paces = (round(pace * NANOSECONDS),) if client.paced else ()
                    send(Kind.GRANT, lease, round(time_slice * NANOSECONDS), prefetch, *paces)
                case Revoke(lease=lease, page_out=amount, reason=reason):
                    send(Kind.REVOKE, lease, amount, int(reason))
                case PageOut(amount=amount):
                    send(Kind.PAGE_OUT, amount)
                case PageIn(amount=amount):
                    send(Kind.PAGE_IN, amount)
        for change in self._arbiter.paces():
            assert isinstance(change.client, int)
            client = self._clients[change.client]
            # a client that is being resumed receives its pace with its lease
            if client.paced and client.session not in self._suspended:
                pace = round(change.seconds * NANOSECONDS)
                client.process.send(Kind.GRANT, change.lease, 0, 0, pace, gpu=self._raw)
        if self._delivery is not None and self._arbiter.measured:
            self._delivery.request()
        if self._memory_queries is not None:
            self._memory_queries.request()
        self._set_timer()
        for name in resuming:
            self.resume(name)
        for name in self._arbiter.suspensions():
            self.suspend(name)

    def _check_ended(self) -> None:
        """Report to the arbiter the processes that have ended since they disconnected, until none is running."""
        if self._ended_timer is not None:
            self._ended_timer.cancel()
        self._ended_timer = None
        for number, session in self._pids.ended():
            self._carry_out(self._arbiter.process_ended(number, session, self._clock()))
        if self._pids.waiting and self._ended_timer is None:
            self._ended_timer = self._call_at(self._clock() + self._check_in, self._check_ended)
            self._check_in = min(CHECK_SELDOM, 2 * self._check_in)

    def _set_timer(self) -> None:
        longest = next(iter(self._waits.values()), None)
        renewal = longest + RENEW_EVERY if longest is not None else None
        due = min((at for at in (renewal, self._arbiter.next_wakeup()) if at is not None), default=None)
        if due == self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._call_at(due, self._wake) if due is not None else None

    def _wake(self) -> None:
        self._timer = self._due = None
        now = self._clock()
        for number in [number for number, since in self._waits.items() if now >= since + RENEW_EVERY]:
            self._clients[number].process.send(Kind.GRANT, 0, gpu=self._raw)
            del self._waits[number]
            self._waits[number] = now
        self._carry_out(self._arbiter.tick(now))

    def _bytes(self, stated: int) -> int:
        # a process may state anything up to 2^64; more than this does not change the arbiter's decisions
        return min(stated, 64 * self.gpu.memory_bytes)

    def _within_lease(self, number: int, lease: int, nanoseconds: int, now: float) -> float:
        """Return the reported seconds of a lease, at most the seconds since the grant."""
        client = self._clients[number]
        return min(nanoseconds / NANOSECONDS, now - client.granted_at) if lease and lease == client.lease else 0.0


def _number(client: ClientId | None) -> int | None:
    return client if isinstance(client, int) else None


def _ignore(session: str) -> None:
    """Ignore a request, because no session can be suspended."""
