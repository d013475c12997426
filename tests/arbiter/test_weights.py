"""Under full load GPU time follows the weights of the sessions."""

from __future__ import annotations

from collections import deque

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings
from tests.arbiter.virtual_gpu import GIB, Job, VirtualGpu, alternating, forever, slow


def shares(device: VirtualGpu) -> dict[str, float]:
    total = sum(job.gpu_seconds for job in device.jobs.values())
    sums: dict[str, float] = {}
    for job in device.jobs.values():
        sums[job.session] = sums.get(job.session, 0.0) + job.gpu_seconds / total
    return sums


def device_with(weights: dict[str, int], gib: float, **settings: object) -> VirtualGpu:
    device = VirtualGpu(GpuArbiter(16 * GIB, ArbiterSettings(**settings)))  # type: ignore[arg-type]
    for name, weight in weights.items():
        device.session(name, weight)
        device.start(Job(name, name, int(gib * GIB), forever()))
    return device


@pytest.mark.parametrize("gib", [slow(9), 12, slow(15), 20])
def test_30_to_70_under_memory_pressure(gib: float) -> None:
    device = device_with({"a": 30, "b": 70}, gib)
    device.run(8000.0)
    assert shares(device) == pytest.approx({"a": 0.3, "b": 0.7}, abs=0.02)


def test_30_to_70_without_paging() -> None:
    device = device_with({"a": 30, "b": 70}, 1, exclusive=True)
    device.run(300.0)
    assert shares(device) == pytest.approx({"a": 0.3, "b": 0.7}, abs=0.02)


def test_many_weights_hold_at_once() -> None:
    weights = {"a": 5, "b": 10, "c": 20, "d": 25, "e": 40}
    device = device_with(weights, 10)
    device.run(40000.0)
    assert shares(device) == pytest.approx({name: weight / 100 for name, weight in weights.items()}, abs=0.02)


def test_a_session_with_three_processes_has_no_more_than_its_share() -> None:
    device = device_with({"one": 50}, 10)
    device.session("three", 50)
    for index in range(3):
        device.start(Job(f"three-{index}", "three", 10 * GIB, forever()))
    device.run(20000.0)
    assert shares(device) == pytest.approx({"one": 0.5, "three": 0.5}, abs=0.02)
    parts = [device.jobs[f"three-{index}"].gpu_seconds for index in range(3)]
    assert max(parts) < 1.1 * min(parts)


@pytest.mark.slow
def test_short_bursts_with_short_gaps_count_like_long_ones() -> None:
    device = VirtualGpu(GpuArbiter(16 * GIB))
    for name, weight, phases in (("a", 30, alternating(0.003, 0.1)), ("b", 70, forever())):
        device.session(name, weight)
        device.start(Job(name, name, 12 * GIB, phases))
    device.run(2500.0)
    assert shares(device) == pytest.approx({"a": 0.3, "b": 0.7}, abs=0.02)


@pytest.mark.parametrize("weights", [(30, 70), slow((50, 50)), (10, 90)])
@pytest.mark.parametrize("pause", [1.2, slow(3.0)])
def test_beside_a_user_who_returns_often_a_job_gets_its_part_of_the_time_for_which_both_compete(
    weights: tuple[int, int], pause: float
) -> None:
    device = VirtualGpu(GpuArbiter(16 * GIB))
    for name, weight, phases in (("job", weights[0], forever()), ("user", weights[1], alternating(pause, 1.0))):
        device.session(name, weight)
        device.start(Job(name, name, 9 * GIB, phases))
    device.run(1000.0)
    views = {name: device.arbiter.session_snapshot(name).delivered for name in device.jobs}
    competed = sum(view.delivered_seconds for view in views.values())
    for name, weight in zip(device.jobs, weights, strict=True):
        assert views[name].delivered_seconds / competed == pytest.approx(weight / 100, abs=0.03)


def test_a_weight_change_counts_from_then_on() -> None:
    device = device_with({"a": 50, "b": 50}, 12)
    device.run(10000.0)
    before = {name: job.gpu_seconds for name, job in device.jobs.items()}
    device.set_weight("a", 20)
    device.set_weight("b", 80)
    device.run(30000.0)
    after = {name: job.gpu_seconds - before[name] for name, job in device.jobs.items()}
    assert before["a"] / sum(before.values()) == pytest.approx(0.5, abs=0.02)
    assert after["a"] / sum(after.values()) == pytest.approx(0.2, abs=0.02)


def test_who_was_away_gets_no_more_for_it() -> None:
    device = device_with({"a": 50}, 12)
    device.run(5000.0)
    device.session("b", 50)
    late = device.start(Job("b", "b", 12 * GIB, forever()))
    before = device.jobs["a"].gpu_seconds
    device.run(15000.0)
    had = device.jobs["a"].gpu_seconds - before
    assert late.gpu_seconds / (late.gpu_seconds + had) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("weights", [slow((30, 70)), (10, 20, 70), slow((25, 25, 25, 25)), (1, 99)])
def test_as_deficit_round_robin(weights: tuple[int, ...]) -> None:
    """The same load under the simplest fair scheduler there is: M. Shreedhar, G. Varghese, SIGCOMM 1995."""
    names = [f"s{index}" for index in range(len(weights))]
    device = device_with(dict(zip(names, weights, strict=True)), 10)
    horizon = 20000.0
    device.run(horizon)

    served = dict.fromkeys(names, 0.0)
    deficit, queue = dict.fromkeys(names, 0.0), deque(zip(names, weights, strict=True))
    packet, clock = 0.05, 0.0
    while clock < horizon:
        name, weight = queue[0]
        deficit[name] += weight / 100
        while deficit[name] >= packet:
            deficit[name] -= packet
            served[name] += packet
            clock += packet
        queue.rotate(-1)
    oracle = {name: served[name] / clock for name in names}
    assert shares(device) == pytest.approx(oracle, abs=0.02)
