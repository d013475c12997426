"""The length of time slices: long enough for the cost of a hand-off, and short where a short burst has credit."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, LeaseGrant, Revoke, RevokeReason
from gpushare_spawner.arbiter.time_slices import Bandwidth, HandOffCredit, TimeSliceLengths
from tests.arbiter.bounds import longest_wait
from tests.arbiter.virtual_gpu import GIB, Job, VirtualGpu, alternating, forever, slow
from tests.present import present


def device_of(*jobs: tuple[str, float], bandwidth: float = 12e9, **settings: object) -> VirtualGpu:
    device = VirtualGpu(GpuArbiter(16 * GIB, ArbiterSettings(**settings)), bandwidth)  # type: ignore[arg-type]
    for name, gib in jobs:
        device.session(name, 50)
        device.start(Job(name, name, int(gib * GIB), forever()))
    return device


@pytest.mark.parametrize("bound", [slow(0.01), 0.025, slow(0.1)])
@pytest.mark.parametrize("bandwidth", [slow(3e9), 12e9])
@pytest.mark.parametrize("gib", [(15, 15), (9, 9), (14, 14, 14), (8, 8, 8), (12, 12, 2)])
def test_hand_offs_cost_no_more_than_the_bound(gib: tuple[float, ...], bandwidth: float, bound: float) -> None:
    device = device_of(
        *((str(index), size) for index, size in enumerate(gib)), bandwidth=bandwidth, overhead_bound=bound
    )
    # as many hand-offs, and as much of the horizon for them, whatever bound and bandwidth are
    horizon = 40.0 / bound * 3e9 / bandwidth if len(set(gib)) == 1 else 500.0 * 3e9 / bandwidth
    device.run(horizon)
    credit = ArbiterSettings().hand_off_credit
    assert horizon - device.used_seconds <= bound * horizon + credit + 20 * GIB / bandwidth


def test_time_slices_follow_the_measured_bandwidth() -> None:
    slow, fast = (device_of(("a", 15), ("b", 15), bandwidth=bandwidth) for bandwidth in (3e9, 48e9))
    slow.run(10000.0)
    fast.run(10000.0)
    assert len(fast.switches) > 8 * len(slow.switches)
    assert max(fast.jobs["a"].waits[3:]) < max(slow.jobs["a"].waits[3:]) / 8


def test_little_pressure_makes_short_time_slices() -> None:
    """Two of 8.5 GiB on 16: only the one GiB that does not fit moves, so time slices can be short."""
    much, little = device_of(("a", 15), ("b", 15)), device_of(("a", 8.5), ("b", 8.5))
    much.run(5000.0)
    little.run(5000.0)
    assert max(little.jobs["a"].waits[3:]) < max(much.jobs["a"].waits[3:]) / 10


def test_nobody_waits_longer_than_a_round() -> None:
    device = device_of(("a", 15), ("b", 15), ("c", 15))
    device.run(20000.0)
    hand_off = 2 * 15 * GIB / 12e9 + 0.001
    round_seconds = 3 * hand_off / 0.025
    for job in device.jobs.values():
        assert max(job.waits[5:]) < round_seconds * 2 / 3 + 3 * hand_off


def test_every_wait_is_within_the_stated_bound() -> None:
    weights = {"a": 1, "b": 30, "c": 70}
    device = VirtualGpu(GpuArbiter(16 * GIB))
    for name, weight in weights.items():
        device.session(name, weight)
        device.start(Job(name, name, 12 * GIB, forever()))
    device.run(30000.0)
    hand_off = dict.fromkeys(weights, 2 * 12 * GIB / 8e9 + 0.001)
    bound = longest_wait(weights, hand_off, ArbiterSettings())
    for job in device.jobs.values():
        assert len(job.waits) > 3
        assert job.longest_wait < bound


def test_a_released_session_that_asks_is_served_all_the_same() -> None:
    device = device_of(("a", 12))
    device.session("b", 50)
    device.set_weight("b", 0)
    job = device.start(Job("b", "b", 12 * GIB, forever()))
    device.run(30000.0)
    assert 0 < job.gpu_seconds < 0.05 * 30000


def test_a_short_burst_after_a_pause_is_served_soon() -> None:
    device = device_of(("training", 12))
    device.session("user", 50)
    user = device.start(Job("user", "user", 8 * GIB, alternating(600.0, 0.5)))
    device.run(6000.0)
    assert len(user.waits) >= 9
    assert max(user.waits) < 1.0


@pytest.mark.slow
def test_many_short_bursts_cost_no_more_than_the_bound_for_interactive_sessions() -> None:
    device = device_of(("training", 15))
    device.session("user", 50)
    user = device.start(Job("user", "user", 15 * GIB, alternating(10.0, 0.5)))
    device.run(20000.0)
    assert len(user.waits) > 50
    assert max(user.waits) < 60
    assert 20000.0 - device.used_seconds < 0.20 * 20000 + 20


def test_long_bursts_get_no_credit() -> None:
    device = device_of(("a", 15))
    device.session("b", 50)
    b = device.start(Job("b", "b", 15 * GIB, alternating(8.0, 20.0)))  # a program's pauses between its phases
    device.run(4000.0)
    assert sorted(b.waits)[len(b.waits) // 2] > 50.0


def test_a_newcomer_does_not_disturb_one_that_has_just_begun() -> None:
    arbiter = GpuArbiter(16 * GIB)
    for name in "ab":
        arbiter.add_session(name, 50, 0.0)
        arbiter.connect(name, name, 0.0)
    (grant,) = arbiter.request("a", 12 * GIB, 0, 0.0)
    assert isinstance(grant, LeaseGrant)
    assert arbiter.request("b", 12 * GIB, 0, 0.1) == []
    wakeup = present(arbiter.next_wakeup())
    assert wakeup == pytest.approx(2 * 8 * GIB / 8e9 + 0.001 + 0.1)  # as long as the hand-off costs, and a little
    (revoke,) = arbiter.tick(wakeup)
    assert isinstance(revoke, Revoke)
    assert revoke.reason is RevokeReason.GUARANTEE


def test_a_time_slice_that_was_over_before_any_client_waited_ends_at_once() -> None:
    arbiter = GpuArbiter(16 * GIB, ArbiterSettings(hand_off_credit=0.0))
    for name in "ab":
        arbiter.add_session(name, 50, 0.0)
        arbiter.connect(name, name, 0.0)
    arbiter.request("a", 12 * GIB, 0, 0.0)
    (revoke,) = arbiter.request("b", 12 * GIB, 0, 5000.0)
    assert isinstance(revoke, Revoke)
    assert revoke.reason is RevokeReason.TIME_SLICE


def test_the_holder_with_the_best_right_goes_on_without_a_hand_off() -> None:
    device = VirtualGpu(GpuArbiter(16 * GIB, ArbiterSettings(exclusive=True)))
    for name, weight in (("a", 10), ("b", 90)):
        device.session(name, weight)
        device.start(Job(name, name, GIB, forever()))
    device.run(100.0)
    # a time slice lasts at least 0.1 s; one that goes on is no switch
    assert len(device.switches) < 300


def test_time_slices_are_parts_of_a_round() -> None:
    settings = ArbiterSettings()
    lengths = TimeSliceLengths.plan({"a": 30, "b": 70}, {"a": 2.5, "b": 2.5}, settings, 0.025)
    assert lengths.round_seconds == pytest.approx(200)
    assert lengths.by_session == pytest.approx({"a": 60, "b": 140})
    shorter = TimeSliceLengths.plan({"a": 30, "b": 70}, {"a": 2.5, "b": 2.5}, settings, 0.2)
    assert shorter.by_session == pytest.approx({"a": 7.5, "b": 17.5})
    tiny = TimeSliceLengths.plan({"a": 1, "b": 99}, {"a": 2.5, "b": 2.5}, settings, 0.025)
    assert tiny.by_session["a"] == pytest.approx(2.6)


def test_bandwidth_is_learned_from_large_transfers() -> None:
    bandwidth = Bandwidth(ArbiterSettings(bandwidth_guess=8e9))
    assert bandwidth.value == 8e9
    bandwidth.learn("a", 4096, 1.0)
    bandwidth.learn("a", 10**9, 0.0)
    assert bandwidth.value == 8e9
    bandwidth.learn("a", 10**10, 1.0)
    assert bandwidth.value == pytest.approx(10e9)
    for _ in range(50):
        bandwidth.learn("a", 2 * 10**10, 1.0)
    assert bandwidth.value == pytest.approx(20e9, rel=0.01)
    for _ in range(50):
        bandwidth.learn("a", 10**10, 1e-9)
    assert bandwidth.value == pytest.approx(4 * 8e9)  # one session alone is believed up to four times the guess


def test_credit_refills_at_the_rate_of_the_bound() -> None:
    credit = HandOffCredit(ArbiterSettings(hand_off_credit=5.0), 0.025)
    assert credit.wait_for(3.0) == 0.0
    assert credit.wait_for(50.0) == 0.0
    credit.spend(6.0)
    assert credit.wait_for(0.0) == pytest.approx(40.0)
    credit.refill(80.0)
    assert credit.seconds == pytest.approx(1.0)
    credit.refill(1e9)
    assert credit.seconds == 5.0


@pytest.mark.parametrize("weights", [(50, 50), (30, 70), (10, 20, 70), (5, 15, 30, 50)])
def test_lag_is_bounded_by_the_longest_time_slice(weights: tuple[int, ...]) -> None:
    device = VirtualGpu(GpuArbiter(16 * GIB))
    for index, weight in enumerate(weights):
        device.session(str(index), weight)
        device.start(Job(str(index), str(index), 12 * GIB, forever()))
    device.run(2000.0)  # past the first time slices, whose hand-offs were guessed
    beyond: list[str] = []

    def watch(seen: VirtualGpu) -> None:
        longest = max(seen.arbiter._schedule.lengths.by_session.values())
        beyond.extend(
            session
            for session in seen.arbiter._schedule.lengths.by_session
            if abs(seen.arbiter._accounts.lag(session)) > 1.05 * longest
        )

    device.watchers.append(watch)
    device.run(10000.0)
    assert not beyond
