"""Expected launches: what is learned of cells, and whose memory a page-in before a launch may take."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.anticipation import (
    HEAD_START,
    MAX_KERNELS,
    MAX_QUEUED,
    MAX_TEXTS,
    SHORTEST_PATIENCE,
    CellHistory,
    Expected,
)
from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, Decision, LeaseGrant, PageIn, PageOut, Revoke

KERNEL, PID = 1, 50
SURE = Expected(1.0, 0.0, 1e9)


class Cells:
    """Runs cells of one kernel, one after the other."""

    def __init__(self, history: CellHistory, kernel: int = KERNEL, pid: int = PID) -> None:
        self.history, self.kernel, self.pid = history, kernel, pid
        self.now, self.number = 100.0, 0

    def submit(self, text: int) -> int:
        self.number += 1
        self.history.submitted(self.kernel, self.pid, self.number, text)
        return self.number

    def run(self, text: int, lead: float | None, length: float = 2.0) -> None:
        """Run a cell. `lead`: seconds before its GPU work; None: it has none."""
        cell = self.submit(text)
        self.history.started(self.kernel, cell, self.now)
        if lead is not None:
            self.history.worked((7, self.pid), self.now + lead)
        self.now += length
        self.history.ended(self.kernel, cell, self.now)

    def expected(self) -> Expected | None:
        return self.history.expected(self.kernel, self.now)


@pytest.fixture
def cells() -> Cells:
    return Cells(CellHistory())


def test_cell_with_a_text_that_used_the_gpu_is_expected_to_use_it_again(cells: Cells) -> None:
    cells.run(1, lead=0.5)
    cells.run(2, lead=None)
    cells.run(2, lead=None)
    cells.run(2, lead=None)
    cells.submit(1)
    expected = cells.expected()
    assert expected is not None
    assert expected.probability > 0.5
    assert expected.begins == pytest.approx(cells.now + 0.5 - HEAD_START)
    assert expected.until == cells.now + SHORTEST_PATIENCE
    cells.history.ended(KERNEL, cells.number, cells.now)
    cells.submit(2)
    assert cells.expected() is None


def test_cell_with_an_unknown_text_is_judged_by_the_kernels_other_cells(cells: Cells) -> None:
    cells.submit(9)
    assert cells.expected() is None, "nothing is known of the kernel"
    cells.history.ended(KERNEL, cells.number, cells.now)
    cells.run(1, lead=0.5)
    cells.submit(9)
    expected = cells.expected()
    assert expected is not None
    assert expected.probability == 1.0
    cells.history.ended(KERNEL, cells.number, cells.now)
    for _ in range(5):
        cells.run(2, lead=None)
    cells.submit(9)
    assert cells.expected() is None, "most of its cells use no GPU now"


def test_three_cells_change_what_was_learned(cells: Cells) -> None:
    for _ in range(20):
        cells.run(1, lead=0.5)
    for _ in range(5):
        cells.run(1, lead=None)
    cells.submit(1)
    assert cells.expected() is None


def test_restart_of_a_kernel_forgets_its_cells(cells: Cells) -> None:
    cells.run(1, lead=0.5)
    cells.pid = 51
    cells.submit(1)
    assert cells.expected() is None


def test_launch_of_a_queued_cell_is_expected_after_the_usual_length_of_the_cells_before_it(cells: Cells) -> None:
    cells.run(1, lead=20.0, length=30.0)
    for _ in range(4):
        cells.run(2, lead=None, length=8.0)
    before = cells.submit(2)
    cells.history.started(KERNEL, before, cells.now)
    cells.submit(1)
    cells.now += 3.0
    expected = cells.expected()
    assert expected is not None
    assert expected.begins == pytest.approx(cells.now + 5.0 + 20.0 - HEAD_START)
    assert expected.until == pytest.approx(cells.now + 5.0 + 80.0)


def test_cell_that_has_begun_its_gpu_work_leads_to_no_further_launch(cells: Cells) -> None:
    cells.run(1, lead=0.5)
    cell = cells.submit(1)
    cells.history.started(KERNEL, cell, cells.now)
    cells.history.worked((PID,), cells.now)
    assert cells.expected() is None


def test_work_of_another_kernel_and_unknown_cells_teach_nothing(cells: Cells) -> None:
    cell = cells.submit(1)
    cells.history.started(KERNEL, cell, cells.now)
    cells.history.worked((51,), cells.now)
    cells.history.ended(KERNEL, 77, cells.now)
    cells.history.started(2, 1, cells.now)
    cells.history.ended(KERNEL, cell, cells.now)
    cells.submit(1)
    assert cells.expected() is None


def test_cells_in_progress_are_forgotten_with_their_notebook_server_and_what_was_learned_stays(cells: Cells) -> None:
    cells.run(1, lead=0.5)
    cells.submit(1)
    cells.history.abandoned()
    assert not cells.history.busy(KERNEL)
    cells.submit(1)
    assert cells.expected() is not None


def test_running_cell_keeps_its_work_when_more_cells_are_submitted_than_are_kept(cells: Cells) -> None:
    running = cells.submit(1)
    cells.history.started(KERNEL, running, cells.now)
    for _ in range(MAX_QUEUED):
        cells.submit(2)
    cells.history.worked((PID,), cells.now + 0.5)
    cells.now += 2.0
    cells.history.ended(KERNEL, running, cells.now)
    cells.history.abandoned()
    cells.submit(1)
    expected = cells.expected()
    assert expected is not None
    assert expected.probability == 1.0


def test_numbers_of_kernels_and_texts_are_bounded() -> None:
    history = CellHistory()
    for kernel in range(MAX_KERNELS + 5):
        cells = Cells(history, kernel)
        cells.run(1, lead=0.1)
        cells.submit(1)
    assert [history.busy(kernel) for kernel in (0, 4, 5)] == [False, False, True]
    for text in range(10, 10 + MAX_TEXTS):
        cells.history.ended(cells.kernel, cells.number, cells.now)
        cells.run(text, lead=None, length=1.0)
    cells.submit(1)
    assert cells.expected() is None, "the text is forgotten, and the others used no GPU"


# -- the arbiter -----------------------------------------------------------------------------------------------------


class Gpu:
    """A GPU of 100 bytes and sessions with one process each."""

    def __init__(self) -> None:
        self.arbiter = GpuArbiter(100, ArbiterSettings(measured_from=1, bandwidth_guess=1e3))
        self.now = 0.0

    def add(self, name: str, memory: int, early: bool = True, suspends: bool = False) -> None:
        self.arbiter.add_session(name, 25, self.now, suspends=suspends)
        self.arbiter.connect(name, name, self.now, pages_in_early=early)
        self.arbiter.memory(name, *((0, memory) if suspends else (memory, 0)), self.now)

    def request(self, name: str, memory: int, suspends: bool = False) -> list[Decision]:
        self.now += 1.0
        return self.arbiter.request(name, *((0, memory) if suspends else (memory, 0)), self.now)

    def work(self, name: str, memory: int, suspends: bool = False) -> None:
        """Run a burst, and return the lease."""
        (grant,) = [order for order in self.request(name, memory, suspends) if isinstance(order, LeaseGrant)]
        self.now += 1.0
        self.arbiter.release(name, grant.lease, 1.0, self.now)

    def expect(self, name: str, expected: Expected = SURE) -> list[Decision]:
        self.now += 0.1
        return self.arbiter.expect(name, expected, self.now)

    def guesses(self, name: str) -> tuple[int, int]:
        view = self.arbiter.session_snapshot(name)
        return view.guesses_used, view.guesses_unused


@pytest.fixture
def gpu() -> Gpu:
    """Ada, 20 of whose 60 bytes are on the host, and Bob with 60 bytes on the GPU."""
    gpu = Gpu()
    gpu.add("ada", 60)
    gpu.add("bob", 60)
    gpu.work("ada", 60)
    gpu.work("bob", 60)
    gpu.arbiter.paged_out("ada", 20, 0.02, gpu.now)
    assert gpu.arbiter.session_snapshot("ada").paged_out_bytes == 20
    return gpu


def test_pages_come_in_before_an_expected_launch_from_an_idle_session(gpu: Gpu) -> None:
    assert gpu.expect("ada") == [PageOut("bob", 20), PageIn("ada", 20)]
    assert gpu.expect("ada") == [], "they are ordered once"
    gpu.arbiter.paged_in("ada", 20, 0.02, gpu.now + 0.02)
    (grant,) = gpu.request("ada", 60)
    assert isinstance(grant, LeaseGrant)
    assert grant.prefetch == 0
    assert gpu.guesses("ada") == (1, 0)


def test_free_memory_is_taken_before_that_of_idle_sessions(gpu: Gpu) -> None:
    gpu.arbiter.remove_session("bob", gpu.now)
    assert gpu.expect("ada") == [PageIn("ada", 20)]


def test_sessions_with_a_lease_and_waiting_sessions_keep_their_memory(gpu: Gpu) -> None:
    gpu.request("bob", 60)
    assert gpu.expect("ada") == []
    assert gpu.arbiter.holders() == ("bob",)
    assert gpu.arbiter.session_snapshot("bob").resident_bytes == 60
    assert gpu.guesses("ada") == (0, 0)


def test_page_in_begins_as_soon_as_the_holder_is_done(gpu: Gpu) -> None:
    (grant,) = gpu.request("bob", 60)
    assert isinstance(grant, LeaseGrant)
    gpu.expect("ada")
    gpu.now += 1.0
    assert gpu.arbiter.release("bob", grant.lease, 1.0, gpu.now) == [PageOut("bob", 20), PageIn("ada", 20)]


def test_page_in_is_given_up_when_a_client_with_a_lease_needs_the_memory(gpu: Gpu) -> None:
    gpu.expect("ada")
    decisions = gpu.request("bob", 60)
    assert PageOut("ada", 20) in decisions
    assert not any(isinstance(order, (PageIn, Revoke)) for order in decisions)
    assert gpu.arbiter.holders() == ("bob",)
    # 5 bytes had come in by then
    gpu.arbiter.paged_in("ada", 5, 0.005, gpu.now)
    gpu.arbiter.paged_out("ada", 5, 0.005, gpu.now)
    view = gpu.arbiter.session_snapshot("ada")
    assert (view.resident_bytes, view.paged_out_bytes) == (40, 20)


def test_launch_before_the_pages_are_in_waits_for_those_alone(gpu: Gpu) -> None:
    gpu.expect("ada")
    (grant,) = gpu.request("ada", 60)
    assert isinstance(grant, LeaseGrant)
    assert grant.prefetch == 0, "they come already"
    assert gpu.arbiter.paged_in("ada", 20, 0.03, gpu.now + 0.03) == []


def test_wrong_guess_is_counted_and_its_pages_leave_first(gpu: Gpu) -> None:
    gpu.add("eve", 40)
    gpu.work("eve", 40)
    for name in ("ada", "bob"):
        gpu.arbiter.paged_out(name, 100, 1.0, gpu.now)
    gpu.expect("ada", Expected(1.0, 0.0, gpu.now + 5.0))
    assert gpu.arbiter.expect_no_more("ada", gpu.now) == []
    assert gpu.guesses("ada") == (0, 1)
    gpu.arbiter.expect_no_more("ada", gpu.now)
    assert gpu.guesses("ada") == (0, 1)


def test_expectation_ends_by_time_alone(gpu: Gpu) -> None:
    gpu.expect("ada", Expected(1.0, gpu.now + 3.0, gpu.now + 5.0))
    begins = gpu.arbiter.next_wakeup()
    assert begins is not None
    assert begins == pytest.approx(gpu.now + 2.9)
    assert gpu.arbiter.tick(begins) == [PageOut("bob", 20), PageIn("ada", 20)]
    ends = gpu.arbiter.next_wakeup()
    assert ends is not None
    assert ends == pytest.approx(begins + 2.0)
    gpu.arbiter.tick(ends)
    assert gpu.guesses("ada") == (0, 1)


def test_library_that_cannot_page_in_early_gets_no_order() -> None:
    gpu = Gpu()
    for name in ("ada", "bob"):
        gpu.add(name, 60, early=False)
        gpu.work(name, 60)
    assert gpu.expect("ada") == []


def test_process_that_ends_ends_its_expectation(gpu: Gpu) -> None:
    gpu.expect("ada")
    gpu.arbiter.disconnect("ada", gpu.now)
    assert gpu.guesses("ada") == (0, 1)
    assert gpu.arbiter.tick(gpu.now + 1.0) == []


@pytest.fixture
def suspended() -> Gpu:
    """Ada's session with the engine suspend, which is released and suspended."""
    gpu = Gpu()
    gpu.add("ada", 60, suspends=True)
    gpu.work("ada", 60, suspends=True)
    gpu.now += 100.0
    gpu.arbiter.set_weight("ada", 0, gpu.now)
    assert gpu.arbiter.suspensions() == ["ada"]
    gpu.arbiter.suspended("ada", 60, 0.1, gpu.now)
    return gpu


def test_suspended_session_is_resumed_before_a_launch_and_stays_for_it(suspended: Gpu) -> None:
    gpu = suspended
    assert gpu.expect("ada") == [PageIn("ada", 60)]
    assert gpu.arbiter.resumed("ada", 60, 0.1, gpu.now + 0.1) == []
    gpu.now += 1.0
    gpu.arbiter.expect_no_more("ada", gpu.now)
    assert gpu.arbiter.suspensions() == [], "its user is back"
    due = gpu.arbiter.next_wakeup()
    assert due is not None
    assert due == pytest.approx(gpu.now + 29.1)
    gpu.arbiter.tick(due)
    assert gpu.arbiter.suspensions() == ["ada"]
    assert gpu.guesses("ada") == (0, 1)


def test_launch_during_a_resumption_gets_its_lease_and_the_guess_counts(suspended: Gpu) -> None:
    gpu = suspended
    gpu.expect("ada")
    (grant,) = gpu.request("ada", 60, suspends=True)
    assert isinstance(grant, LeaseGrant)
    gpu.arbiter.resumed("ada", 60, 0.1, gpu.now)
    assert gpu.guesses("ada") == (1, 0)
    assert gpu.arbiter.holders() == ("ada",)


def test_suspended_session_is_not_resumed_for_an_unlikely_launch_or_beside_work(suspended: Gpu) -> None:
    gpu = suspended
    assert gpu.expect("ada", Expected(0.5, 0.0, 1e9)) == []
    gpu.add("bob", 60)
    gpu.request("bob", 60)
    assert gpu.expect("ada") == []


def test_session_that_is_resumed_for_a_launch_makes_way_for_a_client_with_work(suspended: Gpu) -> None:
    gpu = suspended
    gpu.expect("ada")
    gpu.add("bob", 60, suspends=True)
    assert gpu.request("bob", 60, suspends=True) == [], "the resumption cannot be cut short"
    assert gpu.arbiter.suspensions() == []
    gpu.arbiter.resumed("ada", 60, 0.1, gpu.now)
    assert gpu.arbiter.suspensions() == ["ada"]
    (grant,) = gpu.arbiter.suspended("ada", 60, 0.1, gpu.now)
    assert isinstance(grant, LeaseGrant)
    assert grant.client == "bob"
