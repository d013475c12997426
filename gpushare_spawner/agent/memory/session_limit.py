"""The memory limit of one session: how much device memory its processes may allocate together.

Grants allowances to the processes, recalls what they do not use, and records refused allocations. The rules:
allowances.py. The frames: docs/reference/protocol.md. How much host memory there is: node_memory.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import count

from gpushare_spawner.agent.memory.allowances import Allowances
from gpushare_spawner.agent.memory.memory_holds import HELD_AT_MOST
from gpushare_spawner.agent.sockets.connection import Connection
from gpushare_spawner.model.memory_limits import MemoryLimit
from gpushare_spawner.model.memory_limits.hits import NO_HITS, MemoryLimitHit, MemoryLimitHits
from gpushare_spawner.model.protocol.frames import Feature, Frame, Kind, ReserveKind, SessionMemoryTopic, gpu_bytes

RECALL_WITHIN = 0.5
"""Seconds that other processes have to give back what they do not use; the asking process waits for a second."""
ASK_AGAIN = 1.5
"""Seconds after which a process is told to ask again where its answer has to wait: it allocates without the agent
after 2 s, and asks 16 times."""
TELL_WITHIN = 0.01
"""Seconds until the processes of a session are told of each other's allocations; more where there are many."""
SHOWN_PROCESSES = 16
"""Processes that an observer is told of for each GPU: those with most memory, and as many that computed most."""
MOST = 2**62
"""A process may claim more bytes than a machine has; sums of such claims stay numbers that reports can carry."""

_recalls = count(1)
NANOSECONDS = 1_000_000_000


@dataclass
class _Question:
    """A RESERVE that waits: for other processes to give back what they do not use, or for the free memory."""

    connection: Connection
    gpu: str
    wanted: int
    size: int
    number: int
    kind: ReserveKind
    awaited: set[int] = field(default_factory=set)
    """Numbers of the recalls that are not answered."""
    held: bool = False
    """It waits until no other session holds the GPU's free memory."""
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
        """`limits`: bytes that the session may allocate, by the GPU's UUID. `wall_clock`: seconds since the epoch.

        `left`: what the budgets of host memory let the session take on a GPU beside what is counted, and which of them.
        `held`: whether another session holds the free memory of a GPU (UUID) now.
        """
        self._allowances = {uuid: Allowances(limit) for uuid, limit in limits.items()}
        self._raw = {uuid: gpu_bytes(uuid) for uuid in self._allowances}
        self._wall_clock = wall_clock
        self._left = left
        self._held = held
        self._held_since: dict[tuple[Connection, str], float] = {}
        """Since when a process waits for free memory that another session holds, in the event loop's time."""
        self._emptied: dict[int, tuple[Connection, str]] = {}
        """Recalls of all that is not used and that are not answered, by their numbers."""
        self._all_emptied = asyncio.Event()
        self._processes: dict[Connection, int] = {}
        """The pid that each calls its own."""
        self._recalls: dict[int, tuple[Connection, str]] = {}
        """Recalls that are not answered, by their numbers."""
        self._questions: dict[tuple[Connection, str], _Question] = {}
        self._told: dict[tuple[Connection, str], int] = {}
        """What a process was told last of the memory of the others."""
        self._trimmed: dict[tuple[Connection, str], int] = {}
        """Recalls of surplus that are not answered."""
        self._telling: asyncio.TimerHandle | None = None
        self.hits = hits

    def join(self, connection: Connection, pid: int) -> None:
        """A CUDA process is there. `pid`: as it numbers itself."""
        self._processes[connection] = pid
        for allowances in self._allowances.values():
            allowances.join(connection)

    def leave(self, connection: Connection) -> None:
        """The process has gone: its memory is free for the others."""
        if self._processes.pop(connection, None) is None:
            return
        for uuid, allowances in self._allowances.items():
            allowances.leave(connection)
            self._told.pop((connection, uuid), None)
            self._trimmed.pop((connection, uuid), None)
            self._held_since.pop((connection, uuid), None)
            self._drop((connection, uuid))
        for number in [number for number, (asked, _) in self._emptied.items() if asked is connection]:
            self._is_emptied(number)
        for number, (asked, _) in list(self._recalls.items()):
            if asked is connection:
                self._answered(number)
        self._tell_soon()

    def begin_anew(self, limits: Mapping[str, int]) -> None:
        """The session was opened again, perhaps with other limits."""
        self.set_limits(limits)
        self.hits = NO_HITS

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Other limits, in bytes, by the GPU's UUID. A process keeps what it has beyond a lower one."""
        for uuid, limit in limits.items():
            self._allowances[uuid].limit = limit

    def close(self) -> None:
        """No more timers."""
        if self._telling is not None:
            self._telling.cancel()
        for key in list(self._questions):
            self._drop(key)

    def states(self, connection: Connection, uuid: str, managed: int, plain: int) -> None:
        """The process says what it has allocated, in MEMORY or REQUEST."""
        managed, plain = min(managed, MOST), min(plain, MOST)
        if self._allowances[uuid].states(connection, managed + plain, plain):
            self._tell_soon()

    def believed(self, connection: Connection, uuid: str, managed: int, plain: int, spare: int = 0) -> tuple[int, int]:
        """Return the managed and the plain bytes that count for the arbiter, of what the process says. ``spare``: bytes
        of the session that may lie beyond its limit."""
        reserves = Feature.RESERVE in connection.features
        counted = self._allowances[uuid].believed(connection, min(managed + plain, MOST), reserves, spare)
        fixed = min(plain, counted)
        return counted - fixed, fixed

    def believed_anew(self, uuid: str) -> list[tuple[Connection, int, int]]:
        """Return the processes of which the arbiter was told less than they said and is to be told otherwise: after a
        grant, when others have freed memory, or by what the driver shows. With their managed and plain bytes."""
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
        """The driver shows so many bytes of the process on the GPU."""
        self._allowances[uuid].driver_shows(connection, amount)

    def received(self, connection: Connection, uuid: str, frame: Frame) -> None:
        """RESERVE or RETURN of a process that joined."""
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
        wanted, allocated, size, number, kind = frame.fields[:5]
        if allowances.states(connection, min(allocated, MOST)):
            self._tell_soon()
        self._drop((connection, uuid))  # a process waits for one answer for each GPU
        question = _Question(
            connection, uuid, min(wanted, MOST), min(size, MOST), number, ReserveKind(min(kind, max(ReserveKind)))
        )
        if size == 0:
            # what a process has when it connects is a fact, whatever the limit
            most = self._most(question)
            added = allowances.grant(
                connection, question.wanted, min(most, question.wanted) if self._held(uuid) else most
            )
            self._reserved(question, added, 0)
        elif self._waits(question):
            self._hold(question)
        else:
            self._decide(question)

    def processes(self) -> list[tuple[Connection, int]]:
        """Return the processes that are connected, and the pid that each calls its own."""
        return list(self._processes.items())

    def tell_observer(self, connection: Connection, busy: Mapping[str, Collection[Connection]]) -> None:
        """Send the largest processes and the last refused allocation. ``busy``: processes that are sent too, by GPU."""
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
        """Bytes that count for the session on the GPU, and the part of them that can leave it."""
        allowances = self._allowances[uuid]
        counted = allowances.counted
        return counted, counted - sum(held.plain for _, held in allowances.processes())

    def trim(self) -> None:
        """Recall what is more than a piece beyond what a process has allocated: others may need the host memory."""
        for uuid, allowances in self._allowances.items():
            for process, surplus in allowances.surplus():
                assert isinstance(process, Connection)
                if (process, uuid) not in self._trimmed:
                    self._trimmed[process, uuid] = number = next(_recalls)
                    process.send(Kind.RECALL, surplus, number, gpu=self._raw[uuid])

    async def recall_unused(self, uuid: str) -> None:
        """Take back what the processes may still allocate on a GPU without asking. Returns when they have answered, or
        after RECALL_WITHIN: a process that is stopped does not answer, and does not allocate."""
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
        """Another session has stopped holding the free memory of a GPU."""
        if self._held(uuid):
            return
        for key, question in list(self._questions.items()):
            if question.held and question.gpu == uuid:
                self._drop(key)
                self._decide(question)

    def _waits(self, question: _Question) -> bool:
        """Whether a question has to wait, because another session holds the free memory of its GPU."""
        if not self._held(question.gpu):
            return False
        now = asyncio.get_running_loop().time()
        return now - self._held_since.setdefault((question.connection, question.gpu), now) < HELD_AT_MOST

    def _hold(self, question: _Question) -> None:
        key, question.held = (question.connection, question.gpu), True
        self._questions[key] = question
        question.timer = asyncio.get_running_loop().call_later(ASK_AGAIN, self._ask_again, key)

    def _ask_again(self, key: tuple[Connection, str]) -> None:
        """Tell a process that nothing was refused: it compares again, and asks again."""
        question = self._drop(key)
        if question is not None:
            self._reserved(question, 0, 0)

    def _decide(self, question: _Question) -> None:
        self._held_since.pop((question.connection, question.gpu), None)
        question.held = False
        if not self._decided(question):
            self._recall(question)

    def _most(self, question: _Question) -> int:
        """What the process may be given in all."""
        allowances = self._allowances[question.gpu]
        left, _ = self._left(question.gpu, question.kind)
        counted = allowances.of(question.connection).counted
        return min(allowances.left_for(question.connection), counted + max(0, left))

    def _limit(self, question: _Question) -> MemoryLimit | None:
        """What forbids it; None: nothing."""
        allowances = self._allowances[question.gpu]
        if question.kind is not ReserveKind.OWN_MANAGED and question.wanted > allowances.left_for(question.connection):
            return MemoryLimit.SESSION
        more = question.wanted - allowances.of(question.connection).counted
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
        # the limits bound what is given in advance
        most = max(question.wanted, self._most(question))
        self._reserved(question, allowances.grant(question.connection, question.wanted, most), 0)
        return True

    def _recall(self, question: _Question) -> None:
        """Ask the others for what they do not use, and answer when they have."""
        allowances = self._allowances[question.gpu]
        left, _ = self._left(question.gpu, question.kind)
        beyond_host = question.wanted - allowances.of(question.connection).counted - left
        lacking = max(question.wanted - allowances.left_for(question.connection), beyond_host)
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
        """A recall was answered, or its process is gone."""
        self._recalls.pop(number, None)
        for key, question in list(self._questions.items()):
            if number in question.awaited:
                question.awaited.discard(number)
                if self._decided(question):
                    self._drop(key)
                elif not question.awaited:
                    self._over(key)

    def _over(self, key: tuple[Connection, str]) -> None:
        """All have answered, or had their time."""
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
        self._told[connection, uuid] = others
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
        """Tell each process what the others have allocated."""
        self._telling = None
        for uuid, allowances in self._allowances.items():
            everything = allowances.allocated
            for process, held in allowances.processes():
                assert isinstance(process, Connection)
                others = everything - held.allocated
                if Feature.RESERVE in process.features and self._told.get((process, uuid), 0) != others:
                    self._told[process, uuid] = others
                    self._say(process, uuid, SessionMemoryTopic.OTHERS, others)

    def _say(self, connection: Connection, uuid: str, topic: SessionMemoryTopic, *fields: int) -> None:
        connection.send(Kind.SESSION_MEMORY, topic, *fields, gpu=self._raw[uuid])
