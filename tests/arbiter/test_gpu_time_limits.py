"""No session gets more GPU time than its limit, alone or beside others, and the rest goes to those that wait."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import PACE, GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, LeaseGrant, Revoke
from tests.arbiter.virtual_gpu import GIB, Job, VirtualGpu, alternating, forever

KERNELS = pytest.mark.parametrize("kernel", [0.001, 0.01, 0.03, 0.1])
AHEAD = 1024
"""Kernels that a training loop queues."""


def device(**changed: object) -> VirtualGpu:
    return VirtualGpu(GpuArbiter(16 * GIB, ArbiterSettings(**changed)))  # type: ignore[arg-type]


def start(
    gpu: VirtualGpu,
    name: str,
    weight: int,
    limit: int = 100,
    kernel: float = 0.0,
    gib: float = 1.0,
    phases: Iterator[tuple[float, float]] | None = None,
) -> Job:
    gpu.session(name, weight)
    gpu.set_time_limit(name, limit)
    return gpu.start(Job(name, name, int(gib * GIB), phases or forever(), kernel=kernel, ahead=AHEAD if kernel else 1))


def windows(gpu: VirtualGpu, job: Job, seconds: float, count: int) -> list[float]:
    """Return the percentages of the GPU that the job received in windows that begin every second."""
    marks = [job.gpu_seconds]
    for _ in range(count + round(seconds)):
        gpu.run(gpu.now + 1.0)
        marks.append(job.gpu_seconds)
    return [100 * (marks[at + round(seconds)] - marks[at]) / seconds for at in range(count)]


@KERNELS
@pytest.mark.parametrize("sampled", [False, True])
def test_alone_a_session_gets_its_limit_in_every_ten_seconds(kernel: float, sampled: bool) -> None:
    gpu = device()
    if sampled:
        gpu.tell_utilisation()
    job = start(gpu, "a", 25, 25, kernel)
    assert windows(gpu, job, 10.0, 20) == pytest.approx([25] * 20, abs=2)


@KERNELS
@pytest.mark.parametrize("others", [(75,), (25,), (20, 30), (10, 10, 10)])
def test_beside_others_a_session_gets_its_limit_and_they_the_rest(kernel: float, others: tuple[int, ...]) -> None:
    gpu = device()
    gpu.tell_utilisation()
    job = start(gpu, "a", 25, 25, kernel)
    rest = [start(gpu, f"b{number}", weight, kernel=kernel) for number, weight in enumerate(others)]
    gpu.run(5.0)
    before, at = gpu.used_seconds, gpu.now
    assert windows(gpu, job, 10.0, 20) == pytest.approx([25] * 20, abs=2)
    assert gpu.used_seconds - before > 0.97 * (gpu.now - at)
    received = [other.gpu_seconds for other in rest]
    expected = [weight / sum(others) * sum(received) for weight in others]
    assert received == pytest.approx(expected, rel=0.1)


def test_a_session_with_a_smaller_share_than_its_limit_gets_what_others_leave_up_to_the_limit() -> None:
    gpu = device()
    gpu.tell_utilisation()
    job, other = start(gpu, "a", 10, 40), start(gpu, "b", 90, phases=iter([(0.0, 20.0)]))
    gpu.run(5.0)
    assert windows(gpu, job, 5.0, 5) == pytest.approx([10] * 5, abs=2)
    while other.finished_at is None:
        gpu.run(gpu.now + 1.0)
    assert windows(gpu, job, 10.0, 10) == pytest.approx([40] * 10, abs=2)


def test_all_with_limits_get_them_and_the_gpu_is_idle_for_the_rest() -> None:
    gpu = device()
    gpu.tell_utilisation()
    jobs = [start(gpu, "a", 20, 20), start(gpu, "b", 25, 30)]
    gpu.run(60.0)
    assert [job.gpu_seconds / 60 for job in jobs] == pytest.approx([0.2, 0.3], abs=0.02)


def test_a_program_with_pauses_between_its_kernels_gets_its_limit_by_the_drivers_samples() -> None:
    gpu = device()
    gpu.tell_utilisation()
    job = start(gpu, "a", 25, 25, phases=alternating(0.001, 0.001))
    gpu.run(5.0)
    assert windows(gpu, job, 10.0, 10) == pytest.approx([25] * 10, abs=2)


def test_work_below_the_limit_runs_at_once() -> None:
    gpu = device()
    gpu.tell_utilisation()
    job = start(gpu, "a", 25, 25, phases=alternating(0.45, 0.05))
    gpu.run(60.0)
    assert job.gpu_seconds == pytest.approx(6.0, abs=0.1)
    assert max(job.waits) < 0.01


def test_two_processes_of_a_session_have_one_limit() -> None:
    gpu = device()
    gpu.session("a", 25)
    gpu.set_time_limit("a", 25)
    jobs = [gpu.start(Job(name, "a", GIB, forever())) for name in ("a1", "a2")]
    gpu.run(40.0)
    assert [job.gpu_seconds for job in jobs] == pytest.approx([5.0, 5.0], rel=0.05)


def test_sessions_that_take_turns_keep_the_limit_over_some_rounds_without_more_hand_offs() -> None:
    def run(limit: int) -> tuple[VirtualGpu, Job, Job]:
        gpu = device()
        gpu.tell_utilisation()
        job, other = start(gpu, "a", 25, limit, gib=10), start(gpu, "b", 25, gib=10)
        gpu.run(1500.0)
        return gpu, job, other

    gpu, job, other = run(25)
    assert job.gpu_seconds / 1500 == pytest.approx(0.25, abs=0.02)
    assert other.gpu_seconds / 1500 > 0.69
    assert len(gpu.switches) <= len(run(100)[0].switches) * 1.1


def test_the_queue_of_a_limited_session_is_short_even_alone_and_waits_for_the_limit_count_for_nobody() -> None:
    gpu = device()
    job = start(gpu, "a", 25, 25)
    gpu.run(30.0)
    assert job.pace == PACE
    assert job.longest_wait > 0.1
    assert gpu.arbiter.session_snapshot("a").delivered.wait_count == 0


def test_a_limit_that_is_set_or_removed_while_the_session_runs_counts_from_then_on() -> None:
    gpu = device()
    job = start(gpu, "a", 25)
    gpu.run(2.0)
    gpu.set_time_limit("a", 50)
    assert windows(gpu, job, 10.0, 3)[1:] == pytest.approx([50] * 2, abs=2)
    gpu.set_time_limit("a", 100)
    assert windows(gpu, job, 5.0, 3)[1:] == pytest.approx([100] * 2, abs=1)


@pytest.mark.parametrize("units", [0, -1, 101])
def test_a_limit_is_from_1_to_100_units(units: int) -> None:
    arbiter = GpuArbiter(16 * GIB)
    arbiter.add_session("a", 25, 0.0)
    with pytest.raises(ValueError, match=f"from 1 to 100 units, not {units}"):
        arbiter.set_time_limit("a", units, 0.0)


def test_a_session_at_its_limit_counts_as_working_and_waits_for_nobody() -> None:
    arbiter = GpuArbiter(16 * GIB)
    arbiter.add_session("a", 25, 0.0, time_limit=25)
    arbiter.connect("a", "a", 0.0)
    (grant,) = arbiter.request("a", 0, 0, 0.0)
    assert isinstance(grant, LeaseGrant)
    assert arbiter.next_wakeup() == pytest.approx(0.05)
    (revoke,) = arbiter.tick(0.05)
    assert isinstance(revoke, Revoke)
    assert arbiter.request("a", 0, 0, 0.05) == []
    assert arbiter.release("a", revoke.lease, 0.05, 0.05) == []
    shown = arbiter.session_snapshot("a", 0.1)
    assert (shown.waiting, shown.running, shown.held, shown.last_activity) == (False, True, True, 0.1)
    assert arbiter.waiting() == ()
    assert arbiter.next_wakeup() == pytest.approx(0.2)
    assert [type(decision) for decision in arbiter.tick(0.2)] == [LeaseGrant]


def test_a_quiet_lease_that_the_driver_does_not_measure_is_taken_back_at_the_limit() -> None:
    arbiter = GpuArbiter(16 * GIB)
    arbiter.add_session("a", 25, 0.0, time_limit=25)
    arbiter.connect("a", "a", 0.0)
    (grant,) = arbiter.request("a", 0, 0, 0.0)
    assert isinstance(grant, LeaseGrant)
    assert arbiter.idle("a", grant.lease, 0.01, 0.0, 0.01) == []
    (revoke,) = arbiter.tick(0.05)
    assert isinstance(revoke, Revoke)


@pytest.mark.parametrize("seed", range(16))
def test_in_any_mix_nobody_gets_more_than_its_limit_and_all_are_served(seed: int) -> None:
    draw = random.Random(seed)
    gpu = device(bandwidth_guess=60e9)
    gpu.bandwidth = 60e9
    if draw.random() < 0.7:
        gpu.tell_utilisation()
    seconds, shares, jobs = 20.0, [], []
    for number in range(draw.randint(1, 4)):
        weight, limit, kernel = draw.choice([5, 10, 25]), draw.choice([25, 40, 60, 100]), draw.choice([0.0, 0.02, 0.1])
        cpu, busy = draw.choice([(0.0, float("inf")), (0.01, 0.02), (0.3, 0.4), (2.0, 3.0)])
        phases = iter([(cpu, busy)]) if not cpu else alternating(cpu, busy)
        jobs.append(start(gpu, f"s{number}", weight, limit, kernel, draw.choice([0.5, 3.0, 9.0]), phases))
        shares.append((weight, limit, kernel, 1.0 if not cpu else busy / (cpu + busy)))
    gpu.run(seconds)
    # while sessions take turns, unused time is saved for a time slice
    saved = 2 * gpu.arbiter._schedule.lengths.round_seconds if gpu.arbiter._schedule.memory_short else 0.1
    for job, (weight, limit, kernel, demand) in zip(jobs, shares, strict=True):
        assert job.gpu_seconds <= limit / 100 * seconds + saved + 3 * max(kernel, PACE) + 0.2
        fair = weight / sum(share[0] for share in shares)
        assert job.gpu_seconds > 0.4 * seconds * min(limit / 100, fair, demand) - saved


def in_the_background(gpu: VirtualGpu, name: str, **job: object) -> Job:
    """Start a session without units, as one whose budget is used up."""
    gpu.session(name, 0)
    gpu.set_background(name)
    values: dict[str, object] = {"kernel": 0.01, "ahead": AHEAD, "gib": 1.0, "phases": forever()} | job
    managed, phases = int(values.pop("gib") * GIB), values.pop("phases")  # type: ignore[operator]
    return gpu.start(Job(name, name, managed, phases, **values))  # type: ignore[arg-type]


def test_a_background_session_has_the_whole_gpu_while_no_other_session_works() -> None:
    gpu = device()
    job = in_the_background(gpu, "over")
    gpu.run(10.0)
    assert job.gpu_seconds == pytest.approx(10.0, rel=0.02)


@KERNELS
@pytest.mark.parametrize("gib", [1.0, 12.0])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_background_session_never_delays_another(kernel: float, gib: float, sampled: bool) -> None:
    def cells(with_background: bool) -> list[float]:
        """Return how long each cell of a user took from its submission, beside a training loop or alone."""
        gpu, rng = device(), random.Random(4)
        if sampled:
            gpu.tell_utilisation()
        if with_background:
            in_the_background(gpu, "over", kernel=kernel, gib=gib)
            gpu.run(2.0)
        times = [(rng.uniform(2, 20), rng.uniform(0.05, 3.0)) for _ in range(40)]
        job = start(gpu, "within", 25, kernel=kernel, gib=gib, phases=iter(times))
        ends: list[float] = []
        while job.finished_at is None:
            gpu.run(gpu.now + 0.01)
            if len(job.waits) > len(ends):
                ends.append(job.waits[-1])
        return ends

    alone, beside = sorted(cells(False)), sorted(cells(True))
    assert len(beside) == len(alone) == 40
    # at most the kernels that are on the GPU already, and the pages that must come in
    paged_in = 0.0 if gib < 8 else 2 * gib * GIB / 12e9
    assert max(beside) <= max(alone) + 0.1 + 2 * kernel + paged_in


def test_two_users_with_work_leave_nothing_to_the_background_and_get_what_they_would_without_it() -> None:
    gpu = device()
    gpu.tell_utilisation()
    jobs = [start(gpu, "a", 25, kernel=0.01), start(gpu, "b", 50, kernel=0.01)]
    over = in_the_background(gpu, "over")
    gpu.run(60.0)
    assert over.gpu_seconds < 0.1
    assert sum(job.gpu_seconds for job in jobs) > 0.98 * 60
    assert jobs[1].gpu_seconds / jobs[0].gpu_seconds == pytest.approx(2, rel=0.1)


def test_background_sessions_share_what_is_left_and_one_ends_when_its_budget_is_renewed() -> None:
    gpu = device()
    gpu.tell_utilisation()
    over = [in_the_background(gpu, "a"), in_the_background(gpu, "b")]
    gpu.run(20.0)
    assert [job.gpu_seconds for job in over] == pytest.approx([10, 10], rel=0.1)
    gpu.set_background("a", False)
    gpu.set_weight("a", 25)
    gpu.run(40.0)
    assert over[0].gpu_seconds > 29
    assert over[1].gpu_seconds < 10.7
    gpu.crash("a")
    gpu.run(60.0)
    assert over[1].gpu_seconds > 29


def test_a_background_session_works_beside_one_that_has_had_its_limit_of_gpu_time() -> None:
    gpu = device()
    gpu.tell_utilisation()
    limited, over = start(gpu, "limited", 20, 20, kernel=0.01), in_the_background(gpu, "over")
    gpu.run(60.0)
    assert limited.gpu_seconds == pytest.approx(12, abs=1)
    assert over.gpu_seconds > 1
