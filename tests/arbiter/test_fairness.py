"""Virtual time, lag and order by themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.arbiter.fairness import FairOrder


def competing(**weights: int) -> FairOrder:
    fair = FairOrder()
    for name, weight in weights.items():
        fair.add(name, weight)
    for name in weights:
        fair.join(name, 1.0)
    return fair


def test_what_one_has_had_too_much_the_others_are_owed() -> None:
    fair = competing(a=30, b=70)
    fair.charge("a", 10.0)
    assert fair.lag("a") == pytest.approx(-7.0)
    assert fair.lag("b") == pytest.approx(7.0)
    assert not fair.eligible("a")
    assert fair.eligible("b")


def test_the_eligible_come_first_each_by_its_deadline() -> None:
    fair = competing(a=10, b=10, c=20)
    requests = dict.fromkeys("abc", 1.0)
    assert fair.order("abc", requests) == ["c", "a", "b"]
    fair.charge("c", 1.0)
    assert fair.order("abc", requests) == ["a", "b", "c"]


@pytest.mark.parametrize("owed", [-0.5, 0.5])
def test_a_moment_away_changes_nothing(owed: float) -> None:
    fair = competing(a=30, b=50, c=20)
    fair.charge("a", -owed)
    before = {name: fair.lag(name) for name in "abc"}
    fair.leave("a")
    fair.join("a", 10.0)
    assert {name: fair.lag(name) for name in "abc"} == pytest.approx(before)


def test_a_debt_is_paid_off_while_away() -> None:
    fair = competing(a=50, b=50)
    fair.charge("a", 10.0)
    fair.leave("a")
    fair.charge("b", 1000.0)
    fair.join("a", 10.0)
    assert fair.lag("a") == pytest.approx(0.0)


def test_nothing_is_earned_while_away() -> None:
    fair = competing(a=50, b=50)
    fair.charge("b", 10.0)
    owed = fair.lag("a")
    fair.leave("a")
    fair.charge("b", 1000.0)
    fair.join("a", 100.0)
    assert fair.lag("a") == pytest.approx(owed)


def test_no_more_than_one_request_is_owed_on_return() -> None:
    fair = competing(a=50, b=50)
    fair.charge("b", 1000.0)
    fair.leave("a")
    fair.join("a", 2.0)
    assert fair.lag("a") == pytest.approx(2.0)


@pytest.mark.parametrize("weight", [1, 40, 100])
def test_a_weight_change_leaves_the_lag(weight: int) -> None:
    fair = competing(a=30, b=70)
    fair.charge("a", 10.0)
    fair.set_weight("a", weight)
    assert fair.lag("a") == pytest.approx(-7.0)
    assert fair.lag("b") == pytest.approx(7.0)


def test_forgiving_and_forgetting_have_their_bounds() -> None:
    fair = competing(a=50, b=50)
    fair.charge("a", 1000.0)
    fair.forgive("a", 10.0)
    assert -500.0 < fair.lag("a") < 0.0
    fair = competing(a=50, b=50)
    fair.charge("b", 1000.0)
    fair.forget("a", 10.0)
    assert fair.lag("a") == pytest.approx(5.0)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from(["join", "leave", "charge", "weigh"]), st.integers(1, 100))
    )
)
def test_lags_always_add_up_to_nothing(events: list[tuple[str, str, int]]) -> None:
    fair = FairOrder()
    for name in "abcd":
        fair.add(name, 25)
    for name, event, number in events:
        if event == "join":
            fair.join(name, float(number))
        elif event == "leave":
            fair.leave(name)
        elif event == "charge":
            fair.charge(name, float(number))
        else:
            fair.set_weight(name, number)
        lags = [fair.lag(name) for name in "abcd"]
        assert sum(lags) == pytest.approx(0.0, abs=1e-6 * (1 + sum(abs(lag) for lag in lags)))


def test_strangers_are_errors() -> None:
    with pytest.raises(KeyError):
        FairOrder().join("nobody", 1.0)
