"""What hand-offs cost, and the credit for time slices that end early: figure by figure."""

from __future__ import annotations

import math

import pytest

from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.arbiter.time_slices import (
    FASTEST,
    SLOWEST,
    TRUST,
    Bandwidth,
    HandOffCost,
    HandOffCredit,
    SuspensionTimes,
    TimeSliceLengths,
)

MIB = 2**20
GIB = 2**30
SETTINGS = ArbiterSettings(
    bandwidth_guess=8e9, bandwidth_memory=0.75, measured_from=16 * MIB, switch_seconds=0.5, hand_off_credit=10.0,
    overhead_bound=0.025,
)  # fmt: skip


def measured(*rates: float) -> Bandwidth:
    """Of as many sessions, each with one measurement in bytes per second."""
    bandwidth = Bandwidth(SETTINGS)
    for number, rate in enumerate(rates):
        bandwidth.learn(str(number), GIB, GIB / rate)
    return bandwidth


def test_before_the_first_measurement_the_guess_holds() -> None:
    assert measured().value == 8e9


@pytest.mark.parametrize(
    ("rate", "believed"), [(4e9, 4e9), (12e9, 12e9), (31e9, 31e9), (33e9, 32e9), (2.1e9, 2.1e9), (1.9e9, 2e9)]
)
def test_one_session_alone_is_believed_up_to_four_times_the_guess_and_down_to_a_quarter(
    rate: float, believed: float
) -> None:
    assert TRUST == 4
    assert measured(rate).value == pytest.approx(believed)


def test_of_two_sessions_the_guess_is_the_third_and_of_more_the_median_counts() -> None:
    assert measured(4e9, 20e9).value == pytest.approx(8e9)
    assert measured(10e9, 20e9).value == pytest.approx(10e9)
    assert measured(1e9, 4e9).value == pytest.approx(4e9)
    assert measured(1e9, 4e9, 100e9).value == pytest.approx(4e9)
    # the median of four is half-way between the seconds per byte of the two in the middle
    assert measured(1e9, 4e9, 12e9, 100e9).value == pytest.approx(6e9)


def test_each_sessions_measurements_are_averaged_by_time_and_the_old_ones_weigh_more() -> None:
    bandwidth = measured(10e9)
    bandwidth.learn("0", GIB, GIB / 5e9)
    assert bandwidth.value == pytest.approx(1 / (0.75 / 10e9 + 0.25 / 5e9))


def test_small_transfers_and_times_of_zero_say_nothing() -> None:
    bandwidth = Bandwidth(SETTINGS)
    bandwidth.learn("a", 16 * MIB - 1, 1e-3)
    bandwidth.learn("a", GIB, 0.0)
    bandwidth.learn("a", GIB, -1.0)
    assert bandwidth.value == 8e9
    bandwidth.learn("a", 16 * MIB, 16 * MIB / 10e9)
    assert bandwidth.value == pytest.approx(10e9)


def test_measurements_that_no_bus_gives_are_cut() -> None:
    for amount, seconds, cut in ((2**63, 1.0, FASTEST), (GIB, 1e9, SLOWEST)):
        bandwidth = Bandwidth(SETTINGS)
        for session in "abc":
            bandwidth.learn(session, amount, seconds)
        assert bandwidth.value == pytest.approx(cut)


def test_what_a_session_measured_is_forgotten_with_it() -> None:
    cost = HandOffCost(SETTINGS)
    for bandwidth in (cost.bandwidth_in, cost.bandwidth_out):
        bandwidth.learn("a", GIB, GIB / 10e9)
        assert bandwidth.value == pytest.approx(10e9)
    cost.forget("a")
    cost.forget("nobody")
    assert cost.bandwidth_in.value == cost.bandwidth_out.value == 8e9


def hand_off(rate_in: float, rate_out: float) -> HandOffCost:
    cost = HandOffCost(SETTINGS)
    cost.bandwidth_in.learn("a", GIB, GIB / rate_in)
    cost.bandwidth_out.learn("a", GIB, GIB / rate_out)
    return cost


@pytest.mark.parametrize(("rate_in", "rate_out"), [(4e9, 16e9), (16e9, 4e9)])
def test_a_hand_off_one_way_after_the_other_takes_both_times_and_the_switch(rate_in: float, rate_out: float) -> None:
    cost = hand_off(rate_in, rate_out)
    assert cost.sequential(16 * 10**9) == pytest.approx(0.5 + 4 + 1)
    assert cost.sequential(0) == 0.5


@pytest.mark.parametrize(("rate_in", "rate_out"), [(4e9, 16e9), (16e9, 4e9)])
def test_a_hand_off_overlapped_takes_the_time_of_the_slower_way(rate_in: float, rate_out: float) -> None:
    assert hand_off(rate_in, rate_out).overlapped(16 * 10**9) == pytest.approx(0.5 + 4)


def test_the_credit_is_full_at_first_and_refills_at_the_rate_of_the_overhead_bound_up_to_its_size() -> None:
    credit = HandOffCredit(SETTINGS, SETTINGS.overhead_bound)
    assert credit.seconds == 10
    credit.refill(100)
    assert credit.seconds == 10
    credit.spend(4)
    credit.refill(40)
    assert credit.seconds == pytest.approx(7)
    credit.refill(1000)
    assert credit.seconds == 10


def test_a_hand_off_waits_until_the_credit_holds_its_cost() -> None:
    credit = HandOffCredit(SETTINGS, SETTINGS.overhead_bound)
    assert credit.wait_for(10) == 0
    # more than the bucket holds may be spent when it is full
    assert credit.wait_for(50) == 0
    credit.spend(12)
    assert credit.seconds == -2
    assert credit.wait_for(3) == pytest.approx(5 / 0.025)
    assert credit.wait_for(50) == pytest.approx(12 / 0.025)


def test_a_bucket_that_holds_nothing_never_pays_a_hand_off_and_always_pays_none() -> None:
    settings = ArbiterSettings(hand_off_credit=0.0)
    credit = HandOffCredit(settings, settings.overhead_bound)
    assert credit.wait_for(1e-9) == math.inf
    assert credit.wait_for(0) == 0


def test_a_time_slice_is_the_sessions_part_of_a_round_that_is_worth_all_hand_offs() -> None:
    lengths = TimeSliceLengths.plan({"a": 75, "b": 25}, {"a": 0.2, "b": 0.3}, SETTINGS, bound=0.05)
    assert lengths.round_seconds == pytest.approx(10.0)
    assert lengths.by_session == pytest.approx({"a": 7.5, "b": 2.5})


def test_a_time_slice_lasts_for_the_least_time_beyond_its_own_hand_off() -> None:
    lengths = TimeSliceLengths.plan({"a": 99, "b": 1}, {"a": 0.2, "b": 0.3}, SETTINGS, bound=0.05)
    assert lengths.by_session == pytest.approx({"a": 9.9, "b": 0.4})


def test_moves_of_whole_sessions_cost_what_each_session_measured() -> None:
    moves = SuspensionTimes(SETTINGS)
    assert moves.seconds("new", 8 * 10**9) == pytest.approx(8e9 / SETTINGS.bandwidth_guess)
    for name, amount, seconds in (("large", 15 * 10**9, 3.5), ("small", 10**8, 0.52)):
        moves.learn(name, amount, seconds)
        assert moves.seconds(name, amount) == pytest.approx(seconds)
        assert moves.seconds(name, 0) == 0.0
    assert moves.seconds("small", 10**9) < 1.0  # most of its time does not depend on the size
    assert moves.seconds("large", 30 * 10**9) == pytest.approx(7.0, rel=0.05)
    assert moves.seconds("new", 15 * 10**9) == pytest.approx(3.5, rel=0.2)
    moves.learn("large", 0, 1.0)
    moves.forget("small")
    assert moves.seconds("small", 15 * 10**9) == pytest.approx(3.5)
