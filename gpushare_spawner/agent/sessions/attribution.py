"""Attribution of GPU processes to sessions, and the memory that no connection of theirs states.

Sharing is cooperative: the agent reports processes that use a GPU without the library. It stops only processes that
exceed their session's memory limit, on request, see sessions/enforcer.py.

The agent attributes a process by the kernel's facts (ancestors, cgroup, uid), never by its environment, and not by a
connection alone. `BypassWatch` also reports two kinds of connected processes. A process that holds much more memory
than its connection has stated sent a forged HELLO. A process with a context on another session's GPU named another MIG
instance: its frames are the same on all instances of a GPU.

`UnconnectedProcesses` finds the sessions of processes without a connection, so that the session is charged for their
GPU time. It reads /proc in the thread that queries the driver.

`UnstatedMemory` uses the driver's figure for each process: context, plain memory, and the managed memory on the GPU,
which some drivers leave out. The part of that figure beyond all stated memory is a lower bound for the context. Its
maximum over time is the whole context if the process's memory was once all on the GPU.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.model.report import MOST_EXCEEDING

log = logging.getLogger(__name__)


MAX_GENERATIONS = 64
UNSTATED_SLACK = 2**30
"""Bytes on one GPU that a process may hold in addition to its context and its stated memory: loaded code, and memory
that the driver reserves."""
_Key = TypeVar("_Key")
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")


@dataclass(frozen=True)
class ProcessOwner:
    """The facts by which the kernel attributes a process to a session."""

    session: str
    server: int | None = None
    """Pid of the notebook server."""
    uid: int | None = None
    """Uid of the server; None for a pod, which has its own users."""
    pod: str = ""
    """The pod's uid, on Kubernetes."""


def owners(sessions: Iterable[Session]) -> list[ProcessOwner]:
    """Return the owners of sessions, oldest first."""
    result = []
    for session in sorted(sessions, key=lambda session: session.record.begun):
        record = session.record
        if record.pod is not None:
            result.append(ProcessOwner(session.id, pod=record.pod.uid))
        else:
            server = record.process.pid if record.process is not None else None
            result.append(ProcessOwner(session.id, server, record.request.uid))
    return result


def attributed(
    pids: Iterable[int],
    owners: Iterable[ProcessOwner],
    connected: Mapping[int, str] = MappingProxyType({}),
    certain: bool = False,
) -> dict[str, set[int]]:
    """Return the processes of each session; processes without a session are omitted. Reads /proc.

    A process belongs to the session whose server is its ancestor; otherwise to the session whose server shares its
    cgroup and uid, if that cgroup belongs to one session; otherwise to the session whose pod's uid is in its cgroup's
    name; otherwise to the oldest session of its uid, unless that is root's or the agent's own.

    `connected`: the sessions of connected processes, by pid. A connection decides only between sessions that match
    equally by the kernel's facts, for example two sessions of one user. `certain`: omit processes that
    can belong to something else: matches by the last rule, and by the cgroup where the server's parent has the
    same cgroup and uid, as a hub has that runs all servers as one user.
    """
    owners = list(owners)
    by_server = _sessions_by((owner.server, owner.session) for owner in reversed(owners) if owner.server is not None)
    by_cgroup = _own_cgroups(owners, certain)
    by_pod = _sessions_by((owner.pod, owner.session) for owner in reversed(owners) if owner.pod)
    of_uid: dict[int | None, list[str]] = _sessions_by(
        (owner.uid, owner.session) for owner in owners if not certain and owner.uid not in (None, 0, os.geteuid())
    )
    matches: dict[str, set[int]] = {}
    for pid in pids:
        cgroup, uid = processes.cgroup(pid) or "", processes.uid(pid)
        sessions = (
            _by_descent(pid, by_server)
            or by_cgroup.get((cgroup, uid))
            or by_pod.get(_pod_uid(cgroup))
            or of_uid.get(uid)
        )
        if sessions:
            session = connected.get(pid, "")
            matches.setdefault(session if session in sessions else sessions[0], set()).add(pid)
    return matches


def of_other_users(pids: Iterable[int], session: Session) -> set[int]:
    """Return the processes that run as a different user from the session's server. Reads /proc.

    A setuid program that the server started is a descendant with another user. A pod has its own users.
    """
    record = session.record
    if record.pod is not None:
        return set()
    return {pid for pid in pids if set(processes.uids(pid)) - {record.request.uid}}


def _sessions_by(pairs: Iterable[tuple[_Key, str]]) -> dict[_Key, list[str]]:
    """Return the sessions of each key, in the order of the pairs."""
    sessions: dict[_Key, list[str]] = {}
    for key, session in pairs:
        sessions.setdefault(key, []).append(session)
    return sessions


class BypassWatch:
    """Compares NVML's list of processes with the connections after each query of NVML."""

    def __init__(self, unstated: UnstatedMemory, updated: Callable[[Session], None] = lambda session: None) -> None:
        """Start without suspects. `unstated` receives each of the driver's answers before this object does.

        `updated` is called with each session after its `exceeding` was set.
        """
        self._unstated = unstated
        self._updated = updated
        self._suspects: dict[str, set[int]] = {}

    async def update(self, states: Mapping[str, GpuState], sessions: Mapping[str, Session]) -> None:
        """Set the sessions' `bypassing` after two matches in a row: a new process may be about to connect.

        `states`: the driver's states, keyed by GPU UUID.
        """
        on_gpus = {pid for state in states.values() for pid in state.processes}
        connected = {connection.peer.pid for session in sessions.values() for connection in session.cuda}
        strangers = on_gpus - connected
        matches: Mapping[str, set[int]] = {}
        if sessions and strangers:
            matches = await asyncio.to_thread(attributed, strangers, owners(sessions.values()))
        pretending, elsewhere = self._pretending(sessions), _elsewhere(states, sessions)
        suspects = {
            name: matches.get(name, set()) | pretending.get(name, set()) | elsewhere.get(name, set())
            for name in sessions
        }
        for name, session in sessions.items():
            if session.record.gpus_unknown:
                continue  # its processes do not need the library
            sure = tuple(sorted(suspects[name] & self._suspects.get(name, set())))
            if new := set(sure) - set(session.bypassing):
                log.warning(
                    "session %s uses the GPU without the library, in processes %s",
                    name,
                    ", ".join(f"{pid}{_remark(pid, connected, elsewhere.get(name, ()))}" for pid in sorted(new)),
                )
            session.bypassing = sure
        over = [name for name, session in sessions.items() if self._exceeding(states, session, session.bypassing)]
        certain: Mapping[str, set[int]] = {}
        if over:
            pids = [pid for name in over for pid in sessions[name].bypassing]
            certain = await asyncio.to_thread(attributed, pids, owners(sessions.values()), certain=True)
        for name, session in sessions.items():
            # no process is stopped for memory that is only perhaps the session's
            its = certain.get(name, set()) & set(session.bypassing)
            named = (processes.named(pid) for pid in self._exceeding(states, session, its))
            session.exceeding = tuple(process for process in named if process is not None)
            self._updated(session)
        self._suspects = suspects

    def _exceeding(self, states: Mapping[str, GpuState], session: Session, bypassing: Collection[int]) -> list[int]:
        """Return those of these processes, largest first, without which the session would be within its limits.

        A session may hold no memory of other sessions' GPUs.
        """
        limits, over = session.memory_limits, []
        for gpu, state in states.items() if bypassing else ():
            amounts = {
                pid: self._unstated.beyond_context(pid, gpu, state.processes[pid] or 0)
                for pid in bypassing
                if pid in state.processes
            }
            beyond = self._unstated.stated(session, gpu) + sum(amounts.values()) - limits.get(gpu, 0)
            for pid in sorted(amounts, key=lambda pid: (-amounts[pid], pid)):
                if beyond > 0 and amounts[pid] > 0:
                    over.append(pid)
                beyond -= amounts[pid]
        return list(dict.fromkeys(over))[:MOST_EXCEEDING]

    def _pretending(self, sessions: Mapping[str, Session]) -> dict[str, set[int]]:
        """Return, by session, the connected processes that hold much more memory than they have stated."""
        session_of = {connection.peer.pid: name for name, session in sessions.items() for connection in session.cuda}
        pretending: dict[str, set[int]] = {}
        for (pid, _), amount in self._unstated.amounts.items():
            if pid in session_of and amount > UNSTATED_SLACK:
                pretending.setdefault(session_of[pid], set()).add(pid)
        return pretending


def _elsewhere(states: Mapping[str, GpuState], sessions: Mapping[str, Session]) -> dict[str, set[int]]:
    """Return, by session, the connected processes that have a context on another session's GPU."""
    own: dict[int, set[str]] = {}
    for session in sessions.values():
        for connection in session.cuda:
            own.setdefault(connection.peer.pid, set()).update(gpu.uuid for gpu in session.gpus)
    strays = {pid for gpu, state in states.items() for pid in state.processes if gpu not in own.get(pid, (gpu,))}
    matches = {
        name: strays & {connection.peer.pid for connection in session.cuda}
        for name, session in sessions.items()
        if strays and not session.record.gpus_unknown
    }
    return {name: pids for name, pids in matches.items() if pids}


def _remark(pid: int, connected: Collection[int], elsewhere: Collection[int]) -> str:
    """Return the text that follows a process's pid in the log."""
    if pid in elsewhere:
        return " (connected, on a GPU that is not the session's)"
    return " (connected, without stating its memory)" if pid in connected else ""


def _by_descent(pid: int, by_pid: Mapping[int, list[str]]) -> list[str]:
    ancestor: int | None = pid
    for _ in range(MAX_GENERATIONS):
        if ancestor is None or ancestor <= 1:
            return []
        if ancestor in by_pid:
            return by_pid[ancestor]
        ancestor = processes.parent(ancestor)
    return []


def _pod_uid(cgroup: str) -> str:
    """Return the pod uid in a cgroup path: .../pod<uid>/..., or (systemd driver) ...-pod<uid with _ for ->.slice."""
    match = _POD.search(cgroup)
    return match[1].replace("_", "-") if match else ""


def _own_cgroups(owners: Iterable[ProcessOwner], certain: bool) -> dict[tuple[str, int | None], list[str]]:
    """Map each (cgroup, uid) to its session, for cgroups that contain one session and not the agent.

    `certain`: see `attributed`.
    """
    by_path: dict[str, list[ProcessOwner]] = {}
    for owner in owners:
        path = processes.cgroup(owner.server) if owner.server is not None else None
        if path is not None:
            by_path.setdefault(path, []).append(owner)
    own = processes.cgroup_of_self()
    return {
        (path, members[0].uid): [members[0].session]
        for path, members in by_path.items()
        if len(members) == 1 and path != own and not (certain and _like_its_parent(members[0], path))
    }


def _like_its_parent(owner: ProcessOwner, path: str) -> bool:
    """Return whether the parent of an owner's server, like a hub, has the same uid and is in the same cgroup."""
    parent = processes.parent(owner.server) if owner.server is not None else None
    return parent is not None and processes.cgroup(parent) == path and processes.uid(parent) == owner.uid


REMEMBERED = 1.0
"""Seconds for which an answer is cached: samples come five times a second, and the kernel reuses pids much later."""


class UnconnectedProcesses:
    """Finds the sessions of processes. Each GPU has a thread that calls this object."""

    def __init__(self, sessions: Mapping[str, Session], clock: Callable[[], float] = time.monotonic) -> None:
        """Create an empty cache. `sessions` may change while this object is used."""
        self._sessions = sessions
        self._clock = clock
        self._lock = threading.Lock()
        self._cache: dict[int, tuple[str | None, float]] = {}
        """Session and time of the answer, by pid. Replaced as a whole: a thread keeps its copy."""

    def sessions_of(self, pids: Iterable[int]) -> dict[int, str]:
        """Return the session of each of these processes; processes without a session are omitted. Reads /proc."""
        now = self._clock()
        requested = tuple(pids)
        cached = {pid: answer for pid, answer in self._cache.items() if now - answer[1] < REMEMBERED}
        unknown = [pid for pid in requested if pid not in cached]
        if unknown:
            matches = attributed(unknown, owners(list(self._sessions.values())))
            cached.update(dict.fromkeys(unknown, (None, now)))
            cached.update({pid: (session, now) for session, its in matches.items() for pid in its})
            with self._lock:  # retain answers that another thread added meanwhile
                fresh = {pid: answer for pid, answer in self._cache.items() if now - answer[1] < REMEMBERED}
                self._cache = fresh | {pid: cached[pid] for pid in unknown}
        return {pid: session for pid in requested if (session := cached[pid][0]) is not None}


STEP = 64 * 2**20
"""Granularity of the memory figures, in bytes. The driver rounds each allocation up."""
LARGEST = 2**30
"""Maximum bytes of a context; anything more is memory that a process has not stated."""

Process = tuple[int, str]
"""Pid and GPU UUID."""


def _stated_bytes(gpus: Collection[str], sessions: Iterable[Session]) -> dict[Process, int]:
    """Return the bytes that each connected process states on the given GPUs (UUIDs), over all its connections."""
    stated: dict[Process, int] = {}
    for session in sessions:
        for connection in session.cuda:
            for gpu in gpus:
                amount = session.memory.stated(connection, gpu) if session.memory is not None else 0
                process = connection.peer.pid, gpu
                stated[process] = stated.get(process, 0) + amount
    return stated


@dataclass(frozen=True)
class _Figures:
    """The memory of a connected process on a GPU at the last poll, in bytes."""

    stated: int = 0
    beyond: int = 0
    """The driver's figure minus the stated memory."""
    context: int = 0
    """The maximum of `beyond` so far, up to `LARGEST`."""


class UnstatedMemory:
    """Memory that connected processes hold beyond their stated memory: CUDA contexts, and memory that they conceal.

    Stated memory counts until the next poll: the driver may still show memory that was just freed.
    """

    def __init__(self, gpus: Mapping[str, Gpu], context_bytes: int) -> None:
        """Store the context size.

        ``gpus``: keyed by UUID. ``context_bytes``: GPU memory of each process in addition to its allocations; simulated
        GPUs have none.
        """
        self._gpus = gpus
        self._context_bytes = context_bytes
        self._figures: dict[Process, _Figures] = {}
        self.amounts: dict[Process, int] = {}
        """Bytes that each process holds beyond its context and its stated memory; at least one `STEP`."""

    def stated(self, session: Session, gpu: str) -> int:
        """Return the bytes that all processes of a session state on the GPU with this UUID."""
        return sum(_stated_bytes((gpu,), (session,)).values())

    def beyond_context(self, pid: int, gpu: str, shown: int) -> int:
        """Return the bytes that a process holds for certain beyond its context and its stated memory.

        ``shown``: the driver's figure, in bytes.
        """
        device = self._gpus.get(gpu)  # the list of GPUs can have changed since the driver's answer
        context = 0 if device is not None and device.simulated else self._context_bytes + UNSTATED_SLACK
        return max(0, shown - context - self._figures.get((pid, gpu), _Figures()).stated)

    def update(self, states: Mapping[str, GpuState], sessions: Collection[Session]) -> None:
        """Process an answer of the driver, keyed by GPU UUID, and set the sessions' `context_bytes`."""
        figures = {key: kept for key, kept in self._figures.items() if key[1] not in states and key[1] in self._gpus}
        for (pid, gpu), stated in _stated_bytes(states.keys(), sessions).items():
            before = self._figures.get((pid, gpu), _Figures())
            shown = states[gpu].processes.get(pid)
            beyond = 0 if shown is None else shown - max(stated, before.stated)
            figures[pid, gpu] = _Figures(stated, beyond, min(max(before.context, beyond), LARGEST))
        self._figures = figures
        self.amounts = {
            (pid, gpu): unstated // STEP * STEP
            for (pid, gpu), now in figures.items()
            if (unstated := now.beyond - (0 if self._gpus[gpu].simulated else self._context_bytes)) >= STEP
        }
        for session in sessions:
            pids = {connection.peer.pid for connection in session.cuda}
            keys = [(pid, gpu.uuid) for pid in pids for gpu in session.gpus]
            contexts = sum(figures[key].context for key in keys if key in figures)
            session.context_bytes = 0 if session.suspended else contexts
