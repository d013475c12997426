"""The executions of notebook cells in one session's kernels, and their part of the session's GPU work. Pure.

A notebook server reports each execution three times: submitted, started, ended. `Cells` keeps the executions that have
not ended, the most recent others, and the CUDA processes of each kernel: the kernel's process and its descendants.

`Cells` also receives the use, the waits and the memory of these processes, and divides them by time. What several cells
of a kernel have in common is divided evenly among them. Work that a cell has left running belongs to it until the
process is quiet, another cell of the kernel starts, or `LONGEST_REST` has passed. All other use is outside of cells, so
that the sum is the use of the session.

Reports only divide the session's own work: a false report has no effect on other sessions. Times are in seconds on the
arbiters' clock and are passed as arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise

from gpushare_spawner.model.frames import CellEvent
from gpushare_spawner.model.share_status import CellsStatus, CellStatus

MOST_UNFINISHED = 256
"""Number of executions without an end that are kept: "run all" submits a notebook's cells at once."""
MOST_RUNNING = 16
"""Number of executions that can run at once: a kernel runs cells one after another, unless it has subshells."""
MOST_AT_ONCE = 32
"""Number of executions among which an interval of work is divided, so that false reports cost the agent little."""
MOST_FINISHED = 100
"""Number of finished executions that are kept, and written to the session's record."""
MOST_ENDED_PROCESSES = 64
"""Number of ended processes that are kept: their last use is settled after their end."""
LONGEST_REST = 10.0
"""Seconds for which a cell's work may go on after the cell's end. Our choice: kernels that were launched without a wait
for their end; a thread that works for longer is no part of the cell."""
QUIET = 0.001
"""Seconds without use from which the next use is new work, so that the previous cell has not left it running."""
LONGEST_JOINED = 0.25
"""Seconds in which a client's latest use counts as even, until it is settled."""
LATEST_EVENT = 5.0
"""Maximum seconds between an event and its report: a notebook server can be busy with a cell's output."""


@dataclass(frozen=True)
class CellReport:
    """One CELL frame, see `model.frames.Kind`."""

    event: CellEvent
    number: int
    kernel: int
    text: int
    pid: int
    count: int
    ago: float = 0.0
    """Seconds since the event."""


@dataclass(eq=False)
class Cell:
    """One execution of a cell."""

    number: int
    """Number of the execution, which the notebook server chose."""
    kernel: int
    """Number of the kernel, which the notebook server chose."""
    text: int
    """Keyed hash of the cell's text: the same for the same text, until the notebook server restarts."""
    pid: int
    """Pid of the kernel in its own pid namespace; 0: unknown."""
    submitted_at: float
    server: int
    """Number of the notebook server's connection."""
    count: int = 0
    """The kernel's execution count; 0: unknown."""
    started_at: float | None = None
    ended_at: float | None = None

    gpu_seconds: float = 0.0
    divided_seconds: float = 0.0
    """GPU seconds in which other cells of the kernel ran too."""
    lease_seconds: float = 0.0
    memory_seconds: float = 0.0
    on_gpu_bytes: int = 0
    """Peak of its kernel's memory on the GPU."""
    paged_out_bytes: int = 0
    """Peak of its kernel's memory that was paged out."""

    @property
    def running(self) -> bool:
        """Whether the kernel executes it now."""
        return self.started_at is not None and self.ended_at is None

    def add(self, seconds: float, divided: bool) -> None:
        """Add GPU seconds. `divided`: the time was divided among several cells."""
        self.gpu_seconds += seconds
        self.divided_seconds += seconds if divided else 0.0


@dataclass
class _Work:
    """Continuous use of one client on one GPU."""

    since: float
    until: float


@dataclass
class _Sums:
    """GPU seconds of a session that belong to no listed cell."""

    total: float = 0.0
    outside: float = 0.0
    earlier: float = 0.0
    earlier_cells: int = 0


Part = tuple[Cell | None, float, bool]
"""Cell, or None outside of cells; its part of an interval, from 0 to 1; whether other cells had parts of that time."""


@dataclass
class Cells:
    """Executions of one session, and the CUDA processes of its kernels. Implements `WorkListener`."""

    _unfinished: dict[int, Cell] = field(default_factory=dict)
    """Executions without an end by number, in the order of their first report."""
    _finished: dict[int, Cell] = field(default_factory=dict)
    """Executions that have started and ended by number, in the order of the reports of their ends."""
    _past: dict[int, CellStatus] = field(default_factory=dict)
    """Executions from before the agent's start by number."""
    _processes: dict[int, frozenset[int]] = field(default_factory=dict)
    """Pids of each CUDA process and its ancestors, in their own numbering, by the process's client number."""
    _ended_processes: dict[int, None] = field(default_factory=dict)
    """Client numbers of the processes that have ended."""
    _work: dict[tuple[str, int], _Work] = field(default_factory=dict)
    """The last settled work by GPU and client."""
    _memory: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """Bytes on the GPU and paged out, by GPU and client."""
    _sums: _Sums = field(default_factory=_Sums)

    # -- the notebook server's reports -------------------------------------------------------------------------------

    def received(self, report: CellReport, server: int, now: float) -> Cell | None:
        """Record a report. Return its execution; None if the report has no effect.

        A report can repeat or skip others: a notebook server that reconnects sends the state of each execution again.
        """
        cell, at = self._of(report.number), now - min(max(0.0, report.ago), LATEST_EVENT)
        new = cell is None
        if cell is None:
            if report.event is CellEvent.ENDED:
                return None
            cell = Cell(report.number, report.kernel, report.text, report.pid, at, server)
            self._continue(cell)
        before = cell.started_at, cell.ended_at
        cell.server, cell.count, cell.pid = server, report.count or cell.count, report.pid or cell.pid
        if report.event is CellEvent.ENDED:
            self._end(cell, at)
        else:
            cell.ended_at = None  # it only lost its notebook server
            self._finished.pop(cell.number, None)
            self._unfinished[cell.number] = cell
            if report.event is CellEvent.STARTED and cell.started_at is None:
                cell.started_at = max(at, cell.submitted_at)
                self._note_peak(cell)
            running = [other for other in self._unfinished.values() if other.running]
            if len(running) > MOST_RUNNING:
                self._end(running[0], now)
            if len(self._unfinished) > MOST_UNFINISHED:
                self._end(next(other for other in self._unfinished.values() if not other.running), now)
        return cell if new or before != (cell.started_at, cell.ended_at) else None

    def server_left(self, server: int, now: float) -> None:
        """Record the end of a notebook server's connection: nothing will report the end of its executions."""
        for cell in [cell for cell in self._unfinished.values() if cell.server == server]:
            self._end(cell, now)

    def process_joined(self, client: int, pids: Iterable[int]) -> None:
        """Add a CUDA process. `pids`: its pid and those of its ancestors, in their own numbering."""
        self._processes[client] = frozenset(pids)

    def process_left(self, client: int) -> None:
        """Record the end of a CUDA process. An unknown process is not an error."""
        self._memory = {key: amounts for key, amounts in self._memory.items() if key[1] != client}
        if client in self._processes:
            self._ended_processes[client] = None
        if len(self._ended_processes) > MOST_ENDED_PROCESSES:
            oldest = next(iter(self._ended_processes))
            del self._ended_processes[oldest], self._processes[oldest]
            self._work = {key: work for key, work in self._work.items() if key[1] != oldest}

    def pids(self, client: int) -> frozenset[int]:
        """Return the pids of a CUDA process and its ancestors; none for an unknown process."""
        return self._processes.get(client, frozenset())

    def clients(self, cell: Cell) -> list[int]:
        """Return the client numbers of the connected CUDA processes of the cell's kernel."""
        return [
            client
            for client, pids in self._processes.items()
            if cell.pid in pids and client not in self._ended_processes
        ]

    @property
    def unfinished(self) -> list[Cell]:
        """Executions that have not ended, earliest submitted first."""
        return list(self._unfinished.values())

    @property
    def finished(self) -> list[Cell]:
        """Executions that have started and ended, earliest end first."""
        return list(self._finished.values())

    def _of(self, number: int) -> Cell | None:
        return self._unfinished.get(number) or self._finished.get(number)

    def _end(self, cell: Cell, at: float) -> None:
        if self._unfinished.pop(cell.number, None) is None:
            return
        cell.ended_at = max(at, cell.started_at or 0.0)
        if cell.started_at is not None:
            self._finished[cell.number] = cell
            self._forget()

    def _forget(self) -> None:
        """Move the oldest executions into the sum of the earlier ones."""
        while len(self._finished) + len(self._past) > MOST_FINISHED:
            older: dict[int, CellStatus] | dict[int, Cell] = self._past or self._finished
            forgotten = older.pop(next(iter(older)))
            self._sums.earlier += forgotten.gpu_seconds
            self._sums.earlier_cells += 1

    def _continue(self, cell: Cell) -> None:
        """Adopt the figures of an execution that began before the agent's start."""
        past = self._past.pop(cell.number, None)
        if past is not None:
            cell.gpu_seconds, cell.divided_seconds = past.gpu_seconds, past.divided_seconds
            cell.lease_seconds, cell.memory_seconds = past.lease_seconds, past.memory_seconds
            cell.on_gpu_bytes, cell.paged_out_bytes = past.on_gpu_bytes, past.paged_out_bytes
            cell.submitted_at -= past.seconds
            cell.started_at = cell.submitted_at

    # -- the processes' work -----------------------------------------------------------------------------------------

    def used(self, gpu: str, client: int | None, since: float, until: float, seconds: float) -> None:
        """Add settled GPU seconds of a client within an interval. `client` None: processes without a connection."""
        self._sums.total += seconds
        work = self._work_of(self._work, gpu, client, since, until)
        for cell, part, divided in self._parts(client, work, since, until):
            if cell is None:
                self._sums.outside += seconds * part
            else:
                cell.add(seconds * part, divided)

    def waited(self, client: int, since: float, until: float, memory: bool) -> None:
        """Add a wait of a client: for memory, or for a lease."""
        for cell, part, _ in self._parts(client, _Work(until, until), since, until):
            if cell is not None and memory:
                cell.memory_seconds += (until - since) * part
            elif cell is not None:
                cell.lease_seconds += (until - since) * part

    def has_memory(self, gpu: str, client: int, on_gpu: int, paged_out: int) -> None:
        """Set a client's allocated bytes that are not paged out, and those that are."""
        before, self._memory[gpu, client] = self._memory.get((gpu, client)), (on_gpu, paged_out)
        if before == (on_gpu, paged_out):
            return  # each lease says it again
        pids = self._processes.get(client, frozenset())
        for cell in self._unfinished.values():
            if cell.running and cell.pid in pids:
                self._note_peak(cell)

    def _note_peak(self, cell: Cell) -> None:
        amounts = [
            amount for (_, client), amount in self._memory.items() if cell.pid in self._processes.get(client, ())
        ]
        cell.on_gpu_bytes = max(cell.on_gpu_bytes, sum(on_gpu for on_gpu, _ in amounts))
        cell.paged_out_bytes = max(cell.paged_out_bytes, sum(paged_out for _, paged_out in amounts))

    @staticmethod
    def _work_of(
        known: dict[tuple[str, int], _Work], gpu: str, client: int | None, since: float, until: float
    ) -> _Work | None:
        """Return the continuous work that an interval of use belongs to, and record it in `known`."""
        if client is None:
            return None
        before = known.get((gpu, client))
        begun = before.since if before is not None and since - before.until <= QUIET else since
        known[gpu, client] = work = _Work(begun, until)
        return work

    def _parts(self, client: int | None, work: _Work | None, since: float, until: float) -> Iterator[Part]:
        """Divide an interval of a client's work among the cells of its kernel. The parts add up to 1."""
        pids = self._processes.get(client, frozenset()) if client is not None else frozenset()
        cells = list(islice(self._cells_within(pids, since, until), MOST_AT_ONCE)) if pids else []
        if not cells or work is None or until <= since:
            yield None, 1.0, False
            return
        edges = {since, until}
        for cell in cells:
            edges |= {edge for edge in (cell.started_at, cell.ended_at) if edge is not None and since < edge < until}
            if cell.ended_at is not None and since < cell.ended_at + LONGEST_REST < until:
                edges.add(cell.ended_at + LONGEST_REST)
        for begin, end in pairwise(sorted(edges)):
            part = (end - begin) / (until - since)
            owners = [cell for cell in cells if _runs(cell, begin)] or _left_running(cells, work, begin)
            for cell in owners:
                yield cell, part / len(owners), len(owners) > 1
            if not owners:
                yield None, part, False

    def _cells_within(self, pids: frozenset[int], since: float, until: float) -> Iterator[Cell]:
        """Yield the kernel's cells that started before the end of an interval, and did not end long before it."""
        running = (cell for cell in self._unfinished.values() if cell.running)
        for cell in chain(running, reversed(self._finished.values())):
            if cell.ended_at is not None and cell.ended_at + LONGEST_REST + LATEST_EVENT < since:
                return
            if cell.started_at is not None and cell.started_at < until and cell.pid in pids:
                yield cell

    # -- figures -----------------------------------------------------------------------------------------------------

    def status(
        self, unsettled: Iterable[tuple[str, int | None, float, float, float]], now: float, wall: float
    ) -> CellsStatus:
        """Return the executions that have started. `wall`: seconds since the epoch.

        `unsettled`: the use that `used` has not received yet, with the same arguments, earliest first.
        """
        sums, work = _Sums(**vars(self._sums)), dict(self._work)
        extra: dict[int, list[float]] = {}
        for gpu, client, since, until, seconds in _joined(unsettled):
            sums.total += seconds
            for cell, part, divided in self._parts(
                client, self._work_of(work, gpu, client, since, until), since, until
            ):
                if cell is None:
                    sums.outside += seconds * part
                    continue
                figures = extra.setdefault(cell.number, [0.0, 0.0])
                figures[0] += seconds * part
                figures[1] += seconds * part if divided else 0.0
        rows = [*self._past.values()]
        for cell in chain(self._finished.values(), self._unfinished.values()):
            if cell.started_at is not None:
                more, more_divided = extra.get(cell.number, (0.0, 0.0))
                rows.append(
                    CellStatus(
                        number=cell.number,
                        pid=cell.pid,
                        count=cell.count,
                        at=wall - (now - cell.started_at),
                        seconds=(now if cell.ended_at is None else cell.ended_at) - cell.started_at,
                        running=cell.running,
                        gpu_seconds=cell.gpu_seconds + more,
                        divided_seconds=cell.divided_seconds + more_divided,
                        lease_seconds=cell.lease_seconds,
                        memory_seconds=cell.memory_seconds,
                        on_gpu_bytes=cell.on_gpu_bytes,
                        paged_out_bytes=cell.paged_out_bytes,
                    )
                )
        rows.sort(key=lambda row: row.at)
        return CellsStatus(tuple(rows), sums.earlier_cells, sums.earlier, sums.outside, sums.total)

    def restore(self, recorded: CellsStatus) -> None:
        """Adopt the executions from before the agent's start."""
        self._past = {row.number: replace(row, running=False) for row in recorded.cells}
        self._sums = _Sums(recorded.gpu_seconds, recorded.outside_seconds, recorded.earlier_seconds, recorded.earlier)
        self._forget()

    def clear(self) -> None:
        """Drop the executions and the sums of an earlier opening of the session. Its processes stay."""
        self._unfinished, self._finished, self._past, self._sums = {}, {}, {}, _Sums()


def _joined(
    unsettled: Iterable[tuple[str, int | None, float, float, float]],
) -> list[tuple[str, int | None, float, float, float]]:
    """Join each client's continuous use up to `LONGEST_JOINED`: many processes with many events have many spans."""
    last: dict[tuple[str, int | None], int] = {}
    joined: list[tuple[str, int | None, float, float, float]] = []
    for gpu, client, since, until, seconds in unsettled:
        place = last.get((gpu, client))
        if place is not None:
            _, _, begun, ended, before = joined[place]
            if since - ended <= QUIET and until - begun <= LONGEST_JOINED:
                joined[place] = gpu, client, begun, until, before + seconds
                continue
        last[gpu, client] = len(joined)
        joined.append((gpu, client, since, until, seconds))
    return joined


def _runs(cell: Cell, at: float) -> bool:
    return cell.started_at is not None and cell.started_at <= at and (cell.ended_at is None or at < cell.ended_at)


def _left_running(cells: Iterable[Cell], work: _Work, at: float) -> list[Cell]:
    """Return the cell that ended last before an instant, if the work at that instant began before its end."""
    ended = [cell for cell in cells if cell.ended_at is not None and cell.ended_at <= at]
    last = max(ended, key=lambda cell: cell.ended_at or 0.0, default=None)
    if last is None or last.ended_at is None:
        return []
    return [last] if work.since <= last.ended_at and at < last.ended_at + LONGEST_REST else []
