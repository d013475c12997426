"""The executions of notebook cells in one session's kernels, as its notebook server reports them. Pure.

A notebook server reports each execution three times: submitted, started, ended. `Cells` keeps the executions that have
not ended, the most recent others, and the CUDA processes of each kernel: the kernel's process and its descendants.

Reports only divide the session's own work: a false report has no effect on other sessions. Times are in seconds on the
arbiters' clock and are passed as arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpushare_spawner.model.frames import CellEvent

MOST_UNFINISHED = 256
"""Number of executions without an end that are kept: "run all" submits a notebook's cells at once."""
MOST_FINISHED = 100
"""Number of finished executions that are kept, and written to the session's record."""


@dataclass(frozen=True)
class CellReport:
    """One CELL frame, see `model.frames.Kind`."""

    event: CellEvent
    number: int
    kernel: int
    text: int
    pid: int
    count: int


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

    @property
    def running(self) -> bool:
        """Whether the kernel executes it now."""
        return self.started_at is not None and self.ended_at is None


class Cells:
    """Executions of one session, and the CUDA processes of its kernels."""

    def __init__(self) -> None:
        self._cells: dict[int, Cell] = {}
        """Executions by number, in the order of their first report."""
        self._processes: dict[int, frozenset[int]] = {}
        """Pids of each CUDA process and its ancestors, in their own numbering, by the process's client number."""

    def received(self, report: CellReport, server: int, now: float) -> Cell | None:
        """Record a report. Return its execution; None if the report has no effect.

        A report can repeat or skip others: a notebook server that reconnects sends the state of each execution again.
        """
        cell = self._cells.get(report.number)
        new = cell is None
        if cell is None:
            if report.event is CellEvent.ENDED:
                return None
            cell = Cell(report.number, report.kernel, report.text, report.pid, now, server)
            self._cells[report.number] = cell
        before = cell.started_at, cell.ended_at
        cell.server, cell.count, cell.pid = server, report.count or cell.count, report.pid or cell.pid
        if report.event is CellEvent.ENDED:
            if cell.ended_at is None:
                cell.ended_at = now
        else:
            cell.ended_at = None  # it only lost its notebook server
            if report.event is CellEvent.STARTED and cell.started_at is None:
                cell.started_at = now
        self._forget()
        return cell if new or before != (cell.started_at, cell.ended_at) else None

    def server_left(self, server: int, now: float) -> None:
        """Record the end of a notebook server's connection: nothing will report the end of its executions."""
        for cell in self._cells.values():
            if cell.server == server and cell.ended_at is None:
                cell.ended_at = now
        self._forget()

    def process_joined(self, client: int, pids: Iterable[int]) -> None:
        """Add a CUDA process. `pids`: its pid and those of its ancestors, in their own numbering."""
        self._processes[client] = frozenset(pids)

    def process_left(self, client: int) -> None:
        """Remove a CUDA process. An unknown process is not an error."""
        self._processes.pop(client, None)

    def clients(self, cell: Cell) -> list[int]:
        """Return the client numbers of the connected CUDA processes of the cell's kernel."""
        return [client for client, pids in self._processes.items() if cell.pid in pids]

    @property
    def unfinished(self) -> list[Cell]:
        """Executions that have not ended, earliest submitted first."""
        return [cell for cell in self._cells.values() if cell.ended_at is None]

    @property
    def finished(self) -> list[Cell]:
        """Executions that have started and ended, earliest end first."""
        cells = [cell for cell in self._cells.values() if cell.ended_at is not None]
        return sorted(cells, key=lambda cell: cell.ended_at or 0.0)

    def _forget(self) -> None:
        """Drop executions that never started, and the oldest ones."""
        for cell in [cell for cell in self._cells.values() if cell.ended_at is not None and cell.started_at is None]:
            del self._cells[cell.number]
        for cells, most in ((self.unfinished, MOST_UNFINISHED), (self.finished, MOST_FINISHED)):
            for cell in cells[: max(0, len(cells) - most)]:
                del self._cells[cell.number]
