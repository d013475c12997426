"""What a session was entitled to and received: sums and waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.report import BOUNDS, Delivered, WaitCounts

SECONDS = st.floats(min_value=1e-6, max_value=5000)


def counted(seconds: list[float]) -> Delivered:
    waits = WaitCounts()
    for one in seconds:
        waits.add(one)
    return Delivered(waits=waits.counts)


@given(st.lists(SECONDS, min_size=1), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_a_quantile_is_never_below_the_true_one_and_at_most_half_as_much_above_it(
    seconds: list[float], part: float
) -> None:
    ordered = sorted(seconds)
    true = ordered[max(0, -(-int(part * 1000) * len(ordered) // 1000) - 1)]
    said = counted(seconds).wait_quantile(part)
    assert max(true, 0.001) <= said * (1 + 1e-9)
    assert said <= max(true, 0.001) * 1.5 * (1 + 1e-9)


def test_a_request_that_is_granted_at_once_is_no_wait() -> None:
    assert counted([0.0, 0.0]) == Delivered()
    assert counted([0.0, 0.0]).wait_quantile(0.5) == 0.0


def test_a_wait_beyond_all_bounds_counts_as_the_longest() -> None:
    assert counted([1e9]).wait_quantile(0.5) == BOUNDS[-1]


@pytest.mark.parametrize("odd", [float("nan"), -1.0, float("-inf")])
def test_a_wait_that_is_no_length_of_time_is_not_counted(odd: float) -> None:
    assert counted([odd]).wait_count == 0


@given(st.lists(SECONDS), st.lists(SECONDS))
def test_sums_add_up_and_can_be_taken_apart(before: list[float], after: list[float]) -> None:
    first, second = counted(before), counted(after)
    both = Delivered(2.0, 1.0, first.waits).plus(Delivered(3.0, 4.0, second.waits))
    assert (both.entitled_seconds, both.delivered_seconds) == (5.0, 5.0)
    assert both.waits == counted(before + after).waits
    since = both.minus(Delivered(2.0, 1.0, first.waits))
    assert (since.entitled_seconds, since.delivered_seconds) == (3.0, 4.0)
    assert since.wait_count == len(after)


def test_what_is_taken_away_never_leaves_less_than_nothing() -> None:
    assert Delivered(1.0, 1.0, (1,)).minus(Delivered(2.0, 2.0, (3, 4))) == Delivered(0.0, 0.0, (0, 0))
