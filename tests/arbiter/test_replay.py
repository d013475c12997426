"""The GPU in virtual time divides its time as hardware does, and pays for memory that moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.arbiter.replay import CheckpointCosts, VirtualClock, VirtualGpu, VirtualProcess, _equal_parts
from gpushare_spawner.arbiter.session import ArbiterSettings

GB = 10**9


def gpu_with(*processes: VirtualProcess, checkpoints: CheckpointCosts | None = None) -> tuple[VirtualClock, VirtualGpu]:
    """A GPU of 80 GB with a bus of 20 GB/s; each process is a session with 0.25 GPU."""
    clock = VirtualClock()
    gpu = VirtualGpu(clock, 80 * GB, 20e9, ArbiterSettings(), checkpoints)
    for process in processes:
        gpu.session(process.name, 25)
        gpu.connect(process)
    return clock, gpu


def ended_at(clock: VirtualClock, process: VirtualProcess) -> list[float]:
    """The instants at which bursts of the process end, filled as they do."""
    instants: list[float] = []
    process.done = lambda: instants.append(clock.now)
    return instants


def test_actions_run_in_order_of_time_and_past_ones_at_once() -> None:
    clock = VirtualClock()
    seen: list[tuple[str, float]] = []

    def first() -> None:
        seen.append(("a", clock.now))
        clock.at(0.5, lambda: seen.append(("c", clock.now)))

    clock.at(2.0, lambda: seen.append(("b", clock.now)))
    clock.after(1.0, first)
    clock.at(9.0, lambda: seen.append(("late", clock.now)))
    clock.run(5.0)
    assert seen == [("a", 1.0), ("c", 1.0), ("b", 2.0)]
    assert clock.now == 5.0


@pytest.mark.parametrize("demand", [1.0, 0.25])
def test_a_burst_alone_takes_its_gpu_seconds_by_its_demand(demand: float) -> None:
    process = VirtualProcess("a", 8 * GB)
    clock, gpu = gpu_with(process)
    ends = ended_at(clock, process)
    gpu.submit(process, 10.0, demand)
    clock.run(100.0)
    assert ends == [pytest.approx(10.0 / demand, abs=0.01)]
    assert process.gpu_seconds == pytest.approx(10.0)
    assert [delay for _, delay in process.delays] == [pytest.approx(0.0, abs=0.01)]


def test_bursts_that_fit_share_the_gpu_and_leave_what_they_cannot_use() -> None:
    light, heavy = VirtualProcess("light", 8 * GB), VirtualProcess("heavy", 8 * GB)
    clock, gpu = gpu_with(light, heavy)
    ends = {process.name: ended_at(clock, process) for process in (light, heavy)}
    gpu.submit(light, 2.5, 0.25)
    gpu.submit(heavy, 7.5)
    clock.run(100.0)
    assert ends["light"] == [pytest.approx(10.0, rel=0.03)]
    assert ends["heavy"] == [pytest.approx(10.0, rel=0.03)]


def test_memory_that_does_not_fit_waits_for_page_out_and_page_in() -> None:
    first, second = VirtualProcess("first", 60 * GB), VirtualProcess("second", 40 * GB)
    clock, gpu = gpu_with(first, second)
    gpu.submit(first, 5.0)
    clock.run(20.0)
    gpu.submit(second, 5.0)
    clock.run(40.0)
    # 20 GB of the first left; they come back while as much of the second leaves, at 20 GB/s
    gpu.submit(first, 5.0)
    clock.run(60.0)
    assert first.delays[1][1] == pytest.approx(1.0, rel=0.2)


def test_a_session_that_leaves_in_a_burst_frees_the_gpu() -> None:
    first, second = VirtualProcess("first", 8 * GB), VirtualProcess("second", 8 * GB)
    clock, gpu = gpu_with(first, second)
    ends = ended_at(clock, second)
    gpu.submit(first, 1000.0)
    gpu.submit(second, 10.0)
    clock.run(10.0)
    gpu.leave("first")
    clock.run(60.0)
    gpu.settle()
    assert ends == [pytest.approx(15.0, abs=0.5)]
    assert first.gpu_seconds == pytest.approx(5.0, abs=0.5)
    assert list(gpu.processes) == ["second"]


def test_bursts_in_progress_are_counted_when_they_are_settled() -> None:
    process = VirtualProcess("a", GB)
    clock, gpu = gpu_with(process)
    gpu.submit(process, 100.0, 0.5)
    clock.run(30.0)
    gpu.settle()
    assert process.gpu_seconds == pytest.approx(15.0, abs=0.1)
    assert process.left == pytest.approx(85.0, abs=0.1)


def test_a_suspended_session_resumes_before_its_burst() -> None:
    costs = CheckpointCosts(bandwidth=10e9, seconds=0.5, context_bytes=0)
    process = VirtualProcess("a", 20 * GB)
    clock, gpu = gpu_with(process, checkpoints=costs)
    gpu.submit(process, 1.0)
    clock.run(10.0)
    gpu.weigh("a", 0)
    clock.run(20.0)
    gpu.weigh("a", 25)
    gpu.submit(process, 1.0)
    clock.run(40.0)
    assert process.bursts == 2
    assert process.delays[1][1] == pytest.approx(2.5, abs=0.1)


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12))
def test_equal_parts_use_the_gpu_fully_or_meet_every_demand(demands: list[float]) -> None:
    parts = _equal_parts(demands)
    assert sum(parts) == pytest.approx(min(1.0, sum(demands)))
    assert all(0 < part <= demand + 1e-12 for part, demand in zip(parts, demands, strict=True))
    # a burst that gets less than it can use gets as much as any other
    assert all(part >= max(parts) - 1e-9 for part, demand in zip(parts, demands, strict=True) if part < demand - 1e-9)


@given(st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(0.1, 1.0), st.integers(1, 50)), min_size=1, max_size=6))
def test_all_submitted_work_is_delivered_and_no_more(bursts: list[tuple[float, float, int]]) -> None:
    processes = [VirtualProcess(str(number), memory * GB) for number, (_, _, memory) in enumerate(bursts)]
    clock, gpu = gpu_with(*processes)
    for process, (seconds, demand, _) in zip(processes, bursts, strict=True):
        gpu.submit(process, seconds, demand)
    clock.run(2000.0)
    for process, (seconds, _, _) in zip(processes, bursts, strict=True):
        assert process.bursts == 1
        assert process.gpu_seconds == pytest.approx(seconds)
