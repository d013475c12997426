"""Sessions on a GPU that another layer shares, by what their processes say of their GPU work. It decides nothing.

Their processes run with engine `observe` and need no lease: docs/reference/protocol.md, "Observing only". Times are
seconds of one clock and come in as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from gpushare_spawner.arbiter import RecentUse, SessionView, Use

SAMPLED_LATELY = 2.5
"""Seconds after the end of a sample with GPU work in which more is taken to be under way: samples are read every second
and end up to a second before."""
MOST_MEASURED = 16
"""Processes of a session that have figures of their own at an instant: each change of them is kept for 2 s."""


@dataclass
class _Process:
    """A connected process."""

    session: str
    joined_at: float
    busy_since: float | None = None
    """When it said that its burst began; None: it has none."""
    gpu_seconds: float = 0.0
    """With a burst on the GPU since it joined, as it has reported."""
    memory_bytes: int = 0


@dataclass
class _Session:
    news_at: float
    """When one of its processes last came, left, or said that a burst began or ended."""
    processes: set[int] = field(default_factory=set)
    working: dict[int, None] = field(default_factory=dict)
    """Those of them with a burst, the one that began first is first."""
    ended_gpu_seconds: float = 0.0
    """Of processes that have left, and of those that are not connected."""
    any_worked: float = 0.0
    """Seconds in which one of its processes at least had a burst, until `news_at`."""
    last_activity: float | None = None
    sampled_until: float | None = None
    """End of the last sample of the driver in which processes that are not connected computed."""
    unconnected_bytes: int = 0
    """Of processes that are not connected, as the driver shows them."""
    use: RecentUse = field(default_factory=RecentUse)


class ObservedSessions:
    """The sessions of one GPU, and their processes by number. What a process claims is capped by its time here."""

    def __init__(self, memory_bytes: int) -> None:
        """`memory_bytes`: of the GPU. No process is taken to have more."""
        self._gpu_bytes = memory_bytes
        self._sessions: dict[str, _Session] = {}
        self._processes: dict[int, _Process] = {}

    def __contains__(self, session: str) -> bool:
        return session in self._sessions

    def has(self, process: int) -> bool:
        """Return whether the process of that number has joined."""
        return process in self._processes

    def add(self, session: str, now: float) -> None:
        """A session comes."""
        self._sessions[session] = _Session(now)

    def remove(self, session: str) -> None:
        """A session goes, and its processes with it."""
        for process in self._sessions.pop(session).processes:
            del self._processes[process]

    def join(self, process: int, session: str, now: float) -> None:
        """A process of the session is there."""
        self._advance(session, now)
        self._processes[process] = _Process(session, now)
        self._sessions[session].processes.add(process)

    def leave(self, process: int, now: float) -> None:
        """A process is gone. Its burst, if it had one, ends now."""
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
        """A process says how many bytes it has allocated, of every kind."""
        self._processes[process].memory_bytes = min(allocated, self._gpu_bytes)

    def busy(self, process: int, now: float) -> None:
        """A process says that a burst begins, or is under way."""
        working = self._processes[process]
        session = self._advance(working.session, now)
        session.last_activity = now
        if working.busy_since is None:
            working.busy_since = now
            session.working[process] = None

    def idle(self, process: int, gpu_seconds: float, quiet: float, now: float) -> None:
        """A process says that its burst is over.

        `gpu_seconds`: with a burst since the process joined. `quiet`: seconds since its last work ended.
        """
        working = self._processes[process]
        session = self._advance(working.session, now)
        before, since = working.gpu_seconds, working.busy_since
        total = max(before, min(gpu_seconds, now - working.joined_at))
        working.gpu_seconds, working.busy_since = total, None
        session.working.pop(process, None)
        if since is not None:
            session.use.burst_ended((working.session, process), since, total - before)
        elif total == before:
            return  # there was no work
        begin = working.joined_at if since is None else since
        session.any_worked += max(0.0, total - before - (0.0 if since is None else now - since))
        session.last_activity = max(session.last_activity or begin, begin, now - quiet)

    def sampled(self, session: str, since: float, until: float, gpu_seconds: float) -> None:
        """The driver's sample: processes of the session that are not connected computed for so many seconds."""
        known = self._sessions[session]
        known.ended_gpu_seconds += min(gpu_seconds, until - since)
        known.any_worked += min(gpu_seconds, until - since)
        known.last_activity = max(known.last_activity or until, until)
        known.sampled_until = max(known.sampled_until or until, until)

    def driver_memory(self, session: str, allocated: int) -> None:
        """The driver shows so many bytes of processes of the session that are not connected."""
        self._sessions[session].unconnected_bytes = allocated

    def view(self, session: str, now: float) -> SessionView:
        """Return what is known about a session."""
        known = self._sessions[session]
        processes = [self._processes[process] for process in known.processes]
        under_way = [now - one.busy_since for one in processes if one.busy_since is not None]
        any_worked = known.any_worked + (now - known.news_at if known.working else 0.0)
        memory = min(known.unconnected_bytes + sum(one.memory_bytes for one in processes), self._gpu_bytes)
        return SessionView(
            waiting=False,
            running=bool(known.working)
            or (known.sampled_until is not None and now - known.sampled_until < SAMPLED_LATELY),
            held=False,
            memory_bytes=memory,
            resident_bytes=memory,
            # processes that work at the same time have one GPU together
            gpu_seconds=min(
                any_worked, known.ended_gpu_seconds + sum(one.gpu_seconds for one in processes) + sum(under_way)
            ),
            last_activity=known.last_activity,
        )

    def recent_use(self, session: str, now: float) -> Use:
        """Return the time with a burst of the session within the last `WINDOW`.

        Processes of one session that have bursts at the same time share it evenly; at most `MOST_MEASURED` of them do.
        Other sessions take nothing off it: how their work shares the GPU is for their layer to say.
        """
        known = self._sessions[session]
        return known.use.of(session, known.news_at, now, self._working(session))

    def _working(self, session: str) -> list[tuple[str, int]]:
        return [(session, process) for process in islice(self._sessions[session].working, MOST_MEASURED)]

    def _advance(self, session: str, now: float) -> _Session:
        """Count what has worked until now, before that changes."""
        known = self._sessions[session]
        known.use.advance(known.news_at, now, self._working(session))
        if known.working:
            known.any_worked += now - known.news_at
        known.news_at = now
        return known
