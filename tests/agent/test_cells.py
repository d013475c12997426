"""Executions of cells: the frames of a notebook server, and what an agent keeps of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.session_socket import MALFORMED
from gpushare_spawner.agent.sessions.cells import (
    LONGEST_JOINED,
    MOST_FINISHED,
    MOST_RUNNING,
    MOST_UNFINISHED,
    Cell,
    CellReport,
    Cells,
)
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.frames import CellEvent, Feature, Kind, QueryTopic, Role
from gpushare_spawner.model.share_status import CellsStatus, CellStatus
from tests.agent.conftest import Agent
from tests.agent.peers import FIRST, GIB, Peer
from tests.present import present

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


def test_false_reports_of_cells_that_run_at_once_are_bounded_and_cost_little() -> None:
    cells = Cells()
    for client in range(128):
        cells.process_joined(client, (50,))
    for number in range(1, 500):
        started(cells, number, at=float(number % 7))
    assert sum(cell.running for cell in cells.unfinished) == MOST_RUNNING
    begun = time.process_time()
    for client in range(128):
        cells.used("gpu", client, 6.0, 6.1, 0.1)
        cells.has_memory("gpu", client, 1, 1)
    assert time.process_time() - begun < 1
    status = cells.status((), 7.0, 7.0)
    assert sum(row.gpu_seconds for row in status.cells) + status.outside_seconds == pytest.approx(12.8)


def test_a_running_execution_goes_on_while_many_wait() -> None:
    cells = Cells()
    cell = cells.received(report(STARTED, 1), 1, 10.0)
    for number in range(2, 2 * MOST_UNFINISHED):
        cells.received(report(SUBMITTED, number), 1, 10.0)
    assert cell is not None
    assert (cell.running, len(cells.unfinished)) == (True, MOST_UNFINISHED)


def test_ended_executions_that_are_reported_to_go_on_are_bounded() -> None:
    cells = Cells()
    for number in range(1, 3 * MOST_UNFINISHED):
        cells.received(report(STARTED, number), 1, 10.0)
        for before in range(max(1, number - 20), number):
            cells.received(report(STARTED, before), 1, 10.0)
    assert len(cells.unfinished) == MOST_RUNNING


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


def started(cells: Cells, number: int, at: float, pid: int = 50) -> Cell:
    cells.received(report(SUBMITTED, number, pid=pid), 1, at)
    return present(cells.received(report(STARTED, number, pid=pid), 1, at))


def rows(cells: Cells, now: float = 100.0) -> dict[int, CellStatus]:
    return {row.number: row for row in cells.status((), now, now).cells}


def test_use_is_divided_by_time_between_cells_and_what_is_outside() -> None:
    cells = Cells()
    cells.process_joined(1, (50,))
    cells.process_joined(2, (60,))
    started(cells, 1, at=10.0)
    cells.received(report(ENDED, 1), 1, 12.0)
    started(cells, 2, at=13.0)
    cells.used("gpu", 1, 11.5, 12.0, 0.5)
    cells.used("gpu", 1, 12.5, 13.5, 1.0)  # half of it after the second cell began, and new work
    cells.used("gpu", 2, 13.0, 14.0, 0.4)  # a process of no kernel
    cells.used("gpu", None, 13.0, 14.0, 0.1)
    status = cells.status((), 14.0, 1000.0)
    assert [row.gpu_seconds for row in status.cells] == [0.5, 0.5]
    assert status.outside_seconds == pytest.approx(1.0)
    assert status.gpu_seconds == pytest.approx(2.0)
    assert [(row.at, row.seconds, row.running) for row in status.cells] == [(996.0, 2.0, False), (999.0, 1.0, True)]


def test_work_that_a_cell_has_left_running_is_the_cells_until_it_ends_or_for_ten_seconds() -> None:
    cells = Cells()
    cells.process_joined(1, (50,))
    started(cells, 1, at=10.0)
    cells.received(report(ENDED, 1), 1, 10.1)
    cells.used("gpu", 1, 10.05, 13.0, 2.95)
    cells.used("gpu", 1, 13.0, 40.0, 27.0)
    status = cells.status((), 40.0, 40.0)
    assert status.cells[0].gpu_seconds == pytest.approx(10.1 - 10.05 + 10.0)
    assert status.outside_seconds == pytest.approx(40.0 - 20.1)
    started(cells, 2, at=41.0)
    cells.received(report(ENDED, 2), 1, 42.0)
    cells.used("gpu", 1, 42.5, 43.0, 0.5)  # a burst that began after the cell
    assert rows(cells)[2].gpu_seconds == 0.0


def test_cells_of_one_kernel_that_run_together_have_equal_parts_and_it_is_said() -> None:
    cells = Cells()
    cells.process_joined(1, (50,))
    cells.process_joined(2, (70, 50))
    first, second = started(cells, 1, at=10.0), started(cells, 2, at=11.0)
    started(cells, 3, at=10.0, pid=99)  # in another kernel
    cells.used("gpu", 1, 10.0, 12.0, 2.0)
    cells.used("gpu", 2, 11.0, 12.0, 0.5)
    assert (first.gpu_seconds, first.divided_seconds) == (1.75, 0.75)
    assert (second.gpu_seconds, second.divided_seconds) == (0.75, 0.75)
    assert rows(cells)[3].gpu_seconds == 0.0


def test_short_cells_have_their_use_though_many_others_ran_before_it_was_settled() -> None:
    cells = Cells()
    cells.process_joined(1, [50])
    for number in range(80):
        at = 10.0 + number / 40
        cells.received(report(STARTED, number + 1), 1, at)
        cells.received(report(ENDED, number + 1), 1, at + 0.02)
    for number in range(80):
        at = 10.0 + number / 40
        cells.used("GPU-0", 1, at, at + 0.01, 0.01)
    status = cells.status([], 12.0, 12.0)
    assert status.outside_seconds == 0.0
    assert [cell.gpu_seconds for cell in status.cells] == pytest.approx([0.01] * 80)


def test_many_spans_of_unsettled_use_are_divided_as_few() -> None:
    cells = Cells()
    cells.process_joined(1, [50])
    cell = started(cells, 1, at=11.0)
    spans = [("gpu", client, 10 + at / 1000, 10 + (at + 1) / 1000, 0.0005) for at in range(2000) for client in (1, 2)]
    parts = []
    divide = cells._parts
    cells._parts = lambda *interval: parts.append(interval) or divide(*interval)  # type: ignore[method-assign, func-returns-value]
    status = cells.status(spans, 12.0, 12.0)
    assert [row.gpu_seconds for row in status.cells] == pytest.approx([0.5])
    assert (status.gpu_seconds, status.outside_seconds) == pytest.approx((2.0, 1.5))
    assert cell.gpu_seconds == 0.0
    assert len(parts) <= 2 * (2.0 / LONGEST_JOINED + 1)


def test_waits_and_peaks_belong_to_the_running_cells_of_the_process() -> None:
    cells = Cells()
    cells.process_joined(1, (50,))
    cells.has_memory("gpu", 1, 7, 1)
    cell = started(cells, 1, at=10.0)
    assert (cell.on_gpu_bytes, cell.paged_out_bytes) == (7, 1)
    cells.process_joined(2, (51, 50))
    cells.has_memory("gpu", 2, 10, 0)
    cells.has_memory("other", 1, 5, 0)
    cells.has_memory("gpu", 1, 0, 8)
    assert (cell.on_gpu_bytes, cell.paged_out_bytes) == (22, 8)
    cells.waited(1, 9.0, 11.0, memory=False)
    cells.waited(2, 10.5, 11.0, memory=True)
    cells.waited(3, 10.5, 11.0, memory=True)
    assert (cell.lease_seconds, cell.memory_seconds) == (1.0, 0.5)
    cells.received(report(ENDED, 1), 1, 12.0)
    cells.has_memory("gpu", 1, 99, 99)
    cells.waited(1, 12.0, 13.0, memory=False)
    assert (cell.on_gpu_bytes, cell.lease_seconds) == (22, 1.0)


def test_a_late_report_has_the_instant_of_its_event() -> None:
    cells = Cells()
    cells.process_joined(1, (50,))
    cells.received(report(SUBMITTED, 1), 1, 10.0)
    cell = present(cells.received(replace(report(STARTED, 1), ago=1.0), 1, 12.0))
    cells.received(replace(report(ENDED, 1), ago=1000.0), 1, 30.0)  # nonsense is cut to what can be
    assert (cell.started_at, cell.ended_at) == (11.0, 25.0)


def test_the_sum_is_that_of_the_use_also_when_cells_are_forgotten_or_a_process_ends() -> None:
    cells = Cells()
    total = 0.0
    for number in range(1, 3 * MOST_FINISHED):
        cells.process_joined(number, (50,))
        started(cells, number, at=float(number))
        cells.received(report(ENDED, number), 1, number + 0.5)
        cells.process_left(number)
        cells.used("gpu", number, number, number + 0.75, 0.6)
        total += 0.6
    status = cells.status([("gpu", 3 * MOST_FINISHED - 1, 299.2, 299.4, 0.2)], 300.0, 300.0)
    assert (len(status.cells), status.earlier) == (MOST_FINISHED, 2 * MOST_FINISHED - 1)
    assert status.earlier_seconds == pytest.approx(0.6 * status.earlier)
    assert status.gpu_seconds == pytest.approx(total + 0.2)
    listed = sum(row.gpu_seconds for row in status.cells)
    assert listed + status.earlier_seconds + status.outside_seconds == pytest.approx(status.gpu_seconds)
    assert status.cells[-1].gpu_seconds == pytest.approx(0.8)


def test_a_record_is_adopted_and_an_execution_goes_on() -> None:
    before = Cells()
    before.process_joined(1, (50,))
    started(before, 1, at=10.0)
    before.received(report(ENDED, 1), 1, 11.0)
    started(before, 2, at=12.0)
    before.used("gpu", 1, 12.0, 13.0, 1.0)
    recorded = before.status([("gpu", 1, 13.0, 14.0, 1.0)], 14.0, 1000.0)
    after = Cells()
    after.restore(recorded)
    assert [row.running for row in after.status((), 1.0, 1001.0).cells] == [False, False]
    after.received(report(STARTED, 2), 1, 5.0)
    after.process_joined(1, (50,))
    after.used("gpu", 1, 5.0, 6.0, 1.0)
    status = after.status((), 6.0, 1006.0)
    assert [(row.number, row.running, row.gpu_seconds) for row in status.cells] == [(1, False, 0.0), (2, True, 3.0)]
    assert (status.cells[1].seconds, status.gpu_seconds) == (3.0, 3.0)
    after.clear()
    assert after.status((), 6.0, 1006.0) == CellsStatus()


@given(
    st.lists(st.tuples(st.floats(0, 30), st.floats(0, 3), st.sampled_from([50, 60])), max_size=12),
    st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.floats(0, 30), st.floats(1e-3, 3), st.floats(0, 1)), max_size=20),
)
def test_the_parts_always_add_up_to_the_use(
    executions: list[tuple[float, float, int]], uses: list[tuple[int, float, float, float]]
) -> None:
    cells = Cells()
    for client, pids in ((1, (50,)), (2, (60,)), (3, (61, 60))):
        cells.process_joined(client, pids)
    for number, (at, seconds, pid) in enumerate(sorted(executions), 1):
        started(cells, number, at, pid)
        if number % 3:
            cells.received(report(ENDED, number, pid=pid), 1, at + seconds)
    spans = [("gpu", client, since, since + length, length * part) for client, since, length, part in sorted(uses)]
    for span in spans[::2]:
        cells.used(*span)
    status = cells.status(spans[1::2], 40.0, 40.0)
    listed = sum(row.gpu_seconds for row in status.cells)
    assert status.gpu_seconds == pytest.approx(sum(seconds for *_, seconds in spans))
    assert listed + status.outside_seconds == pytest.approx(status.gpu_seconds)
    assert all(0 <= row.divided_seconds <= row.gpu_seconds + 1e-9 for row in status.cells)


async def test_a_notebook_server_reads_the_cells_also_after_a_restart_of_the_agent(agent: Agent) -> None:
    path = agent.open()
    server, cuda = await agent.peer(path, Role.NOTEBOOK), await agent.peer(path)
    server.send(Kind.CELL, STARTED, 5, 1, 7, os.getpid(), 3, time.time_ns())
    cuda.send(Kind.REQUEST, 3 * GIB, 0, 1, gpu=FIRST.uuid)
    grant = await cuda.until(Kind.GRANT)
    await asyncio.sleep(0.3)
    cuda.send(Kind.IDLE, grant.fields[0], 200_000_000, 0, gpu=FIRST.uuid)
    server.send(Kind.QUERY, QueryTopic.CELLS)
    status = present((await server.record()).cells)
    (row,) = status.cells
    assert (row.number, row.pid, row.count, row.running) == (5, os.getpid(), 3, True)
    assert row.gpu_seconds == pytest.approx(0.2, abs=0.01) == status.gpu_seconds
    assert row.on_gpu_bytes == 3 * GIB
    assert abs(row.at - time.time()) < 5
    server.send(Kind.CELL, ENDED, 5, 1, 7, os.getpid(), 3, time.time_ns())
    await server.status()
    await agent.stop()
    await agent.start()
    server = await agent.peer(path, Role.NOTEBOOK)
    server.send(Kind.QUERY, QueryTopic.CELLS)
    after = present((await server.record()).cells)
    assert [replace(after.cells[0], seconds=row.seconds, running=True, at=row.at)] == [row]
    assert after.gpu_seconds == pytest.approx(status.gpu_seconds)


async def test_the_wait_for_a_neighbours_lease_is_that_of_the_cell(agent: Agent) -> None:
    await agent.stop()
    await agent.start(arbiter=ArbiterSettings(exclusive=True))
    path = agent.open()
    server, cuda = await agent.peer(path, Role.NOTEBOOK), await agent.peer(path)
    bob = await agent.peer(agent.open("bob"))
    bob.send(Kind.REQUEST, 0, 0, 1, gpu=FIRST.uuid)
    lease = (await bob.until(Kind.GRANT)).fields[0]
    server.send(Kind.CELL, STARTED, 5, 1, 7, os.getpid())
    cuda.send(Kind.REQUEST, GIB, 0, 1, gpu=FIRST.uuid)
    await asyncio.sleep(0.2)
    bob.send(Kind.RELEASE, lease, 0, 0, gpu=FIRST.uuid)
    await cuda.until(Kind.GRANT)
    await asyncio.sleep(0.1)
    cuda.send(Kind.PAGED_IN, GIB, 50_000_000, gpu=FIRST.uuid)
    cuda.send(Kind.MEMORY, GIB, 0, gpu=FIRST.uuid)
    await asyncio.sleep(0.05)
    server.send(Kind.QUERY, QueryTopic.CELLS)
    (row,) = present((await server.record()).cells).cells
    assert 0.2 <= row.lease_seconds < 2
    assert row.memory_seconds == pytest.approx(0.05)
