"""The memory limit of one session: the device memory that its processes together may allocate.

`SessionLimit` grants allowances to the processes, recalls unused parts, and records refused allocations. For the
frames, see docs/reference/protocol.md; for the amount of host memory, see sessions/host_memory.py. Amounts are in
bytes.

`Allowances` implements the rules, without a clock or I/O. The agent grants each process an allowance in pieces, so that
most allocations need no request. The sum over a session's processes stays within the session's limit. Unused memory can
be recalled for another process. If a process has allocated more than its allowance (it ran without the agent, or uses
an older version), its allocations count.

Stated memory cannot take memory from other sessions: the arbiter receives the result of `accepted`. All processes
together can raise this result above the limit and the allowances only with memory that the driver shows.

An allowance changes only by increments and decrements, each counted here once it is certain: a grant when it is sent, a
return when it has arrived. Therefore the sum here is never less than the sum in the processes.

`ExclusiveMemory` reserves free GPU memory while suspended processes are restored into it, or while a session is being
suspended and may need to be resumed: no other session is granted more memory there. With driver 580, a restore that
fails for lack of memory can never be repeated (NVIDIA/cuda-checkpoint, issue 44).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Generic, TypeVar

from gpushare_spawner.agent.session_socket import Connection
from gpushare_spawner.model.frames import Feature, Frame, Kind, ReserveKind, SessionMemoryTopic, gpu_bytes
from gpushare_spawner.model.report import MemoryLimitHit, MemoryLimitHits
from gpushare_spawner.model.share import MemoryLimit

PIECES = 16
"""Divisor of the limit: a process gets at most the quotient in addition to its request."""
SMALLEST_PIECE = 2 * 2**20

Process = TypeVar("Process", bound=Hashable)


@dataclass
class StatedMemory:
    """The memory of one process on one GPU, in bytes."""

    granted: int = 0
    allocated: int = 0
    plain: int = 0
    """The part of `allocated` that cannot leave the GPU."""

    accepted: int = 0
    """The part of `allocated` last passed to the arbiter."""
    shown: int = 0
    """The most memory that the driver has shown for it while its stated memory was the same."""

    @property
    def counted(self) -> int:
        """Bytes that count toward the limit."""
        return max(self.granted, self.allocated)


class Allowances(Generic[Process]):
    """The allowances of one session on one GPU."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_process: dict[Process, StatedMemory] = {}

    def join(self, process: Process) -> None:
        """Add a process without memory."""
        self._by_process[process] = StatedMemory()

    def leave(self, process: Process) -> None:
        """Remove a process and its memory. An unknown process is not an error."""
        self._by_process.pop(process, None)

    def of(self, process: Process) -> StatedMemory:
        """Return the memory of the process. Raises KeyError for an unknown process."""
        return self._by_process[process]

    def processes(self) -> list[tuple[Process, StatedMemory]]:
        """All processes, each with its memory."""
        return list(self._by_process.items())

    @property
    def counted(self) -> int:
        """All processes' bytes that count toward the limit."""
        return sum(memory.counted for memory in self._by_process.values())

    @property
    def allocated(self) -> int:
        """Bytes that all processes have allocated."""
        return sum(memory.allocated for memory in self._by_process.values())

    def states(self, process: Process, allocated: int, plain: int | None = None) -> bool:
        """Record a process's stated memory. Return whether it changed."""
        memory = self._by_process[process]
        before = (memory.allocated, memory.plain)
        memory.allocated = allocated
        memory.plain = min(memory.plain if plain is None else plain, allocated)
        return (memory.allocated, memory.plain) != before

    def accept(self, process: Process, stated: int, reserves: bool, spare: int = 0) -> int:
        """Return the part of the stated bytes that counts for the arbiter, and record it.

        ``reserves``: the process's memory stays within its allowance. For processes that do not reserve, the rest of
        the limit counts. In both cases more counts if the driver has shown it. ``spare``: bytes of the session beyond
        the limit and the allowances.
        """
        memory = self._by_process[process]
        memory.shown = min(memory.shown, stated)
        others = [other for other in self._by_process.values() if other is not memory]
        spare = max(0, spare - sum(max(0, other.accepted - max(other.granted, other.shown)) for other in others))
        allowed = memory.granted
        if not reserves:
            allowed = max(0, self.limit - sum(max(other.accepted, other.granted) for other in others))
        memory.accepted = min(stated, max(allowed + spare, memory.shown))
        return memory.accepted

    def driver_shows(self, process: Process, amount: int) -> None:
        """Record the driver's figure for the process. An unknown process is not an error."""
        if (memory := self._by_process.get(process)) is not None:
            memory.shown = min(max(memory.shown, amount), memory.allocated)

    def gives_back(self, process: Process, amount: int) -> None:
        """Reduce the allowance of the process by this many bytes."""
        memory = self._by_process[process]
        memory.granted = max(0, memory.granted - amount)

    def left_for(self, process: Process) -> int:
        """Return the total that the process may have in addition to the others; below 0 if they exceed the limit."""
        return self.limit - (self.counted - self._by_process[process].counted)

    def grant(self, process: Process, requested: int, most: int) -> int:
        """Raise the allowance of the process to `requested`, and by a further piece within `most`.

        Returns the increase. If `requested` is more than `most`, the allowance grows to `most`.
        """
        memory = self._by_process[process]
        added = max(0, min(requested + self.piece, most) - memory.granted)
        memory.granted += added
        return added

    @property
    def piece(self) -> int:
        """Bytes granted to a process in advance."""
        return max(self.limit // PIECES, SMALLEST_PIECE)

    def surplus(self) -> list[tuple[Process, int]]:
        """Return the processes with an allowance of two pieces beyond their use, and their bytes beyond one piece."""
        return [
            (process, memory.granted - memory.allocated - self.piece)
            for process, memory in self._by_process.items()
            if memory.granted - memory.allocated > 2 * self.piece
        ]

    def recallable(self, process: Process) -> list[Process]:
        """Return the other processes with an allowance; part of it may be unused."""
        return [other for other, memory in self._by_process.items() if other != process and memory.granted > 0]


EXCLUSIVE_AT_MOST = 20.0
"""Maximum seconds of exclusive use; after that, others' allocations continue.

80 GB in 15 s were measured on an H100 (NVIDIA/cuda-checkpoint, issue 29).
"""


class ExclusiveMemory:
    """Exclusive use of GPUs' free memory by suspensions and resumptions, by GPU UUID and session."""

    def __init__(self, clock: Callable[[], float], ended: Callable[[str], None]) -> None:
        """Start without exclusive use. `clock` returns seconds. `ended` is called with the GPU after each use."""
        self._clock = clock
        self._ended = ended
        self._since: dict[tuple[str, str], list[float]] = {}
        """Start times, by GPU and session. A session can have several steps that use memory at the same time."""

    @contextlib.contextmanager
    def exclusive(self, gpu: str, session: str) -> Iterator[None]:
        """Grant no other session memory on the GPU in the meantime. Others may have unused allowances."""
        starts = self._since.setdefault((gpu, session), [])
        starts.append(self._clock())
        try:
            yield
        finally:
            starts.pop()
            if not starts:
                del self._since[gpu, session]
            self._ended(gpu)

    def excludes(self, gpu: str, session: str) -> bool:
        """Return whether the session must wait for more memory on the GPU because another session has exclusive use."""
        now = self._clock()
        return any(
            excluded_gpu == gpu and owner != session and now - since[0] < EXCLUSIVE_AT_MOST
            for (excluded_gpu, owner), since in self._since.items()
        )


RECALL_WITHIN = 0.5
"""Seconds within which other processes must return unused memory; the requesting process waits for a second."""
ASK_AGAIN = 1.5
"""Seconds after which a process must repeat a request if its answer has to wait.

The process allocates without the agent after 2 s, and repeats the request 16 times.
"""
NOTIFY_WITHIN = 0.01
"""Seconds until a session's processes are notified of each other's allocations; more if there are many."""
SHOWN_PROCESSES = 16
"""Number of processes in an observer's list for each GPU: this many with the most memory, and as many that computed
most."""
MOST = 2**62
"""Limit on stated bytes: a process can state more than a machine has, and reports must be able to represent the sums.
"""

_numbers = count(1)
"""Sequence numbers of RECALL frames."""


@dataclass(eq=False)
class _Request:
    """A RESERVE without an answer. It can wait for others to return unused memory, or for the free memory."""

    connection: Connection
    gpu: str
    requested: int
    size: int
    number: int
    kind: ReserveKind
    recalls: set[int] = field(default_factory=set)
    """Numbers of the recalls that are not answered yet."""
    excluded: bool = False
    """Whether it waits until no other session has exclusive use of the GPU's free memory."""
    timer: asyncio.TimerHandle | None = None


@dataclass
class _OnGpu:
    """State of the frames between the agent and one process for one GPU."""

    others_sent: int = 0
    """The last figure of the others' memory sent to the process."""
    trim: int = 0
    """Number of the last recall of its surplus."""
    excluded_since: float | None = None
    """Event loop time since which it has been waiting for the end of another session's exclusive use."""
    waiting: _Request | None = None


@dataclass
class _Process:
    pid: int
    """Pid in the process's own numbering."""
    on: dict[str, _OnGpu]
    """State by GPU UUID."""


class SessionLimit:
    """Handler of RESERVE, RETURN and MEMORY from one session's processes."""

    def __init__(
        self,
        limits: Mapping[str, int],
        wall_clock: Callable[[], float],
        hits: MemoryLimitHits,
        left: Callable[[str, ReserveKind], tuple[int, MemoryLimit]],
        excluded: Callable[[str], bool],
    ) -> None:
        """Start without processes. `limits`: bytes that the session may allocate, keyed by GPU UUID.

        `wall_clock`: seconds since the epoch. `left` returns how many more bytes than its counted memory the session
        may have on a GPU under the host memory budgets, and the limiting budget. `excluded`: whether another session
        now has exclusive use of the free memory of a GPU (UUID).
        """
        self._allowances = {uuid: Allowances[Connection](limit) for uuid, limit in limits.items()}
        self._raw = {uuid: gpu_bytes(uuid) for uuid in self._allowances}
        self._wall_clock = wall_clock
        self._left = left
        self._excluded = excluded
        self._processes: dict[Connection, _Process] = {}
        self._recalls: dict[int, tuple[Connection, Callable[[], None] | None]] = {}
        """Unanswered recalls by number, each with the action to take after the answer or the end of its process."""
        self._notifying: asyncio.TimerHandle | None = None
        self.hits = hits

    def join(self, connection: Connection, pid: int) -> None:
        """Add a CUDA process. `pid`: its pid in its own numbering."""
        self._processes[connection] = _Process(pid, {uuid: _OnGpu() for uuid in self._allowances})
        for allowances in self._allowances.values():
            allowances.join(connection)

    def leave(self, connection: Connection) -> None:
        """Remove a process. Its memory becomes free for the others."""
        left = self._processes.pop(connection, None)
        if left is None:
            return
        for uuid, allowances in self._allowances.items():
            allowances.leave(connection)
            self._drop(left.on[uuid])
        for number in [number for number, (process, _) in self._recalls.items() if process is connection]:
            self._answered(connection, number)
        self._notify_soon()

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Set the limits, in bytes, keyed by GPU UUID. A process keeps memory that exceeds a lowered limit."""
        for uuid, limit in limits.items():
            self._allowances[uuid].limit = limit

    def close(self) -> None:
        """Cancel all timers."""
        if self._notifying is not None:
            self._notifying.cancel()
        for process in self._processes.values():
            for on_gpu in process.on.values():
                self._drop(on_gpu)

    def states(self, connection: Connection, uuid: str, allocated: int, plain: int | None = None) -> None:
        """Record the memory that the process states, and its plain part if the frame includes it."""
        if self._allowances[uuid].states(connection, min(allocated, MOST), plain):
            self._notify_soon()

    def stated(self, connection: Connection, uuid: str) -> int:
        """Return the bytes that a process last stated on a GPU; 0 for GPUs other than the session's."""
        allowances = self._allowances.get(uuid)
        return allowances.of(connection).allocated if allowances is not None else 0

    def accepted(self, connection: Connection, uuid: str, managed: int, plain: int, spare: int = 0) -> tuple[int, int]:
        """Return the managed and the plain bytes of a process's stated memory that count for the arbiter.

        ``spare``: bytes of the session that may lie beyond its limit.
        """
        reserves = Feature.RESERVE in connection.features
        counted = self._allowances[uuid].accept(connection, min(managed + plain, MOST), reserves, spare)
        fixed = min(plain, counted)
        return counted - fixed, fixed

    def accepted_anew(self, uuid: str) -> list[tuple[Connection, int, int]]:
        """Return the processes with changed memory as counted by the arbiter, with managed and plain bytes.

        Possible causes are a grant, memory that others have freed, and the driver's figures.
        """
        changed = []
        for process, memory in self._allowances[uuid].processes():
            before = memory.accepted
            if before < memory.allocated:
                managed, plain = self.accepted(process, uuid, memory.allocated - memory.plain, memory.plain)
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
            self.states(connection, uuid, allocated)
            self._answered(connection, number)
            return
        requested, allocated, size, number, kind = frame.fields[:5]
        self.states(connection, uuid, allocated)
        self._drop(self._processes[connection].on[uuid])  # a process waits for one answer per GPU
        request = _Request(
            connection, uuid, min(requested, MOST), min(size, MOST), number, ReserveKind(min(kind, max(ReserveKind)))
        )
        if size == 0:
            # a process's memory at connection time is a fact, regardless of the limit
            most = self._most(request)
            added = allowances.grant(
                connection, request.requested, min(most, request.requested) if self._excluded(uuid) else most
            )
            self._reserved(request, added, 0)
        elif self._has_to_wait(request):
            request.excluded = True
            self._wait(request, ASK_AGAIN, self._ask_again)
        else:
            self._decide(request)

    def processes(self) -> list[tuple[Connection, int]]:
        """Return the connected processes, each with the pid in its own numbering."""
        return [(connection, process.pid) for connection, process in self._processes.items()]

    def largest(self, uuid: str, others: Collection[Connection]) -> Iterator[tuple[Connection, int, int]]:
        """Yield the largest processes on a GPU, and `others`, each with its pid and its allocated bytes."""
        by_size = sorted(self._allowances[uuid].processes(), key=lambda entry: -entry[1].allocated)
        for place, (process, memory) in enumerate(by_size):
            if (place < SHOWN_PROCESSES and memory.allocated) or process in others:
                yield process, self._processes[process].pid, memory.allocated

    def counted(self, uuid: str) -> tuple[int, int]:
        """Return the bytes that count for the session on the GPU, and the part of them that can leave the GPU."""
        allowances = self._allowances[uuid]
        counted = allowances.counted
        return counted, counted - sum(memory.plain for _, memory in allowances.processes())

    def trim(self) -> None:
        """Recall allowances that exceed the allocations by more than one piece: others may need the host memory."""
        for uuid, allowances in self._allowances.items():
            for process, surplus in allowances.surplus():
                on_gpu = self._processes[process].on[uuid]
                if on_gpu.trim not in self._recalls:
                    on_gpu.trim = self._recall(process, uuid, surplus)

    async def recall_unused(self, uuid: str) -> None:
        """Recall the unused allowances on a GPU.

        Returns when the processes have answered, or after RECALL_WITHIN: a stopped process neither answers nor
        allocates.
        """
        answers: dict[int, asyncio.Future[None]] = {}
        for process, memory in self._allowances[uuid].processes():
            if memory.granted > memory.allocated:
                answer = asyncio.get_running_loop().create_future()
                number = self._recall(
                    process, uuid, memory.granted - memory.allocated, partial(answer.set_result, None)
                )
                answers[number] = answer
        try:
            if answers:
                await asyncio.wait(answers.values(), timeout=RECALL_WITHIN)
        finally:
            for number in answers:
                self._recalls.pop(number, None)

    def exclusive_ended(self, uuid: str) -> None:
        """Continue waiting requests after another session's exclusive use of a GPU's free memory."""
        if self._excluded(uuid):
            return
        for on_gpu in [process.on[uuid] for process in self._processes.values()]:
            if (request := on_gpu.waiting) is not None and request.excluded:
                self._drop(on_gpu)
                self._decide(request)

    def _has_to_wait(self, request: _Request) -> bool:
        """Return whether a request must wait because another session has exclusive use of its GPU's free memory."""
        if not self._excluded(request.gpu):
            return False
        now, on_gpu = asyncio.get_running_loop().time(), self._on_gpu(request)
        if on_gpu.excluded_since is None:
            on_gpu.excluded_since = now
        return now - on_gpu.excluded_since < EXCLUSIVE_AT_MOST

    def _wait(self, request: _Request, seconds: float, over: Callable[[_Request], None]) -> None:
        """Leave a request unanswered until `over` is called with it."""
        self._on_gpu(request).waiting = request
        request.timer = asyncio.get_running_loop().call_later(seconds, over, request)

    def _ask_again(self, request: _Request) -> None:
        """Have a process repeat its request, without a refusal. The process checks its memory again."""
        self._drop(self._on_gpu(request))
        self._reserved(request, 0, 0)

    def _decide(self, request: _Request) -> None:
        self._on_gpu(request).excluded_since = None
        request.excluded = False
        if not self._decided(request):
            self._recall_for(request)

    def _most(self, request: _Request) -> int:
        """Return the total that the process may be granted."""
        allowances = self._allowances[request.gpu]
        left, _ = self._left(request.gpu, request.kind)
        counted = allowances.of(request.connection).counted
        return min(allowances.left_for(request.connection), counted + max(0, left))

    def _limit(self, request: _Request) -> MemoryLimit | None:
        """Return the limit that forbids the request; None if the request is allowed."""
        allowances = self._allowances[request.gpu]
        left_for = allowances.left_for(request.connection)
        if request.kind is not ReserveKind.OWN_MANAGED and request.requested > left_for:
            return MemoryLimit.SESSION
        more = request.requested - allowances.of(request.connection).counted
        if more > 0:
            left, limit = self._left(request.gpu, request.kind)
            if more > left:
                return limit
        return None

    def _decided(self, request: _Request) -> bool:
        """Grant what the limits allow."""
        if self._limit(request) is not None:
            return False
        allowances = self._allowances[request.gpu]
        # the limits also apply to grants in advance
        most = max(request.requested, self._most(request))
        self._reserved(request, allowances.grant(request.connection, request.requested, most), 0)
        return True

    def _recall_for(self, request: _Request) -> None:
        """Recall the others' unused memory, and answer when they have returned it."""
        allowances = self._allowances[request.gpu]
        left, _ = self._left(request.gpu, request.kind)
        beyond_host = request.requested - allowances.of(request.connection).counted - left
        lacking = max(request.requested - allowances.left_for(request.connection), beyond_host)
        request.recalls = {
            self._recall(other, request.gpu, lacking, partial(self._returned, request))
            for other in allowances.recallable(request.connection)
        }
        if request.recalls:
            self._wait(request, RECALL_WITHIN, self._over)
        else:
            self._refuse(request)

    def _recall(self, process: Connection, uuid: str, amount: int, answered: Callable[[], None] | None = None) -> int:
        """Send RECALL, and call `answered` once, after the answer. Returns the number of the recall."""
        number = next(_numbers)
        self._recalls[number] = process, answered
        process.send(Kind.RECALL, amount, number, gpu=self._raw[uuid])
        return number

    def _answered(self, connection: Connection, number: int) -> None:
        """Handle the answer to a recall, or the end of its process. Other numbers are ignored."""
        process, answered = self._recalls.get(number, (None, None))
        if process is connection:
            del self._recalls[number]
            if answered is not None:
                answered()

    def _returned(self, request: _Request) -> None:
        """Decide a request again, after a process has returned memory for it."""
        request.recalls.intersection_update(self._recalls)
        if self._decided(request):
            self._drop(self._on_gpu(request))
        elif not request.recalls:
            self._over(request)

    def _over(self, request: _Request) -> None:
        """End the wait: all processes have answered, or their time is up."""
        self._drop(self._on_gpu(request))
        if not self._decided(request):
            self._refuse(request)

    def _refuse(self, request: _Request) -> None:
        limit = self._limit(request) or MemoryLimit.SESSION
        self.hits = self.hits.with_hit(
            MemoryLimitHit(
                limit=limit.label,
                at=self._wall_clock(),
                requested_bytes=request.size,
                allocated_bytes=self._allowances[request.gpu].allocated,
                pid=self._processes[request.connection].pid,
            )
        )
        self._reserved(request, 0, limit)

    def _reserved(self, request: _Request, added: int, result: int) -> None:
        connection, uuid = request.connection, request.gpu
        allowances = self._allowances[uuid]
        others = allowances.allocated - allowances.of(connection).allocated
        self._on_gpu(request).others_sent = others
        connection.send(Kind.RESERVED, added, result, request.number, others, gpu=self._raw[uuid])

    def _on_gpu(self, request: _Request) -> _OnGpu:
        return self._processes[request.connection].on[request.gpu]

    def _drop(self, on_gpu: _OnGpu) -> None:
        """Drop a process's waiting request, with its timer and its recalls."""
        request, on_gpu.waiting = on_gpu.waiting, None
        if request is not None:
            if request.timer is not None:
                request.timer.cancel()
            for number in request.recalls:
                self._recalls.pop(number, None)

    def _notify_soon(self) -> None:
        if self._notifying is None and self._processes:
            delay = max(NOTIFY_WITHIN, NOTIFY_WITHIN / 4 * len(self._processes))
            self._notifying = asyncio.get_running_loop().call_later(delay, self._notify)

    def _notify(self) -> None:
        """Notify each process of the others' allocations."""
        self._notifying = None
        for uuid, allowances in self._allowances.items():
            everything = allowances.allocated
            for process, memory in allowances.processes():
                others, on_gpu = everything - memory.allocated, self._processes[process].on[uuid]
                if Feature.RESERVE in process.features and on_gpu.others_sent != others:
                    on_gpu.others_sent = others
                    self._send(process, uuid, SessionMemoryTopic.OTHERS, others)

    def _send(self, connection: Connection, uuid: str, topic: SessionMemoryTopic, *fields: int) -> None:
        connection.send(Kind.SESSION_MEMORY, topic, *fields, gpu=self._raw[uuid])
