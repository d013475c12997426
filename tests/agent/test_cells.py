"""Executions of cells: the frames of a notebook server, and what an agent keeps of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.session_socket import MALFORMED
from gpushare_spawner.agent.sessions.cells import MOST_FINISHED, MOST_UNFINISHED, CellReport, Cells
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.model.frames import CellEvent, Feature, Kind, Role
from tests.agent.conftest import Agent
from tests.agent.peers import Peer

SUBMITTED, STARTED, ENDED = CellEvent


def report(event: CellEvent, number: int, kernel: int = 1, pid: int = 50, count: int = 0) -> CellReport:
    return CellReport(event, number, kernel, text=7, pid=pid, count=count)


def test_an_execution_is_submitted_started_and_ended() -> None:
    cells = Cells()
    cell = cells.received(report(SUBMITTED, 1), server=1, now=10.0)
    assert cell is not None
    assert (cell.running, cells.unfinished) == (False, [cell])
    assert cells.received(report(STARTED, 1, count=3), 1, 11.0) is cell
    assert (cell.running, cell.count, cell.submitted_at, cell.started_at) == (True, 3, 10.0, 11.0)
    assert cells.received(report(ENDED, 1), 1, 12.5) is cell
    assert (cell.running, cell.ended_at, cells.unfinished, cells.finished) == (False, 12.5, [], [cell])


def test_a_report_that_repeats_an_event_has_no_effect() -> None:
    cells = Cells()
    cells.received(report(SUBMITTED, 1), 1, 10.0)
    assert cells.received(report(SUBMITTED, 1), 1, 11.0) is None
    assert cells.received(report(STARTED, 1), 1, 12.0) is not None
    assert cells.received(report(STARTED, 1), 1, 13.0) is None
    assert cells.received(report(ENDED, 2), 1, 13.0) is None
    assert cells.unfinished[0].started_at == 12.0


def test_an_execution_goes_on_when_its_notebook_server_reconnects() -> None:
    cells = Cells()
    cell = cells.received(report(STARTED, 1), 1, 10.0)
    cells.received(report(SUBMITTED, 2), 1, 10.0)
    cells.server_left(1, 11.0)
    assert (cells.unfinished, cells.finished) == ([], [cell])
    assert cells.received(report(STARTED, 1), 2, 11.5) is cell
    assert cell is not None
    assert (cell.running, cell.started_at) == (True, 10.0)
    cells.server_left(1, 12.0)
    assert cell.running


def test_executions_that_were_aborted_before_they_started_are_forgotten() -> None:
    cells = Cells()
    cells.received(report(SUBMITTED, 1), 1, 10.0)
    assert cells.received(report(ENDED, 1), 1, 11.0) is not None
    assert (cells.unfinished, cells.finished) == ([], [])


def test_the_number_of_executions_is_bounded() -> None:
    cells = Cells()
    for number in range(1, 2 * MOST_UNFINISHED):
        cells.received(report(SUBMITTED, number), 1, float(number))
    assert [cell.number for cell in cells.unfinished] == list(range(MOST_UNFINISHED, 2 * MOST_UNFINISHED))
    for number in range(1, 3 * MOST_FINISHED):
        cells.received(report(STARTED, number), 1, float(number))
        cells.received(report(ENDED, number), 1, float(number))
    assert [cell.number for cell in cells.finished] == list(range(2 * MOST_FINISHED, 3 * MOST_FINISHED))


def test_the_processes_of_a_cell_are_its_kernel_and_the_kernels_descendants() -> None:
    cells = Cells()
    cell = cells.received(report(STARTED, 1, pid=50), 1, 10.0)
    assert cell is not None
    cells.process_joined(1, (50, 9, 1))
    cells.process_joined(2, (71, 50, 9, 1))
    cells.process_joined(3, (60, 9, 1))
    assert cells.clients(cell) == [1, 2]
    cells.process_left(1)
    assert cells.clients(cell) == [2]


def test_the_ancestry_is_that_of_the_processes_own_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {900: ("20", "900 20"), 800: ("7", "800 7"), 700: ("1", "700 1"), 600: ("600", "600"), 1: ("1", "1")}
    parents = {900: 800, 800: 700, 700: 600, 600: 1, 1: 0}
    for pid, (_, numbers) in lines.items():
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "status").write_text(f"Name:\tpython\nNSpid:\t{chr(9).join(numbers.split())}\nUid:\t0\t0\t0\t0\n")
        (folder / "stat").write_text(f"{pid} (a b) c) S {parents[pid]} " + "0 " * 20)
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert processes.ancestry(900) == (20, 7, 1)
    assert processes.ancestry(5) == ()


def test_the_ancestry_of_a_child_has_this_process() -> None:
    code = "import os; from gpushare_spawner.agent import processes; print(processes.ancestry(os.getpid()))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        said = child.communicate()[0]
    assert said.startswith(f"({child.pid}, ")
    assert str(os.getpid()) in said


async def test_listeners_get_each_event_of_a_notebook_server(agent: Agent) -> None:
    path = agent.open()
    server = Peer(path)
    (welcome,) = await server.connect(Role.NOTEBOOK)
    assert Feature(welcome.fields[6]) & Feature.CELLS
    cuda = await agent.peer(path)
    heard: list[tuple[str, int, CellEvent, bool]] = []

    def listen(session: Session, cell: object, event: CellEvent) -> None:
        heard.append((session.id, session.cells.unfinished[0].text, event, session.cells.unfinished[0] is cell))

    agent.node.registry.cell_listeners.append(listen)
    pid = os.getpid()
    server.send(Kind.CELL, SUBMITTED, 5, 1, 7, pid)
    server.send(Kind.CELL, 99, 5, 1, 7, pid)  # an event of a newer server
    server.send(Kind.CELL, STARTED, 5, 1, 7, pid, 3)
    await server.status()
    assert heard == [("ada", 7, SUBMITTED, True), ("ada", 7, STARTED, True)]
    session = agent.node.registry.sessions["ada"]
    (cell,) = session.cells.unfinished
    assert session.cells.clients(cell) == [connection.number for connection in session.cuda]
    cuda.close()
    server.close()
    other = await agent.peer(path, Role.NOTEBOOK)
    await other.status()
    assert session.cells.unfinished == []


async def test_a_cuda_process_may_not_report_cells_and_a_number_is_needed(agent: Agent) -> None:
    path = agent.open()
    for role, number in ((Role.NOTEBOOK, 0), (Role.CUDA, 1)):
        peer = await agent.peer(path, role)
        peer.send(Kind.CELL, SUBMITTED, number, 1, 7, 1)
        assert await peer.ended() == (MALFORMED if role is Role.NOTEBOOK else 3)


async def test_a_server_that_floods_the_agent_with_cells_is_slowed_down_and_bounded(agent: Agent) -> None:
    path = agent.open()
    hostile, other = await agent.peer(path, Role.NOTEBOOK), await agent.peer(agent.open(id="bob"), Role.NOTEBOOK)
    for number in range(1, 200):
        hostile.send(Kind.CELL, SUBMITTED, 2**64 - number, 2**64 - 1, 2**64 - 1, 2**64 - 1, 2**64 - 1)
    await other.status()
    await hostile.status()
    assert len(agent.node.registry.sessions["ada"].cells.unfinished) == 199
    assert agent.node.registry.sessions["bob"].cells.unfinished == []
