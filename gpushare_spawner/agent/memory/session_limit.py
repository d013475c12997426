"""The memory limit of one session: device memory that its processes may allocate together.

`SessionLimit` grants allowances to the processes, recalls unused parts, and records refused allocations. The frames:
docs/reference/protocol.md. The amount of host memory: host_memory.py. Amounts are bytes.

`Allowances` holds the rules, without clock and I/O. The agent grants each process an allowance in pieces, so that most
allocations need no request. The sum over a session's processes stays within the session's limit. Unused memory can be
recalled for another process. A process may have allocated more than its allowance (it ran without the agent, or is of
an older version): then its allocations count.

Stated memory takes nothing from other sessions: the arbiter gets the result of `believed`. All processes together
cannot raise it above the limit and the allowances without memory that the driver shows.

An allowance only changes by differences, each counted here when it is certain: a grant when it is sent, a return when
it has arrived. So the sum here is never less than the sum in the processes.

`MemoryHolds` keeps free GPU memory while suspended processes are restored into it, or while a session is being
suspended and may have to be resumed: no other session is granted more memory there. A restore that finds too little
memory can never be repeated on driver 580 (NVIDIA/cuda-checkpoint, issue 44).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import count

from gpushare_spawner.agent.sockets.connection import Connection
from gpushare_spawner.model.frames import Feature, Frame, Kind, ReserveKind, SessionMemoryTopic, gpu_bytes
from gpushare_spawner.model.report import NO_HITS, MemoryLimitHit, MemoryLimitHits
from gpushare_spawner.model.share import MemoryLimit

PIECES = 16
"""Part of the limit that a process gets at most beyond its request."""
SMALLEST_PIECE = 2 * 2**20


@dataclass
class StatedMemory:
    """The memory of one process on one GPU, in bytes."""

    granted: int = 0
    allocated: int = 0
    plain: int = 0
    """The part of `allocated` that cannot leave the GPU."""

    believed: int = 0
    """Allocated bytes that the arbiter last counted for it."""
    shown: int = 0
    """The most that the driver has shown of it with the same stated memory."""

    @property
    def counted(self) -> int:
        """Bytes that count towards the limit."""
        return max(self.granted, self.allocated)


class Allowances:
    """The allowances of one session on one GPU."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: dict[Hashable, StatedMemory] = {}

    def join(self, process: Hashable) -> None:
        """Add a process without memory."""
        self._held[process] = StatedMemory()

    def leave(self, process: Hashable) -> None:
        """Remove a process with its memory. An unknown process is no error."""
        self._held.pop(process, None)

    def of(self, process: Hashable) -> StatedMemory:
        """Return the memory of the process. Raises KeyError for an unknown process."""
        return self._held[process]

    def processes(self) -> list[tuple[Hashable, StatedMemory]]:
        """All processes with their memory."""
        return list(self._held.items())

    @property
    def counted(self) -> int:
        """Bytes of all processes that count towards the limit."""
        return sum(held.counted for held in self._held.values())

    @property
    def allocated(self) -> int:
        """Bytes that all processes have allocated."""
        return sum(held.allocated for held in self._held.values())

    def counted_of_others(self, process: Hashable) -> int:
        """Bytes of the other processes that count towards the limit."""
        return self.counted - self._held[process].counted

    def allocated_by_others(self, process: Hashable) -> int:
        """Bytes that the other processes have allocated."""
        return self.allocated - self._held[process].allocated

    def states(self, process: Hashable, allocated: int, plain: int | None = None) -> bool:
        """Record the stated memory of a process. Return whether that changed anything."""
        held = self._held[process]
        before = (held.allocated, held.plain)
        held.allocated = allocated
        held.plain = min(held.plain if plain is None else plain, allocated)
        return (held.allocated, held.plain) != before

    def believed(self, process: Hashable, stated: int, reserves: bool, spare: int = 0) -> int:
        """Return the part of the stated bytes that counts for the arbiter, and record it.

        ``reserves``: its memory lies within its allowance. Of the processes that do not reserve, the rest of the limit
        counts. More counts if the driver has shown it. ``spare``: bytes of the session beyond limit and allowances.
        """
        held = self._held[process]
        held.shown = min(held.shown, stated)
        others = [other for other in self._held.values() if other is not held]
        spare = max(0, spare - sum(max(0, other.believed - max(other.granted, other.shown)) for other in others))
        allowed = held.granted
        if not reserves:
            allowed = max(0, self.limit - sum(max(other.believed, other.granted) for other in others))
        held.believed = min(stated, max(allowed + spare, held.shown))
        return held.believed

    def driver_shows(self, process: Hashable, amount: int) -> None:
        """Record the driver's figure for the process. An unknown process is no error."""
        if (held := self._held.get(process)) is not None:
            held.shown = min(max(held.shown, amount), held.allocated)

    def gives_back(self, process: Hashable, amount: int) -> None:
        """Reduce the allowance of the process by this many bytes."""
        held = self._held[process]
        held.granted = max(0, held.granted - amount)

    def left_for(self, process: Hashable) -> int:
        """Return the total that the process may have beside the others; below 0 if they exceed the limit."""
        return self.limit - self.counted_of_others(process)

    def grant(self, process: Hashable, requested: int, most: int) -> int:
        """Raise the allowance of the process to `requested`, and by a further piece within `most`.

        Returns the increase. Where `requested` is more than `most` it grows up to `most`.
        """
        held = self._held[process]
        added = max(0, min(requested + self.piece, most) - held.granted)
        held.granted += added
        return added

    @property
    def piece(self) -> int:
        """Bytes that a process is granted in advance."""
        return max(self.limit // PIECES, SMALLEST_PIECE)

    def surplus(self) -> list[tuple[Hashable, int]]:
        """Return processes with two pieces more than they use, and the bytes beyond one piece."""
        return [
            (process, held.granted - held.allocated - self.piece)
            for process, held in self._held.items()
            if held.granted - held.allocated > 2 * self.piece
        ]

    def recallable(self, process: Hashable) -> list[Hashable]:
        """Return the other processes with an allowance; part of it may be unused."""
        return [other for other, held in self._held.items() if other != process and held.granted > 0]


HELD_AT_MOST = 20.0
"""Seconds; after that allocations of others continue.

80 GB in 15 s were measured on an H100 (NVIDIA/cuda-checkpoint, issue 29).
"""


class MemoryHolds:
    """The holds of free memory, by GPU (UUID) and session."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without holds. `clock`: seconds."""
        self._clock = clock
        self._since: dict[tuple[str, str], list[float]] = {}
        """By GPU and session. A session can hold it for several steps at once."""
        self.over: Callable[[str], None] = _nothing
        """Called with each GPU of which a hold has ended."""

    def begin(self, gpu: str, session: str) -> None:
        """Grant memory on the GPU to this session only from now on."""
        self._since.setdefault((gpu, session), []).append(self._clock())

    def end(self, gpu: str, session: str) -> None:
        """Undo the last `begin` of the session."""
        since = self._since[gpu, session]
        since.pop()
        if not since:
            del self._since[gpu, session]
        self.over(gpu)

    def against(self, gpu: str, session: str) -> bool:
        """Return whether the session has to wait for more memory on the GPU, because another session holds it."""
        now = self._clock()
        return any(
            held == gpu and holder != session and now - since[0] < HELD_AT_MOST
            for (held, holder), since in self._since.items()
        )


def _nothing(gpu: str) -> None:
    pass


RECALL_WITHIN = 0.5
"""Seconds that other processes have to return unused memory; the requesting process waits for a second."""
ASK_AGAIN = 1.5
"""Seconds after which a process has to repeat a request whose answer must wait.

The process allocates without the agent after 2 s, and repeats 16 times.
"""
TELL_WITHIN = 0.01
"""Seconds until the processes of a session are notified of each other's allocations; more if there are many."""
SHOWN_PROCESSES = 16
"""Processes in an observer's list for each GPU: those with most memory, and as many that computed most."""
MOST = 2**62
"""Bound for stated bytes: a process may state more than a machine has; sums must stay numbers that reports can carry.
"""

_recalls = count(1)
NANOSECONDS = 1_000_000_000


@dataclass
class _Question:
    """A RESERVE that waits: for other processes to return unused memory, or for the free memory."""

    connection: Connection
    gpu: str
    requested: int
    size: int
    number: int
    kind: ReserveKind
    awaited: set[int] = field(default_factory=set)
    """Numbers of the recalls without an answer."""
    held: bool = False
    """Whether it waits until no other session holds the GPU's free memory."""
    timer: asyncio.TimerHandle | None = None


class SessionLimit:
    """Answers RESERVE, RETURN and MEMORY of one session's processes."""

    def __init__(
        self,
        limits: Mapping[str, int],
        wall_clock: Callable[[], float],
        hits: MemoryLimitHits,
        left: Callable[[str, ReserveKind], tuple[int, MemoryLimit]],
        held: Callable[[str], bool],
    ) -> None:
        """Start without processes. `limits`: bytes that the session may allocate, by the GPU's UUID.

        `wall_clock`: seconds since the epoch. `left`: bytes that the budgets of host memory let the session
        take on a GPU beside its counted memory, and the limiting budget. `held`: whether another session holds
        the free memory of a GPU (UUID) now.
        """
        self._allowances = {uuid: Allowances(limit) for uuid, limit in limits.items()}
        self._raw = {uuid: gpu_bytes(uuid) for uuid in self._allowances}
        self._wall_clock = wall_clock
        self._left = left
        self._held = held
        self._held_since: dict[tuple[Connection, str], float] = {}
        """Time of the event loop since which a process waits for free memory that another session holds."""
        self._emptied: dict[int, tuple[Connection, str]] = {}
        """Recalls of all unused memory without an answer, by their numbers."""
        self._all_emptied = asyncio.Event()
        self._processes: dict[Connection, int] = {}
        """The pid of each process in its own numbering."""
        self._recalls: dict[int, tuple[Connection, str]] = {}
        """Recalls without an answer, by their numbers."""
        self._questions: dict[tuple[Connection, str], _Question] = {}
        self._sent: dict[tuple[Connection, str], int] = {}
        """The last figure of the others' memory that was sent to a process."""
        self._trimmed: dict[tuple[Connection, str], int] = {}
        """Recalls of surplus without an answer."""
        self._telling: asyncio.TimerHandle | None = None
        self.hits = hits

    def join(self, connection: Connection, pid: int) -> None:
        """Add a CUDA process. `pid`: its pid in its own numbering."""
        self._processes[connection] = pid
        for allowances in self._allowances.values():
            allowances.join(connection)

    def leave(self, connection: Connection) -> None:
        """Remove a process: its memory is free for the others."""
        if self._processes.pop(connection, None) is None:
            return
        for uuid, allowances in self._allowances.items():
            allowances.leave(connection)
            self._sent.pop((connection, uuid), None)
            self._trimmed.pop((connection, uuid), None)
            self._held_since.pop((connection, uuid), None)
            self._drop((connection, uuid))
        for number in [number for number, (peer, _) in self._emptied.items() if peer is connection]:
            self._is_emptied(number)
        for number, (process, _) in list(self._recalls.items()):
            if process is connection:
                self._answered(number)
        self._tell_soon()

    def begin_anew(self, limits: Mapping[str, int]) -> None:
        """Start anew after the session was opened again, perhaps with other limits."""
        self.set_limits(limits)
        self.hits = NO_HITS

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Set the limits, in bytes, by the GPU's UUID. A process keeps its memory beyond a lower limit."""
        for uuid, limit in limits.items():
            self._allowances[uuid].limit = limit

    def close(self) -> None:
        """Cancel all timers."""
        if self._telling is not None:
            self._telling.cancel()
        for key in list(self._questions):
            self._drop(key)

    def states(self, connection: Connection, uuid: str, managed: int, plain: int) -> None:
        """Record the memory that the process states in MEMORY or REQUEST."""
        managed, plain = min(managed, MOST), min(plain, MOST)
        if self._allowances[uuid].states(connection, managed + plain, plain):
            self._tell_soon()

    def believed(self, connection: Connection, uuid: str, managed: int, plain: int, spare: int = 0) -> tuple[int, int]:
        """Return the managed and the plain bytes of a process's stated memory that count for the arbiter.

        ``spare``: bytes of the session that may lie beyond its limit.
        """
        reserves = Feature.RESERVE in connection.features
        counted = self._allowances[uuid].believed(connection, min(managed + plain, MOST), reserves, spare)
        fixed = min(plain, counted)
        return counted - fixed, fixed

    def believed_anew(self, uuid: str) -> list[tuple[Connection, int, int]]:
        """Return the processes with changed counted memory for the arbiter, with managed and plain bytes.

        Causes are a grant, memory that others have freed, and the driver's figures.
        """
        changed = []
        for process, held in self._allowances[uuid].processes():
            assert isinstance(process, Connection)
            before = held.believed
            if before < held.allocated:
                managed, plain = self.believed(process, uuid, held.allocated - held.plain, held.plain)
                if managed + plain != before:
                    changed.append((process, managed, plain))
        return changed

    def driver_shows(self, connection: Connection, uuid: str, amount: int) -> None:
        """Record the driver's figure for the process on the GPU."""
        self._allowances[uuid].driver_shows(connection, amount)

    def received(self, connection: Connection, uuid: str, frame: Frame) -> None:
        """Handle RESERVE or RETURN of a joined process."""
        allowances = self._allowances[uuid]
        if frame.kind is Kind.RETURN:
            returned, allocated, number = frame.fields[:3]
            allowances.gives_back(connection, returned)
            if allowances.states(connection, min(allocated, MOST)):
                self._tell_soon()
            if self._trimmed.get((connection, uuid)) == number:
                del self._trimmed[connection, uuid]
            if self._recalls.get(number, (None, ""))[0] is connection:
                self._answered(number)
            if self._emptied.get(number, (None, ""))[0] is connection:
                self._is_emptied(number)
            return
        requested, allocated, size, number, kind = frame.fields[:5]
        if allowances.states(connection, min(allocated, MOST)):
            self._tell_soon()
        self._drop((connection, uuid))  # a process waits for one answer for each GPU
        question = _Question(
            connection, uuid, min(requested, MOST), min(size, MOST), number, ReserveKind(min(kind, max(ReserveKind)))
        )
        if size == 0:
            # the memory of a process at its connection is a fact, whatever the limit
            most = self._most(question)
            added = allowances.grant(
                connection, question.requested, min(most, question.requested) if self._held(uuid) else most
            )
            self._reserved(question, added, 0)
        elif self._waits(question):
            self._hold(question)
        else:
            self._decide(question)

    def processes(self) -> list[tuple[Connection, int]]:
        """Return the connected processes, each with the pid in its own numbering."""
        return list(self._processes.items())

    def tell_observer(self, connection: Connection, busy: Mapping[str, Collection[Connection]]) -> None:
        """Send the largest processes and the last refused allocation. ``busy``: additional processes, by GPU."""
        if Feature.RESERVE not in connection.features:
            return
        for uuid, allowances in self._allowances.items():
            by_size = sorted(allowances.processes(), key=lambda entry: -entry[1].allocated)
            for place, (process, held) in enumerate(by_size):
                assert isinstance(process, Connection)
                if (place < SHOWN_PROCESSES and held.allocated) or process in busy.get(uuid, ()):
                    self._say(connection, uuid, SessionMemoryTopic.PROCESS, self._processes[process], held.allocated)
        if (hit := self.hits.last) is not None:
            limit = next(limit for limit in MemoryLimit if limit.label == hit.limit)
            ago = max(0, round((self._wall_clock() - hit.at) * NANOSECONDS))
            fields = (limit, ago, hit.requested_bytes, hit.pid, self.hits.count, hit.allocated_bytes)
            connection.send(Kind.SESSION_MEMORY, SessionMemoryTopic.LIMIT_HIT, *fields)

    def counted(self, uuid: str) -> tuple[int, int]:
        """Return the bytes that count for the session on the GPU, and the part of them that can leave it."""
        allowances = self._allowances[uuid]
        counted = allowances.counted
        return counted, counted - sum(held.plain for _, held in allowances.processes())

    def trim(self) -> None:
        """Recall allowances beyond one piece above the allocations: others may need the host memory."""
        for uuid, allowances in self._allowances.items():
            for process, surplus in allowances.surplus():
                assert isinstance(process, Connection)
                if (process, uuid) not in self._trimmed:
                    self._trimmed[process, uuid] = number = next(_recalls)
                    process.send(Kind.RECALL, surplus, number, gpu=self._raw[uuid])

    async def recall_unused(self, uuid: str) -> None:
        """Recall the unused allowances on a GPU.

        Returns when the processes have answered, or after RECALL_WITHIN: a stopped process neither answers nor
        allocates.
        """
        numbers = set()
        for process, held in self._allowances[uuid].processes():
            assert isinstance(process, Connection)
            if held.granted > held.allocated:
                numbers.add(number := next(_recalls))
                self._emptied[number] = (process, uuid)
                process.send(Kind.RECALL, held.granted - held.allocated, number, gpu=self._raw[uuid])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECALL_WITHIN):
                while numbers & self._emptied.keys():
                    self._all_emptied.clear()
                    await self._all_emptied.wait()
        for number in numbers:
            self._emptied.pop(number, None)

    def _is_emptied(self, number: int) -> None:
        del self._emptied[number]
        self._all_emptied.set()

    def hold_over(self, uuid: str) -> None:
        """Continue waiting requests after another session's hold of a GPU's free memory."""
        if self._held(uuid):
            return
        for key, question in list(self._questions.items()):
            if question.held and question.gpu == uuid:
                self._drop(key)
                self._decide(question)

    def _waits(self, question: _Question) -> bool:
        """Return whether a request has to wait, because another session holds the free memory of its GPU."""
        if not self._held(question.gpu):
            return False
        now = asyncio.get_running_loop().time()
        return now - self._held_since.setdefault((question.connection, question.gpu), now) < HELD_AT_MOST

    def _hold(self, question: _Question) -> None:
        key, question.held = (question.connection, question.gpu), True
        self._questions[key] = question
        question.timer = asyncio.get_running_loop().call_later(ASK_AGAIN, self._ask_again, key)

    def _ask_again(self, key: tuple[Connection, str]) -> None:
        """Have a process repeat its request without a refusal: it compares again."""
        question = self._drop(key)
        if question is not None:
            self._reserved(question, 0, 0)

    def _decide(self, question: _Question) -> None:
        self._held_since.pop((question.connection, question.gpu), None)
        question.held = False
        if not self._decided(question):
            self._recall(question)

    def _most(self, question: _Question) -> int:
        """Return the total that the process may be given."""
        allowances = self._allowances[question.gpu]
        left, _ = self._left(question.gpu, question.kind)
        counted = allowances.of(question.connection).counted
        return min(allowances.left_for(question.connection), counted + max(0, left))

    def _limit(self, question: _Question) -> MemoryLimit | None:
        """Return the limit that forbids the request; None if nothing forbids it."""
        allowances = self._allowances[question.gpu]
        if question.kind is not ReserveKind.OWN_MANAGED and question.requested > allowances.left_for(
            question.connection
        ):
            return MemoryLimit.SESSION
        more = question.requested - allowances.of(question.connection).counted
        if more > 0:
            left, limit = self._left(question.gpu, question.kind)
            if more > left:
                return limit
        return None

    def _decided(self, question: _Question) -> bool:
        """Grant what the limits allow."""
        if self._limit(question) is not None:
            return False
        allowances = self._allowances[question.gpu]
        # the limits bound grants in advance
        most = max(question.requested, self._most(question))
        self._reserved(question, allowances.grant(question.connection, question.requested, most), 0)
        return True

    def _recall(self, question: _Question) -> None:
        """Recall unused memory of the others, and answer when they have returned it."""
        allowances = self._allowances[question.gpu]
        left, _ = self._left(question.gpu, question.kind)
        beyond_host = question.requested - allowances.of(question.connection).counted - left
        lacking = max(question.requested - allowances.left_for(question.connection), beyond_host)
        for other in allowances.recallable(question.connection):
            assert isinstance(other, Connection)
            number = next(_recalls)
            question.awaited.add(number)
            self._recalls[number] = (other, question.gpu)
            other.send(Kind.RECALL, lacking, number, gpu=self._raw[question.gpu])
        if not question.awaited:
            self._refuse(question)
            return
        key = question.connection, question.gpu
        self._questions[key] = question
        question.timer = asyncio.get_running_loop().call_later(RECALL_WITHIN, self._over, key)

    def _answered(self, number: int) -> None:
        """Handle the answer to a recall, or the end of its process."""
        self._recalls.pop(number, None)
        for key, question in list(self._questions.items()):
            if number in question.awaited:
                question.awaited.discard(number)
                if self._decided(question):
                    self._drop(key)
                elif not question.awaited:
                    self._over(key)

    def _over(self, key: tuple[Connection, str]) -> None:
        """End the wait: all have answered, or their time is over."""
        question = self._drop(key)
        if question is not None and not self._decided(question):
            self._refuse(question)

    def _refuse(self, question: _Question) -> None:
        limit = self._limit(question) or MemoryLimit.SESSION
        self.hits = self.hits.with_hit(
            MemoryLimitHit(
                limit=limit.label,
                at=self._wall_clock(),
                requested_bytes=question.size,
                allocated_bytes=self._allowances[question.gpu].allocated,
                pid=self._processes[question.connection],
            )
        )
        self._reserved(question, 0, limit)

    def _reserved(self, question: _Question, added: int, result: int) -> None:
        connection, uuid = question.connection, question.gpu
        others = self._allowances[uuid].allocated_by_others(connection)
        self._sent[connection, uuid] = others
        connection.send(Kind.RESERVED, added, result, question.number, others, gpu=self._raw[uuid])

    def _drop(self, key: tuple[Connection, str]) -> _Question | None:
        question = self._questions.pop(key, None)
        if question is not None:
            if question.timer is not None:
                question.timer.cancel()
            for number in question.awaited:
                self._recalls.pop(number, None)
        return question

    def _tell_soon(self) -> None:
        if self._telling is None and self._processes:
            delay = max(TELL_WITHIN, TELL_WITHIN / 4 * len(self._processes))
            self._telling = asyncio.get_running_loop().call_later(delay, self._tell)

    def _tell(self) -> None:
        """Notify each process of the others' allocations."""
        self._telling = None
        for uuid, allowances in self._allowances.items():
            everything = allowances.allocated
            for process, held in allowances.processes():
                assert isinstance(process, Connection)
                others = everything - held.allocated
                if Feature.RESERVE in process.features and self._sent.get((process, uuid), 0) != others:
                    self._sent[process, uuid] = others
                    self._say(process, uuid, SessionMemoryTopic.OTHERS, others)

    def _say(self, connection: Connection, uuid: str, topic: SessionMemoryTopic, *fields: int) -> None:
        connection.send(Kind.SESSION_MEMORY, topic, *fields, gpu=self._raw[uuid])
